"""`tpuswarm setup`, and set-up as part of `up` and of jobs: on machines of a local cloud, in a terminal, killed."""

import asyncio
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.remote.conftest import FILE, ONE, SLICE
from tests.terminal import terminal
from tests.waiting import until
from tpuswarm.cli.machine.setup import SetupProgress
from tpuswarm.fleet.hosts.setup import SavedSetup, find_setup_targets, prepare_machine
from tpuswarm.fleet.keeper.head_keeper import SETUP_FILES
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.setup.table import Setup

pytestmark = pytest.mark.slow

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
    path = fleet.folder / "swarm.toml"
    path.write_text(FILE + SETUP)
    fleet.environment["A_TOKEN"] = "s3cret"
    yield path
    fleet.environment.pop("A_TOKEN", None)
    path.write_text(FILE)
    for name in SETUP_FILES:  # else jobs of other tests would set up their machines first
        (find_fleet(None)[0].folder / name).unlink(missing_ok=True)


def test_dry_run_shows_the_steps_without_a_machine(fleet, file):
    out, _ = fleet.run("setup", "--dry-run")
    assert out.splitlines() == [
        "1. apt: htop", "2. python: 3.12, from uv", "3. packages: einops", "4. environment: GREETING",
        "5. secrets: A_TOKEN", "nothing was done",
    ]  # fmt: skip
    router = '\n[[vm]]\nname = "door"\nrole = "router"\nip_forward = true\ntype = "e2-small"\nzone = "us-central1-f"\n'
    file.write_text(file.read_text() + router)
    assert "network: larger network buffers, on TPUs behind the router\n" in fleet.run("setup", "--dry-run")[0]


def test_terminal_shows_set_up_of_all_hosts_and_later_ones_do_what_changed(fleet, file):
    with terminal(["setup"], fleet.folder, env=fleet.environment) as screen:
        screen.wait("v5e-usc1a-0/3")
        text = screen.finish()
        assert "all 5 hosts are set up\n" in text
        assert all(len(line) <= 80 for line in text.splitlines())
    out, _ = fleet.run("setup")
    assert out.splitlines()[-1] == "all 5 hosts are set up, as before"
    home = fleet.user_home("v5e-usc1a-0-2")
    assert "export GREETING=hello" in (home / ".tpuswarm/environment").read_text()
    assert "simplejson" in fleet.run("exec", ONE, "--", "pip install simplejson && python -m pip freeze")[0]
    fleet.environment.pop("A_TOKEN")  # this computer remembers it
    file.write_text(file.read_text().replace("hello", "bye"))
    out, _ = fleet.run("setup", "--on", "slice")
    assert "v5e-usc1a-0/3: environment: done" in out and "v5e-usc1a-0/3: apt" not in out
    file.write_text(file.read_text().replace('"htop"', '"htop", "zsh"'))
    out, _ = fleet.run("up", "--yes", "--paid")
    assert "v2-usc1f-0/0: apt: done" in out and "all 5 hosts are set up\n" in out


