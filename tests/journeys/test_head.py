"""A fleet whose keeper runs on its head: it works without this computer, and is restored when it is lost."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.local_cloud import delete_machine, local_cloud
from tests.processes import PATIENCE
from tests.remote.conftest import Fleet, swarm_toml
from tests.waiting import until
from tpuswarm.cloud.rehearsal.connect import send_command

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
def fleet(tmp_path):
    (tmp_path / "swarm.toml").write_text(FILE)
    with local_cloud(tmp_path / "cloud", 60.0) as place:
        fleet = Fleet(tmp_path, place)
        fleet.environment["A_TOKEN"] = "s3cret"
        yield fleet


def wait_until(fleet: Fleet, condition, what: str) -> None:
    until(condition, shown=lambda: f"{what}:\n{fleet.run('list')[0]}\n{fleet.run('describe', 'duo-head')[0]}")


def keeper(fleet: Fleet) -> dict:
    return fleet.run_json("list")["keeper"] or {}


def has_restarted(fleet: Fleet, run: int) -> bool:
    """Return whether the job runs for more than the `run`-th time."""
    (seat,) = fleet.jobs()["beat"]
    return seat["run"] > run and seat["phase"] == "running"


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


def test_keeper_on_the_head_is_restored(fleet):
    machines = fleet.place.machines
    fleet.run("init", "--yes")
    printed, _ = fleet.run("up", "--yes", "--paid", "--keep")
    assert "keeper: on duo-head" in printed and "the keeper runs on duo-head; you may switch" in printed
    assert "duo-door forwards port 22000, to the TPUs" in printed
    (rules,) = machines.glob("duo-door-0-*/etc/tpuswarm-router.nft")
    routed = rules.read_text()
    assert "# 22000  10." in routed and "map targets" in routed
    (tuned,) = machines.glob("v2-usc1f-0-0-*/run/sysctl")
    assert "net.ipv4.tcp_congestion_control = bbr" in tuned.read_text(), "who is talked to through it is tuned, too"
    first = keeper(fleet)
    assert first["host"] == "duo-head"
    home = fleet.user_home("duo-head-0")
    state = home / ".local/state/tpuswarm/fleets/rehearsal/duo"
    assert "s3cret" in (state / "secrets.json").read_text()
    assert (state / "secrets.json").stat().st_mode & 0o077 == 0

    # Without a keeper on this computer, a preempted machine comes back with its set-up and job.
    (background,) = keepers_here(fleet.folder)
    os.kill(background, signal.SIGKILL)
    fleet.detach("one", "beat", "echo $GREETING $A_TOKEN >>said; sleep 600")
    fleet.run("rehearsal", "preempt", "v2-usc1f-0")
    wait_until(fleet, lambda: has_restarted(fleet, 1), "the job did not come back")
    wait_until(fleet, lambda: (fleet.user_home("v2-usc1f-0-0") / "said").exists(), "the job says nothing")
    assert (fleet.user_home("v2-usc1f-0-0") / "said").read_text() == "hello s3cret\n"
    assert (home / ".ssh/tpuswarm").stat().st_mode & 0o077 == 0

    # A router that is lost comes back as a bare VM: the keeper makes it the router again.
    delete_machine(fleet.place, "duo-door")
    others = lambda: {*machines.glob("duo-door-0-*/etc/tpuswarm-router.nft")} - {rules}  # noqa: E731
    wait_until(fleet, lambda: [file.read_text() for file in others()] == [routed], "the new VM is no router")

    # The head starts anew, and its keeper with it.
    fleet.run("rehearsal", "maintenance", "duo-head")
    wait_until(fleet, lambda: keeper(fleet)["pid"] != first["pid"], "the keeper did not come back after a maintenance")

    # The head is lost with its keeper: whoever keeps the fleet then makes both again, and leaves it to that one.
    print(first, keeper(fleet), (state / "keeper.log").read_text())
    delete_machine(fleet.place, "duo-head")
    wait_until(fleet, lambda: "duo-head" not in {machine["name"] for machine in fleet.machines()}, "the head stays")
    log = fleet.folder / "keeper.log"
    with log.open("wb") as file:
        here = fleet.start("keep", stdout=file, stderr=file)
    leaves = "the keeper on duo-head takes over; this one watches"
    wait_until(fleet, lambda: leaves in log.read_text(), "no keeper on the head")
    wait_until(fleet, lambda: keeper(fleet).get("host") == "duo-head", "it does not lead")
    here.send_signal(signal.SIGINT)
    assert here.wait(PATIENCE) == 130
    fleet.run("rehearsal", "preempt", "v2-usc1f-0")
    wait_until(fleet, lambda: has_restarted(fleet, 2), "the new keeper carries no jobs")

    printed, _ = fleet.run("down", "--yes")
    assert "lists nothing with the id duo-" in printed
    status = send_command(fleet.place, "status")
    assert status["machines"] == [] and status["requests"] == [], status
