"""Text is shown as a model sees it: short, without control characters, and with the part that counts marked."""

import io

import pytest
from rich.console import Console

from tpuswarm.train.look.preview import print_preview

CHAT = [("<s>user\nHi\x1b[2J", False), ("[Größe] 日本\n", True), ("</s>", False)]


def shown(pieces, **options):
    console = Console(file=io.StringIO(), highlight=False, **{"width": 80, "_environ": {}} | options)
    print_preview(console, [pieces] if pieces else [])
    return console.file.getvalue()


def test_pipe_marks_what_counts_with_brackets_and_escapes_control_characters():
    assert shown(CHAT) == (
        "the first row of the data as the model sees it; the loss counts what is in [[ ]]:\n"
        "  <s>user\\nHi\\x1b[2J[[[Größe] 日本\\n]]</s>\n"
    )
    assert shown([]) == ""


@pytest.mark.parametrize(("options", "is_coloured"), [({}, True), ({"no_color": True}, False)])
def test_terminal_shows_what_counts_in_green(options, is_coloured):
    text = shown(CHAT, force_terminal=True, color_system="standard", **options)
    assert ("\x1b[1;32m[Größe] 日本\\n\x1b[0m" in text) == is_coloured
    assert ("[[" in text) != is_coloured and "\x1b[2J" not in text


@pytest.mark.parametrize("width", [40, 80, 10_000])
def test_long_text_takes_six_lines_and_keeps_the_ends_of_its_parts(width):
    pieces = [("a" * 5000 + "user?", False), ("Yes" + " b" * 5000, True)] * 9
    lines = shown(pieces, width=width).splitlines()
    text = "".join(line[2:] for line in lines[1:])
    assert len(lines) == 6 and all(len(line) <= min(width, 120) for line in lines[1:]) and lines[-1].endswith("…")
    assert text.startswith("a" * 60 + " … " + "a" * 55 + "user?[[Yes b b")


def test_wide_letters_take_two_columns():
    lines = shown([("日本" * 40, True)], width=41).splitlines()[1:]
    assert [len(line) for line in lines[:4]] == [22, 21, 21, 21] and lines[0].startswith("  [[日")


def test_each_data_set_has_lines_of_its_own():
    console = Console(file=io.StringIO(), highlight=False, width=80, _environ={})
    print_preview(console, [[("a: ", False), ("text", True)], [("b: ", False)]])
    assert console.file.getvalue() == (
        "the first row of each data set as the model sees it; the loss counts what is in [[ ]]:\n  a: [[text]]\n  b: \n"
    )
