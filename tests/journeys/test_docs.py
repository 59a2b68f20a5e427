"""Links in README.md and docs/ lead somewhere, and the commands, options, files and functions they name exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer
from benchmarks.__main__ import NAMES

from tests.journeys.documents import DOCUMENTS, ROOT, anchors, blocks, links, named_commands, named_options
from tpuswarm.cli.app import make_app
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.user_code import option_types

OTHER_OPTIONS = {
    "--clear-soft-delete", "--init", "--logdir", "--net", "--no-tls-verify", "--peers", "--privileged", "--quick",
    "--rm", "--url",
}  # fmt: skip
"""Options of other programs and of our benchmarks."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(document: Path):
    for link in links(document):
        place, _, anchor = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        assert target.exists(), f"{document.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{document.name} links to {link}: no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_options_and_commands_exist(document: Path):
    text = document.read_text(encoding="utf-8")
    shown = {
        f"--{name.replace('_', '-')}"
        for block in blocks(document)
        if block.language == "python"
        for name in re.findall(r"(\w+): (?:int|float|str|bool)\b", block.text)
    }
    options, commands = known_names()
    unknown = named_options(text) - options - shown - OTHER_OPTIONS
    assert not unknown, f"{document.name} names options that do not exist: {sorted(unknown)}"
    wrong = named_commands(document) - commands
    assert not wrong, f"{document.name} names commands that do not exist: {sorted(wrong)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_benchmarks_exist(document: Path):
    text = document.read_text(encoding="utf-8")
    named = {name for names in re.findall(r"`python -m benchmarks((?: [a-z]\w*)+)", text) for name in names.split()}
    assert named <= set(NAMES), f"{document.name} names benchmarks that do not exist: {sorted(named - set(NAMES))}"


@cache
def known_names() -> tuple[set[str], set[str]]:
    commands = [app := typer.main.get_command(make_app())]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
    flags = {flag for command in commands for parameter in command.params for flag in parameter.opts}
    ours = {f"--{name.replace('_', '-')}" for recipe in (GPT2, Decoder, StyleGAN2) for name in option_types(recipe)}
    return {"--help"} | flags | ours, set(app.commands)


@pytest.mark.parametrize("name", ["architecture.md", "protocol.md"])
def test_named_files_and_functions_exist(name: str):
    """`train/loop.py` is a file of the package; `train/loop.py:Loop.run` is defined in it."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    references = re.findall(r"`([\w/.]+/)(\w+\.py)?(?::([\w.]+))?`", text)
    assert references
    for folder, file, definition in references:
        place = next(
            (base / folder / file for base in (ROOT / "src/tpuswarm", ROOT) if (base / folder / file).exists()), None
        )
        assert place, f"{name} names {folder}{file}, which is not there"
        assert not definition or definition in definitions(place), (
            f"{name}: {folder}{file} does not define {definition}"
        )


def definitions(path: Path) -> set[str]:
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def test_each_guarantee_names_tests_that_exist():
    relied_on = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").partition("## What you cannot rely on")[0]
    guarantees = relied_on.split("\n- ")[1:]
    assert len(guarantees) > 20
    for guarantee in guarantees:
        files = re.findall(r"`([\w/]+\.py)`", guarantee)
        assert files, f"no test is named: {guarantee}"
        for file in files:
            assert definitions(ROOT / "tests" / file), f"{file} has no test: {guarantee}"
