"""Every command and program in README.md and docs/ runs as it stands, and every link leads somewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import typer

from tests.journeys.documents import DOCUMENTS, ROOT, Block, anchors, blocks, links, named_commands, named_options

OTHER_OPTIONS = {"--logdir", "--hours"}
"""Options of programs that are not ours, and of our benchmarks."""

NOT_RUN = re.compile(r"^make ([\w-]+)")
"""`make` lines: the target must be there; what it does is tested elsewhere."""

OWN_HOME = ("rehearsing.md",)
"""Documents whose commands make a key and a fleet: not in the home of whoever runs the tests."""

SECONDS = 240
"""Nothing in a document takes that long; a stuck command must not stop the tests."""


ELSEWHERE = ("benchmarks.md", "torch.md")
"""Documents that are not run here: one takes hours, the other needs torch (tests/oracle/test_torch_docs.py)."""


def runnable(document: Path) -> bool:
    return any(block.language in ("sh", "python") for block in blocks(document)) and document.name not in ELSEWHERE


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if runnable(each)], ids=lambda path: path.name)
def test_document_runs(document: Path, tmp_path: Path):
    (tmp_path / "my-text.txt").write_text(
        "".join(f"The {n} quick brown foxes jump over {n * n} lazy dogs.\n" for n in range(400))
    )
    for number, block in enumerate(blocks(document)):
        if block.language == "python":
            path = tmp_path / (block.file or f"block_{number}.py")
            path.write_text(block.text)
            if block.file is None or not _used_later(document, block):
                _run([sys.executable, path.name], tmp_path, f"{document.name}:{block.line}")
        elif block.language == "toml" and block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "sh":
            for line, command in block.commands():
                where = f"{document.name}:{line}"
                if target := NOT_RUN.match(command):
                    assert target[1] in _make_targets(), f"{where}: the Makefile has no target {target[1]}"
                elif not command.startswith("tpuswarm demo"):
                    home = {"HOME": str(tmp_path)} if document.name in OWN_HOME else {}
                    _run(["bash", "-euo", "pipefail", "-c", command], tmp_path, where, home)


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
    unknown = named_options(text) - _known_options() - shown - OTHER_OPTIONS
    assert not unknown, f"{document.name} names options that do not exist: {sorted(unknown)}"
    wrong = named_commands(document) - _known_commands()
    assert not wrong, f"{document.name} names commands that do not exist: {sorted(wrong)}"


def _used_later(document: Path, block: Block) -> bool:
    """Whether a later block of the document runs or imports the file that this one shows."""
    name = block.file or ""
    uses = (name, f"from {name.removesuffix('.py')} import")
    later = (each.text for each in blocks(document) if each.line > block.line and each.language in ("sh", "python"))
    return any(use in text for text in later for use in uses)


def _run(words: list[str], folder: Path, where: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
    environment = {**_user_environment(), **more}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    shown = f"{where}: {words[-1]}\nexit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, shown
    assert "Traceback" not in done.stderr, shown


def _user_environment() -> dict[str, str]:
    """A user's environment: without the devices that these tests make for JAX, with the tests' own cache."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS" and not name.startswith("JAX_")}
    kept["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def _known_options() -> set[str]:
    """Options of all commands and of our recipes."""
    from tpuswarm.cli.app import make_app
    from tpuswarm.recipes.gpt2.recipe import GPT2
    from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
    from tpuswarm.train.user_code import option_types

    commands = [typer.main.get_command(make_app())]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
    found = {flag for command in commands for parameter in command.params for flag in parameter.opts}
    ours = {name for recipe in (GPT2, StyleGAN2) for name in option_types(recipe)}
    return found | {"--help"} | {f"--{name.replace('_', '-')}" for name in ours}


def _known_commands() -> set[str]:
    from tpuswarm.cli.app import make_app

    return set(typer.main.get_command(make_app()).commands)