def test_terminal_is_drawn_before_the_first_machine_is_known():
    """The keeper may be put on a head that is still starting."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with SetupProgress(console, ()) as watching:
        watching._live.refresh()
        watching.set_step(SimpleNamespace(label="demo-head/0"), "keeper", "begun")
        watching._live.refresh()
    assert "demo-head" in console.file.getvalue() and "0 of 1 done" in console.file.getvalue()


def test_missing_secret_is_named_before_anything_is_done(fleet, file):
    file.write_text(file.read_text().replace("A_TOKEN", "B_TOKEN"))
    for words in (["setup"], ["up", "--yes", "--paid"]):
        _, err = fleet.run(*words, code=2)
        assert "B_TOKEN is not set in this shell" in err and "export B_TOKEN=" in err


def test_returning_machine_gets_the_folder_and_set_up_of_before(fleet, file, tmp_path, monkeypatch, routes):
    monkeypatch.setenv("A_TOKEN", "s3cret")
    fleet.run("setup", "--on", "one")
    project = tmp_path / "later"
    project.mkdir()
    (project / "train.py").write_text("print(1)")
    fleet.run("sync", "one", "--fleet", "trio", cwd=project)
    home = fleet.user_home(f"{ONE}-0")
    for path in ("later/train.py", ".tpuswarm/setup/apt.stamp", ".tpuswarm/trees/later.tree"):
        (home / path).unlink()
    (project / "train.py").write_text("print('half an edit')")
    monkeypatch.delenv("A_TOKEN")
    assert asyncio.run(prepare_machine(routes, ONE)) == ({}, ())
    assert (home / "later/train.py").read_text() == "print(1)" and (home / ".tpuswarm/setup/apt.stamp").exists()
    (project / "train.py").write_text("print(1)")

    # A job that restarts on the same machine finds the files that were changed there.
    (home / "later/train.py").write_text("print('mended there')")
    monkeypatch.setenv("A_TOKEN", "the older token of a keeper")
    assert asyncio.run(prepare_machine(routes, ONE)) == ({}, ("train.py",))
    assert (home / "later/train.py").read_text() == "print('mended there')"
    assert "s3cret" in (home / ".tpuswarm/secrets").read_text()
    (project / "more.py").write_text("print(2)")
    routes.fleet.tree_store.take(project, lambda total, new: None)
    assert asyncio.run(prepare_machine(routes, ONE)) == ({}, ("train.py",))
    assert (home / "later/more.py").exists() and "mended" in (home / "later/train.py").read_text()
    (project / "train.py").touch()
    fleet.run("sync", "one", "--fleet", "trio", "--yes", cwd=project)
    assert (home / "later/train.py").read_text() == "print(1)", "a person's sync overwrites it"


def test_keeper_learns_which_step_hangs(fleet, file, routes):
    SavedSetup(routes.fleet).save(Setup())
    assert not asyncio.run(prepare_machine(routes, ONE)).failed  # or an earlier step may be the one that takes long
    SavedSetup(routes.fleet).save(Setup.model_validate({"run": [{"name": "hangs", "do": "sleep 4321"}]}))
    (error,) = asyncio.run(prepare_machine(routes, ONE, limit_s=6.0)).failed.values()
    assert f"{ONE}/0: run-hangs: not done after 0.1 minutes; ended with all its programs" in str(error)
    fleet.wait_until_gone("sleep 4321")


def test_nfs_server_lets_in_all_hosts_of_the_fleet_and_nobody_else(routes):
    machine, server = find_setup_targets(
        routes, Setup.model_validate({"nfs": {"server": "one"}}), f"{SLICE}/2"
    ).machines
    assert machine.host.label == f"{SLICE}/2" and machine.server == server.host.address
    addresses = [host.address for host in routes.hosts("slice")[0]]
    assert server.is_server and server.clients == tuple(sorted(addresses)) and machine.host.address in addresses


def test_job_starts_with_folder_and_set_up_and_names_a_lost_secret(fleet, file, routes):
    fleet.run("setup", "--on", "one")
    home, secrets = fleet.user_home(f"{ONE}-0"), routes.fleet.folder / "secrets.json"
    (home / ".tpuswarm/environment").unlink()
    fleet.detach("one", "greets", 'echo "hears $GREETING $A_TOKEN"', prints="hears hello s3cret")
    secrets.unlink()
    fleet.environment.pop("A_TOKEN")
    process = fleet.start("exec", "one", "--detach", "--name", "waits", "--", "true")
    try:
        until(lambda: "A_TOKEN is not set" in fleet.run("jobs", "--json")[0])
    finally:
        process.terminate()
        process.communicate()
        fleet.environment["A_TOKEN"] = "s3cret"
        fleet.run("setup", "--on", "one")
        fleet.run("stop", "waits")


def test_file_without_set_up_says_where_it_is_described(fleet):
    _, err = fleet.run("setup", code=2)
    assert "has no [setup]. docs/set-up.md" in err
