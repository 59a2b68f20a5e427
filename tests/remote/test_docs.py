"""docs/running-programs.md: what it shows is typed as it stands."""

import shlex

from tests.journeys.documents import ROOT, blocks
from tests.local_cloud import local_cloud
from tests.remote.conftest import Fleet


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
    assert sum(line.endswith("step 3") for line in said["logs"].splitlines()) == 4
    assert "exit 0 on every worker" in said["jobs"]
    assert len(commands) == 7 and "nothing that carries the id programs-" in said["down"]
