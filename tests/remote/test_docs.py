"""docs/running-programs.md: what it shows is typed as it stands."""

import shlex
from contextlib import suppress
from pathlib import Path

from tests.cloud.rehearsal.conftest import until
from tests.journeys.documents import ROOT, blocks
from tests.local_cloud import local_cloud
from tests.remote.conftest import Fleet


def keepers(folder: Path) -> list[Path]:
    """Processes with a file of the folder among their words."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += [each] if f"{folder}/".encode() in each.read_bytes() and b"keep" in each.read_bytes() else []
    return found


def test_the_commands_on_a_fleet_run_as_they_are_shown(tmp_path):
    shown = blocks(ROOT / "docs" / "running-programs.md")
    file = next(each for each in shown if each.language == "toml")
    (tmp_path / "swarm.toml").write_text(file.text)
    commands = next(each for each in shown if each.language == "text" and each.line > file.line).commands()
    said = {}
    with local_cloud(tmp_path / "cloud") as place:
        fleet = Fleet(tmp_path, place)
        for _, line in commands:
            program, *words = shlex.split(line)
            assert program == "tpuswarm"
            said[words[0]] = fleet.run(*words)[0]
        until(lambda: not keepers(tmp_path))  # else it asks for a cloud that has ended, for ever
    assert sum(line.endswith("step 3") for line in said["logs"].splitlines()) == 4
    assert "exit 0 on every worker" in said["jobs"]
    assert len(commands) == 7 and "nothing that carries the id programs-" in said["down"]
