"""`--help`, `-h` and `--version`; the commands in their examples exist."""

import importlib.metadata
import re
import shlex

import pytest
import typer

from tpuswarm.cli.app import SUMMARIES, make_app
from tpuswarm.cli.examples import EXAMPLES
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.user_code import option_types

ROOT = typer.main.get_command(make_app())
COMMANDS = {
    f"{name} {under}".rstrip(): command
    for name, top in ROOT.commands.items()
    for under, command in getattr(top, "commands", {"": top}).items()
}


def test_every_command_has_examples():
    assert EXAMPLES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("words", COMMANDS)
def test_examples_use_options_that_exist(words):
    command = COMMANDS[words]
    for example in EXAMPLES[words]:
        program, *rest = shlex.split(example)
        assert program == "tpuswarm" and rest[: len(words.split())] == words.split(), example
        context = command.make_context(words, rest[len(words.split()) :], resilient_parsing=True)
        recipes_own = {word for word in context.args if word.startswith("--")}
        known = {f"--{name.replace('_', '-')}" for kind in (GPT2, Decoder) for name in option_types(kind)}
        assert recipes_own <= known, example
        required = [param for param in command.params if param.required]
        assert all(context.params[item.name] is not None for item in required), example


@pytest.mark.parametrize("words", ["", *COMMANDS])
def test_help_fits_its_terminal_and_shows_examples_that_can_be_copied(typed, words, monkeypatch):
    examples = EXAMPLES.get(words, ())
    for option, width in (("-h", 80), ("--help", 40)):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = typed(*words.split(), option)
        assert (code, err) == (0, "") and all(example in out for example in examples)
        too_long = [line for line in out.splitlines() if len(line) > width]
        assert not too_long or (width < 80 and {line.strip() for line in too_long} <= {*examples}), too_long
        assert not re.search(r" <|[{]|\[\[", out), "how typer writes types and arguments"


def test_list_of_commands_fits_a_screen_with_a_prompt(typed):
    code, out, _ = typed()
    assert code == 0 and len(out.splitlines()) < 24 and max(map(len, out.splitlines())) <= 80
    assert all(re.search(rf"[ ,]{name}\b", out) for name in ROOT.commands)
    assert "          down     Delete a fleet, or one of its machines\n" in out


@pytest.mark.parametrize("name", SUMMARIES)
def test_summary_in_the_list_of_commands_begins_the_commands_own_help(name):
    assert ROOT.commands[name].get_short_help_str(limit=1_000).startswith(SUMMARIES[name])


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_lists_a_recipes_options(typed, command):
    _, out, _ = typed(command, "gpt2-tiny", "--help")
    assert all(f"--{name} NUMBER" in out for name in ("lr-end", "beta2", "weight-decay"))
    for recipe, defaults in (
        ("gpt2-tiny", {"lr NUMBER": "0.001", "lr-end NUMBER": "0.0001", "layers NUMBER": "4", "beta2 NUMBER": "0.99"}),
        ("gpt2-xl", {"lr NUMBER": "0.0002", "layers NUMBER": "48", "vocab NUMBER": "50257", "tokenizer TEXT": "gpt2"}),
        ("gpt2-124m", {"lr-end NUMBER": "6e-05"}),
        ("stylegan2-32", {"lr NUMBER": "0.004", "r1 NUMBER": "1"}),
        ("stylegan2-64", {"lr NUMBER": "0.0025", "latent NUMBER": "512", "channels NUMBER": "256"}),
    ):
        out = " ".join(typed(command, recipe, "--help")[1].split())
        for name, value in defaults.items():
            assert re.search(rf"--{name} ((?! --).)*Default: {re.escape(value)}\.", out), (name, out)
    assert "--moments TEXT bf16 halves the first moment" in " ".join(typed(command, "gpt2-tiny", "--help")[1].split())
    assert "gpt2-tiny" in typed(command, "--help")[1]
    assert "did you mean gpt2-tiny?" in typed(command, "gpt2-tini", "--help")[1]


def test_version(typed):
    code, out, _ = typed("--version")
    assert code == 0 and f"tpuswarm {importlib.metadata.version('tpuswarm')}" in out
