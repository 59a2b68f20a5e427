"""`tpuswarm setup` and set-up as part of `up`: on machines of a local cloud, in a terminal, killed in the middle."""

import asyncio
import signal

import pytest

from tests.cloud.rehearsal.conftest import until
from tests.remote.conftest import FILE
from tests.terminal import terminal
from tpuswarm.fleet.keeping.fleets import find
from tpuswarm.fleet.reach import find_reach
from tpuswarm.fleet.setting_up import prepare

SETUP = """
[setup]
python = "3.12"
apt = ["htop"]
pip = ["einops"]
env = { GREETING = "hello" }
secrets = ["A_TOKEN"]
"""


@pytest.fixture
def file(fleet, monkeypatch):
    """swarm.toml with a [setup]; at the end as it was."""
    path = fleet.folder / "swarm.toml"
    path.write_text(FILE + SETUP)
    fleet.environment["A_TOKEN"] = "s3cret"
    yield path
    fleet.environment.pop("A_TOKEN", None)
    path.write_text(FILE)


def test_the_steps_are_shown_without_a_machine(fleet, file):
    out, _ = fleet.run("setup", "--dry-run")
    assert out.splitlines() == [
        "1. apt: htop", "2. python: 3.12, from uv", "3. packages: einops", "4. environment: GREETING",
        "5. secrets: A_TOKEN", "nothing was done",
    ]  # fmt: skip


def test_all_hosts_are_set_up_in_a_terminal_and_again_there_is_nothing_to_do(fleet, file):
    with terminal(["setup"], fleet.folder, env=fleet.environment) as screen:
        screen.wait("v5e-usc1a-0/3")
        text = screen.finish()
        assert "5 of 5 hosts are set up; 0 were already" in text
        assert all(len(line) <= 80 for line in text.splitlines())
    out, _ = fleet.run("setup")
    assert out.splitlines()[-1] == "5 of 5 hosts are set up; 5 were already"
    home = fleet.user_home("v5e-usc1a-0-2")
    assert "export GREETING=hello" in (home / ".tpuswarm/environment").read_text()
    fleet.environment.pop("A_TOKEN")  # kept on this computer
    file.write_text(file.read_text().replace("hello", "bye"))
    out, _ = fleet.run("setup", "--on", "slice")
    assert "v5e-usc1a-0/3: environment: done" in out and "v5e-usc1a-0/3: apt" not in out


def test_a_secret_that_is_nowhere_is_named_before_anything_is_done(fleet, file):
    file.write_text(file.read_text().replace("A_TOKEN", "B_TOKEN"))
    for words in (["setup"], ["up", "--yes", "--paid"]):
        _, err = fleet.run(*words, code=2)
        assert "B_TOKEN is not set in this shell" in err and "export B_TOKEN=" in err


def test_after_a_kill_in_the_middle_the_same_command_goes_on(fleet, file):
    step = '\n[[setup.run]]\nname = "slow"\ndo = "echo >> begun; until [ -e go ]; do sleep 0.05; done; echo >> ended"\n'
    file.write_text(file.read_text() + step)
    process = fleet.start("setup", "--on", "one")
    home = fleet.user_home("v2-usc1f-0-0")
    until((home / "begun").exists)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (home / "go").touch()
    out, _ = fleet.run("setup", "--on", "one")
    assert "1 of 1 hosts are set up" in out and "htop" not in out
    assert (home / "begun").read_text() == (home / "ended").read_text() == "\n"


def test_up_sets_up_what_it_created(fleet, file):
    file.write_text(file.read_text().replace('"htop"', '"htop", "zsh"'))
    out, _ = fleet.run("up", "--yes", "--paid")
    assert "v2-usc1f-0/0: apt: done" in out and "5 of 5 hosts are set up" in out


def test_a_machine_that_comes_back_gets_folder_and_set_up_from_what_is_kept(fleet, file, tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "s3cret")
    fleet.run("setup")
    project = tmp_path / "later"
    project.mkdir()
    (project / "train.py").write_text("print(1)")
    fleet.run("sync", "one", "--fleet", "trio", cwd=project)
    home = fleet.user_home("v2-usc1f-0-0")
    for each in ("later/train.py", ".tpuswarm/setup/apt.stamp", ".tpuswarm/trees/later.json"):
        (home / each).unlink()
    monkeypatch.delenv("A_TOKEN")
    assert not asyncio.run(prepare(find_reach(find(None)[0]), "v2-usc1f-0"))
    assert (home / "later/train.py").exists() and (home / ".tpuswarm/setup/apt.stamp").exists()


def test_a_job_begins_where_folder_and_set_up_are_there_and_names_a_secret_that_is_lost(fleet, file):
    fleet.run("setup")
    home, kept = fleet.user_home("v2-usc1f-0-0"), find_reach(find(None)[0]).fleet.folder / "secrets.json"
    (home / ".tpuswarm/environment").unlink()
    fleet.run("exec", "one", "--detach", "--name", "greets", "--", 'echo "said $GREETING $A_TOKEN"')
    assert "said hello s3cret" in (home / ".tpuswarm/jobs/greets/log").read_text()
    kept.unlink()
    fleet.environment.pop("A_TOKEN")
    process = fleet.start("exec", "one", "--detach", "--name", "waits", "--", "true")
    until(lambda: "A_TOKEN is not set" in fleet.run("jobs", "--json")[0])
    process.terminate()
    process.communicate()
    fleet.environment["A_TOKEN"] = "s3cret"
    fleet.run("setup")
    fleet.run("stop", "waits")


def test_a_file_without_the_table_says_where_it_is_described(fleet):
    _, err = fleet.run("setup", code=2)
    assert "has no [setup]: docs/fleet.md" in err
