"""What `--help`, `-h` and `--version` show, and that every example in them is a command that exists."""

import importlib.metadata
import re
import shlex

import pytest
import typer

from tpuswarm.cli.app import make_app
from tpuswarm.cli.examples import EXAMPLES
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.user_code import option_types

ROOT = typer.main.get_command(make_app())
COMMANDS = {
    words: command
    for name, each in ROOT.commands.items()
    for words, command in (
        {f"{name} {under}": inner for under, inner in each.commands.items()}
        if hasattr(each, "commands")
        else {name: each}
    ).items()
}


def test_every_command_has_examples_and_every_example_a_command():
    assert EXAMPLES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("words", COMMANDS)
def test_an_examples_options_and_arguments_are_the_commands(words):
    command = COMMANDS[words]
    for example in EXAMPLES[words]:
        program, *rest = shlex.split(example)
        assert program == "tpuswarm" and rest[: len(words.split())] == words.split(), example
        context = command.make_context(words, rest[len(words.split()) :], resilient_parsing=True)
        recipes_own = {word for word in context.args if word.startswith("--")}
        assert recipes_own <= {f"--{name.replace('_', '-')}" for name in option_types(GPT2)}, example
        required = [each for each in command.params if each.required]
        assert all(context.params[each.name] is not None for each in required), example


@pytest.mark.parametrize("words", ["", *COMMANDS])
def test_help_fits_80_columns_and_shows_its_examples(typed, words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = typed(*words.split(), "-h")
    assert (code, err) == (0, "")
    assert all(example in out for example in EXAMPLES.get(words, ()))
    assert max(map(len, out.splitlines())) <= 80, max(out.splitlines(), key=len)
    assert not re.search(r" <|[{]|\[\[", out), "how typer writes types and arguments"
    assert typed(*words.split(), "--help") == (0, out, "")


def test_all_commands_fit_a_screen(typed):
    """With the line of the shell under them."""
    code, out, _ = typed()
    assert code == 0 and len(out.splitlines()) < 24 and max(map(len, out.splitlines())) <= 80
    assert all(re.search(rf"[ ,]{name}\b", out) for name in ROOT.commands)
    assert "          down     Delete a fleet, or one of its machines\n" in out


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_recipes_own_options_are_in_the_help(typed, command):
    _, out, _ = typed(command, "gpt2-tiny", "--help")
    assert all(f"--{name} NUMBER" in out for name in ("lr-end", "beta2", "weight-decay"))
    assert "gpt2-tiny" in typed(command, "--help")[1]
    assert "did you mean gpt2-tiny?" in typed(command, "gpt2-tini", "--help")[1]


def test_the_version(typed):
    code, out, _ = typed("--version")
    assert code == 0 and f"tpuswarm {importlib.metadata.version('tpuswarm')}" in out


@pytest.mark.parametrize("wrong,right", [("--learning-rate", "--lr"), ("--batch-size", "--batch")])
def test_the_name_that_other_programs_give_an_option_finds_ours(typed, wrong, right):
    code, _, err = typed("train", "gpt2-tiny", wrong, "1")
    assert code == 2 and err.endswith(f"did you mean {right}?\n")


def test_an_option_like_none_that_there_is_gets_no_suggestion(typed):
    code, _, err = typed("train", "gpt2-tiny", "--bogus", "1")
    assert code == 2
    assert err == (
        "error: neither train nor gpt2-tiny has an option --bogus; `tpuswarm train gpt2-tiny --help` lists them\n"
    )
