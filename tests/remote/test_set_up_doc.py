"""docs/set-up.md: what it shows is typed as it stands."""

import shlex

from tests.journeys.documents import ROOT, blocks
from tests.local_cloud import local_cloud
from tests.remote.conftest import Fleet


def test_the_commands_run_as_they_are_shown(tmp_path):
    shown = blocks(ROOT / "docs" / "set-up.md")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print(1)")
    (project / "swarm.toml").write_text(next(each for each in shown if each.language == "toml").text)
    commands = next(each for each in shown if each.language == "text").commands()
    said = {}
    with local_cloud(tmp_path / "cloud") as place:
        fleet = Fleet(tmp_path, place)
        for _, line in commands:
            program, *words = shlex.split(line)
            assert program == "tpuswarm"
            said[words[0]] = fleet.run(*words, cwd=project)[0]
    assert "rehearsed: python there is this computer's" in said["up"] and "einops is not among them" in said["up"]
    assert "v2-usc1f-0/0 is set up, as before" in said["setup"]
    assert "v2-usc1f-0/0 has ~/project" in said["sync"]
    assert all(each in said["exec"] for each in ("hello", "train.py", "Python 3."))
    assert (project / "results/v2-usc1f-0-0/data/state").read_text() == "ready\n"
    assert len(commands) == 8 and "nothing that carries the id mine-" in said["down"]
