"""The commands of docs/running-programs.md and docs/set-up.md, run as they stand there."""

import shlex
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cloud.rehearsal.conftest import until
from tests.journeys.documents import ROOT, blocks
from tests.local_cloud import local_cloud
from tests.remote.conftest import Fleet

pytestmark = pytest.mark.slow


def run_document(name: str, cwd: Path, cloud: Path) -> tuple[list[str], dict[str, str]]:
    """Run the first commands after the document's swarm.toml; return them, and stdout by the name of the command."""
    shown = blocks(ROOT / "docs" / name)
    file = next(block for block in shown if block.language == "toml")
    (cwd / "swarm.toml").write_text(file.text)
    block = next(block for block in shown if block.language == "text" and block.line > file.line)
    commands = [shlex.split(line) for _, line in block.commands()]
    assert {program for program, *_ in commands} == {"tpuswarm"}
    with local_cloud(cloud) as place:
        fleet = Fleet(cloud.parent, place)
        printed = {words[0]: fleet.run(*words, cwd=cwd)[0] for _, *words in commands}
        until(lambda: not keepers(cloud.parent))  # else it would ask a cloud that has ended, for ever
    return [words[0] for _, *words in commands], printed


def keepers(folder: Path) -> list[Path]:
    """Keeper processes whose command lines name a file in the folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes()
            found += [file] if f"{folder}/".encode() in words and b"keep" in words else []
    return found


def test_running_programs(tmp_path):
    commands, printed = run_document("running-programs.md", tmp_path, tmp_path / "cloud")
    assert sum(line.endswith("step 3") for line in printed["logs"].splitlines()) == 4
    assert "exit 0 on every worker" in printed["jobs"]
    assert len(commands) == 7 and "lists nothing with the id programs-" in printed["down"]


def test_set_up(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)")
    commands, printed = run_document("set-up.md", project, tmp_path / "cloud")
    assert "rehearsed: python there is this computer's" in printed["up"]
    assert "einops is not among them" in printed["up"]
    assert "v2-usc1f-0/0 is set up, as before" in printed["setup"]
    assert "v2-usc1f-0/0 has ~/project" in printed["sync"]
    assert all(text in printed["exec"] for text in ("hello", "train.py", "Python 3."))
    assert (project / "results/v2-usc1f-0-0/data/state").read_text() == "ready\n"
    assert len(commands) == 8 and "lists nothing with the id mine-" in printed["down"]
