"""A fleet whose keeper runs on its head: it works without this computer, and is restored when it is lost."""

import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.local_cloud import delete_machine, use_local_cloud
from tests.processes import PATIENCE, PROGRAM
from tests.remote.conftest import swarm_toml
from tests.waiting import until
from tpuswarm.cloud.rehearsal.connect import CloudFolder, send_command

pytestmark = pytest.mark.long
FILE = (
    swarm_toml("duo", "us-central1", "one v2-8 us-central1-f 1")
    + """
[head]
type = "n2-highmem-8"
zone = "us-central1-f"
network = "tpuswarm-duo"

[[vm]]
name = "door"
type = "e2-standard-4"
zone = "us-central1-f"
role = "router"
ip_forward = true
network = "tpuswarm-duo"

[setup]
env = { GREETING = "hello" }
secrets = ["A_TOKEN"]
"""
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "s3cret")
    (tmp_path / "swarm.toml").write_text(FILE)
    with use_local_cloud(tmp_path, monkeypatch, 60.0) as found:
        yield found


def run(line: str) -> str:
    done = subprocess.run([PROGRAM, *shlex.split(line)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"tpuswarm {line}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def wait_until(condition, what: str) -> None:
    until(condition, shown=lambda: f"{what}:\n{run('list')}\n{run('describe duo-head')}")


def keeper() -> dict:
    return json.loads(run("list --json"))["keeper"] or {}


def job() -> dict:
    (found,) = json.loads(run("jobs --json"))["jobs"]
    return found["seats"][0]


def home(place: CloudFolder, name: str) -> Path:
    (found,) = place.machines.glob(f"{name}-0-*")
    (user,) = [item for item in (found / "root", *found.glob("home/*")) if (item / ".tpuswarm").exists()]
    return user


def keepers_here(folder: Path) -> list[int]:
    """Return the keepers in the background of this computer, not those on machines of the local cloud."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (process / "environ").read_bytes().split(b"\0")
            keeps = b"keep" in (process / "cmdline").read_bytes().split(b"\0")
            if keeps and f"HOME={folder}".encode() in environment:
                found.append(int(process.name))
    return found


def test_keeper_on_the_head_is_restored(place, tmp_path):
    run("init --yes")
    printed = run("up --yes --paid --keep")
    assert "keeper: on duo-head" in printed and "the keeper runs on duo-head; you may switch" in printed
    assert "duo-door forwards port 22000, to the TPUs" in printed
    (rules,) = place.machines.glob("duo-door-0-*/etc/tpuswarm-router.nft")
    routed = rules.read_text()
    assert "# 22000  10." in routed and "map targets" in routed
    (tuned,) = place.machines.glob("v2-usc1f-0-0-*/run/sysctl")
    assert "net.ipv4.tcp_congestion_control = bbr" in tuned.read_text(), "who is talked to through it is tuned, too"
    first = keeper()
    assert first["host"] == "duo-head"
    state = home(place, "duo-head") / ".local/state/tpuswarm/fleets/rehearsal/duo"
    assert "s3cret" in (state / "secrets.json").read_text()
    assert (state / "secrets.json").stat().st_mode & 0o077 == 0

    # Without a keeper on this computer, a preempted machine comes back with its set-up and job.
    (background,) = keepers_here(tmp_path)
    os.kill(background, signal.SIGKILL)
    run("exec one --detach --name beat -- 'echo $GREETING $A_TOKEN >>said; sleep 600'")
    run("rehearsal preempt v2-usc1f-0")
    wait_until(lambda: job()["run"] > 1 and job()["phase"] == "running", "the job did not come back")
    wait_until(lambda: (home(place, "v2-usc1f-0") / "said").exists(), "the job says nothing")
    assert (home(place, "v2-usc1f-0") / "said").read_text() == "hello s3cret\n"
    assert (home(place, "duo-head") / ".ssh/tpuswarm").stat().st_mode & 0o077 == 0

    # A router that is lost comes back as a bare VM: the keeper makes it the router again.
    delete_machine(place, "duo-door")
    files = "duo-door-0-*/etc/tpuswarm-router.nft"
    others = lambda: [item.read_text() for item in {*place.machines.glob(files)} - {rules}]  # noqa: E731
    wait_until(lambda: others() == [routed], "the new VM is no router")

    # The head starts anew, and its keeper with it.
    run("rehearsal maintenance duo-head")
    wait_until(lambda: keeper()["pid"] != first["pid"], "the keeper did not come back after a maintenance")

    # The head is lost with its keeper: whoever keeps the fleet then makes both again, and leaves it to that one.
    print(first, keeper(), (state / "keeper.log").read_text())
    delete_machine(place, "duo-head")
    wait_until(
        lambda: all(machine["name"] != "duo-head" for machine in send_command(place, "status")["machines"]),
        "the head stays",
    )
    with (tmp_path / "keeper.log").open("wb") as log:
        here = subprocess.Popen([PROGRAM, "keep"], stdout=log, stderr=log)
    leaves = "the keeper on duo-head takes over; this one watches"
    wait_until(lambda: leaves in (tmp_path / "keeper.log").read_text(), "no keeper on the head")
    wait_until(lambda: keeper().get("host") == "duo-head", "it does not lead")
    here.send_signal(signal.SIGINT)
    assert here.wait(PATIENCE) == 130
    run("rehearsal preempt v2-usc1f-0")
    wait_until(lambda: job()["run"] > 2 and job()["phase"] == "running", "the new keeper carries no jobs")

    printed = run("down --yes")
    assert "lists nothing with the id duo-" in printed
    status = send_command(place, "status")
    assert status["machines"] == [] and status["requests"] == [], status
