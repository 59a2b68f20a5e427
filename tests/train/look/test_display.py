"""The view of a plain run, and what is said beside it."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from tests.train.look.test_live import drawn
from tpuswarm.train.look.describe import ParameterRow
from tpuswarm.train.look.display import LiveDisplay, Opening, Picture, draw, parameter_table

WIDE = "a-run-with-a-name-that-is-longer-than-any-terminal-" * 4
PICTURE = Picture(
    "gpt2-tiny on 8 x cpu", "runs/demo", 840, 2_000, 768, "tokens", 27.4, 2.71731, 2.6204, 800, (3.0, 2.0)
)


@pytest.mark.parametrize("width", [80, 120])
def test_everything_is_said(width):
    text = "\n".join(drawn(draw(PICTURE, 31.0, width, 16), width))
    for words in (
        "gpt2-tiny on 8 x cpu: runs/demo", " 42%", "840 of 2,000 steps", "0:00:31 elapsed", "0:00:42 left",
        "27.4 steps/s", "21,043 tokens/s", "loss 2.717 ", "held-out loss 2.620 at step 800", "█▁",
    ):  # fmt: skip
        assert words in text
    assert all(len(line) <= width for line in text.splitlines())
    long = drawn(draw(replace(PICTURE, run=WIDE), 31.0, width, 16), width)
    assert WIDE in "".join(long)


def test_nothing_jumps_from_frame_to_frame():
    frames = [
        drawn(draw(replace(PICTURE, step=step, per_second=speed, loss=loss), seconds, 80, 16))
        for step, speed, loss, seconds in ((1, None, 11.5, 2), (99, 0.5, 0.01234, 60), (1_999, 1_234.5, 2.0, 3_599))
    ]
    for words in (" of 2,000 steps", " elapsed", " left", " tokens/s", "held-out loss"):
        assert len({(row, line.index(words)) for each in frames for row, line in enumerate(each) if words in line}) == 1


def test_a_run_that_ended_has_no_speed_and_no_time_left():
    text = "\n".join(drawn(draw(replace(PICTURE, per_second=None, ended=True), 31.0, 80, 16)))
    assert "0:00:31 elapsed" in text and " left" not in text and "steps/s" not in text and "tokens/s" not in text


def test_rows_are_not_called_tokens():
    assert "21,043 rows/s" in "\n".join(drawn(draw(replace(PICTURE, unit="rows"), 31.0, 80, 16)))


def parameter(number, **about):
    facts = {"dtype": "float32", "sharding": "replicated", "frozen": False, "decayed": True, "tied": ""} | about
    facts.setdefault("statistic", False)
    return ParameterRow(path=f"blocks/attention/{number}/w", shape=(48, 1600, 6400), bytes_per_device=2**31, **facts)


@pytest.mark.parametrize("width", [80, 120])
def test_no_parameter_is_cut(width):
    rows = [parameter(number, sharding="axis 1 / 8" if number % 2 else "replicated") for number in range(40)]
    lines = drawn(parameter_table([*rows, parameter("tied", tied="head")], width), width)
    assert all(any(line.startswith(f"{each.path} ") for line in lines) for each in rows) and "…" not in "".join(lines)
    assert "axis 1 / 8" in "".join(lines) and "frozen" not in lines[0] and lines[-1].strip() == "all float32"


def test_what_differs_has_a_column():
    assert "statistic" in drawn(parameter_table([parameter(1), parameter(2, statistic=True)], 120), 120)[0]
    head = drawn(parameter_table([parameter(1), parameter(2, dtype="bfloat16", frozen=True)], 120), 120)[0]
    assert head.split() == ["parameter", "shape", "dtype", "frozen", "decayed", "KiB/device"]


@pytest.mark.parametrize("colours", [True, False])
def test_pictures_need_colours(colours):
    console = Console(width=80, height=24, force_terminal=True, color_system="256", no_color=not colours)
    console.file = io.StringIO()
    live = LiveDisplay(console)
    live.open(Opening("a", "cpu", "runs/a", 0, 2, 1, "rows", (), ()))
    live.picture(np.full((8, 8, 3), 200, np.uint8))
    live.row({"step": 1, "loss": 1.0})
    live.close()
    assert ("▀" in console.file.getvalue()) == colours


def test_what_the_model_makes_is_shown_as_far_as_there_is_room():
    """Each letter is two pixels, one above the other; the upper part of the picture, as wide as the view."""
    made = np.zeros((256, 256, 3), np.uint8)
    made[:32, :128] = (255, 0, 0)
    shown = draw(replace(PICTURE, made=made), 31.0, 80, 16)
    lines = drawn(shown, 80)
    blocks = [line for line in lines if line.startswith("▀")]
    assert len(blocks) == 10 and all(len(line.rstrip()) == 80 for line in blocks)
    console = Console(width=80, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(shown)
    assert console.file.getvalue().count("38;2;255;0;0") > 0
    assert not [line for line in drawn(draw(replace(PICTURE, made=made), 31.0, 80, 6), 80) if "▀" in line]
    small = drawn(draw(replace(PICTURE, made=made[:8, :8]), 31.0, 80, 16), 80)
    assert [len(line.rstrip()) for line in small if "▀" in line] == [8] * 4
