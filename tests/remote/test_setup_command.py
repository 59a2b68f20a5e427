"""`tpuswarm setup` and set-up as part of `up`: on machines of a local cloud, in a terminal, killed in the middle."""

import asyncio
import io
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.cloud.rehearsal.conftest import until
from tests.remote.conftest import FILE
from tests.remote.test_exec import pids
from tests.terminal import terminal
from tpuswarm.cli.setup import Watching
from tpuswarm.fleet.keeping.fleets import find
from tpuswarm.fleet.reach import find_reach
from tpuswarm.fleet.setting_up import KeptSetup, meant, prepare
from tpuswarm.remote.setup.table import Setup

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
    router = '\n[[vm]]\nname = "door"\nrole = "router"\nip_forward = true\ntype = "e2-small"\nzone = "us-central1-f"\n'
    file.write_text(file.read_text() + router)
    assert "network: buffers of the kernel, on TPUs behind the router\n" in fleet.run("setup", "--dry-run")[0]


def test_all_hosts_are_set_up_in_a_terminal_and_again_there_is_nothing_to_do(fleet, file):
    with terminal(["setup"], fleet.folder, env=fleet.environment) as screen:
        screen.wait("v5e-usc1a-0/3")
        text = screen.finish()
        assert "all 5 hosts are set up\n" in text
        assert all(len(line) <= 80 for line in text.splitlines())
    out, _ = fleet.run("setup")
    assert out.splitlines()[-1] == "all 5 hosts are set up, as before"
    home = fleet.user_home("v5e-usc1a-0-2")
    assert "export GREETING=hello" in (home / ".tpuswarm/environment").read_text()
    fleet.environment.pop("A_TOKEN")  # kept on this computer
    file.write_text(file.read_text().replace("hello", "bye"))
    out, _ = fleet.run("setup", "--on", "slice")
    assert "v5e-usc1a-0/3: environment: done" in out and "v5e-usc1a-0/3: apt" not in out


def test_a_terminal_may_be_drawn_before_the_first_machine_is_known():
    """As where the keeper is put on a head that is still looked for."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Watching(console, ()) as watching:
        watching._live.refresh()
        watching.told(SimpleNamespace(label="demo-head/0"), "keeper", "begun")
        watching._live.refresh()
    assert "demo-head" in console.file.getvalue() and "0 of 1 done" in console.file.getvalue()


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
    assert "v2-usc1f-0/0 is set up" in out and "htop" not in out
    assert (home / "begun").read_text() == (home / "ended").read_text() == "\n"


def test_up_sets_up_what_it_created(fleet, file):
    file.write_text(file.read_text().replace('"htop"', '"htop", "zsh"'))
    out, _ = fleet.run("up", "--yes", "--paid")
    assert "v2-usc1f-0/0: apt: done" in out and "all 5 hosts are set up\n" in out


def test_a_machine_that_comes_back_gets_folder_and_set_up_from_what_is_kept(fleet, file, tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "s3cret")
    fleet.run("setup")
    project = tmp_path / "later"
    project.mkdir()
    (project / "train.py").write_text("print(1)")
    fleet.run("sync", "one", "--fleet", "trio", cwd=project)
    home = fleet.user_home("v2-usc1f-0-0")
    for each in ("later/train.py", ".tpuswarm/setup/apt.stamp", ".tpuswarm/trees/later.tree"):
        (home / each).unlink()
    monkeypatch.delenv("A_TOKEN")
    reach = find_reach(find(None)[0])
    assert asyncio.run(prepare(reach, "v2-usc1f-0")) == ({}, ())
    assert (home / "later/train.py").exists() and (home / ".tpuswarm/setup/apt.stamp").exists()

    # It began again on the same machine: what was changed there, by hand or by the program, stays.
    (home / "later/train.py").write_text("print('mended there')")
    monkeypatch.setenv("A_TOKEN", "of a keeper that began before the token was changed")
    assert asyncio.run(prepare(reach, "v2-usc1f-0")) == ({}, ("train.py",))
    assert (home / "later/train.py").read_text() == "print('mended there')"
    assert "s3cret" in (home / ".tpuswarm/secrets").read_text()
    (project / "more.py").write_text("print(2)")
    reach.fleet.tree.take(project, lambda total, new: None)
    assert asyncio.run(prepare(reach, "v2-usc1f-0")) == ({}, ("train.py",))
    assert (home / "later/more.py").exists() and "mended" in (home / "later/train.py").read_text()
    (project / "train.py").touch()  # a person is told, and it is overwritten
    fleet.run("sync", "one", "--fleet", "trio", "--yes", cwd=project)
    assert (home / "later/train.py").read_text() == "print(1)"


def test_a_step_that_hangs_is_named_to_a_keeper(fleet, file):
    reach = find_reach(find(None)[0])
    KeptSetup(reach.fleet).keep(Setup.model_validate({"run": [{"name": "hangs", "do": "sleep 4321"}]}))
    (error,) = asyncio.run(prepare(reach, "v2-usc1f-0", limit_s=3.0)).failed.values()
    assert "v2-usc1f-0/0: run-hangs: not done after 0.05 minutes, and ended there" in str(error)
    assert not pids(fleet, "4321")


def test_the_server_of_nfs_lets_in_what_comes_back_and_nobody_but_the_fleet(fleet):
    reach = find_reach(find(None)[0])
    machine, server = meant(reach, Setup.model_validate({"nfs": {"server": "one"}}), "v5e-usc1a-0/2").machines
    assert machine.host.label == "v5e-usc1a-0/2" and machine.server == server.host.address
    slice_ = [each.address for each in reach.hosts("slice")[0]]
    assert server.is_server and server.clients == tuple(sorted(slice_)) and machine.host.address in slice_


def test_a_job_begins_where_folder_and_set_up_are_there_and_names_a_secret_that_is_lost(fleet, file):
    fleet.run("setup")
    home, kept = fleet.user_home("v2-usc1f-0-0"), find_reach(find(None)[0]).fleet.folder / "secrets.json"
    (home / ".tpuswarm/environment").unlink()
    fleet.run("exec", "one", "--detach", "--name", "greets", "--", 'echo "said $GREETING $A_TOKEN"')
    until(lambda: "said hello s3cret" in (home / ".tpuswarm/jobs/greets/log").read_text())
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
    assert "has no [setup]: docs/set-up.md" in err
