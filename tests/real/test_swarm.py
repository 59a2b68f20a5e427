"""A swarm on two machines and a head, behind a firewall: machines reboot and die."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.real.cloud import TIMEOUT_S, RealCloud
from tests.remote.conftest import swarm_toml
from tests.waiting import until

pytestmark = pytest.mark.real
FILE = (
    swarm_toml("duo", "us-central1", "one v5e-1 us-central1-a 2")
    + """
[head]
type = "n2-highmem-8"
zone = "us-central1-f"
network = "tpuswarm-duo"

[[grant]]
type = "v5e-1"
zone = "us-central1-a"
how = "spot"
count = 8

[setup]
python = "3.11"
pip = ["tpuswarm[gcloud]"]

[train]
recipe = "gpt2-tiny"
options = { layers = 2, width = 64, heads = 2, context = 32 }
data = "fake"
batch = 8
cycle = 8
steps = 1000000
"""
)
DELETE_HEAD = """
from tests.local_cloud import delete_machine
from tpuswarm.cloud.rehearsal.connect import default_folder
delete_machine(default_folder(), "duo-head")
"""
"""With its disk, and with the keeper."""
URL = "gs://rehearsal-duo/runs/duo"


@pytest.fixture(scope="module")
def duo(cloud: RealCloud) -> Iterator[RealCloud]:
    """The laptop in another project's folder, whose fleet is to be created."""
    before, cloud.project = cloud.project, cloud.home / "duo"
    cloud.project.mkdir()
    (cloud.project / "swarm.toml").write_text(FILE)
    cloud.run("init", "--yes")
    yield cloud
    cloud.run("down", "--yes")
    cloud.project = before


def wait_until(duo: RealCloud, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Wait for a status of the run that fulfils a condition, and return it."""

    def check() -> dict[str, Any] | None:
        command = duo.start("status", URL, "--json")
        shown, _ = command.communicate()
        status: dict[str, Any] = json.loads(shown) if command.returncode == 0 else {}
        return status if condition(status) else None

    found: dict[str, Any] = until(check, TIMEOUT_S, lambda: duo.run("jobs") + duo.run("list") + duo.run("logs", "head"))
    return found


def members(status: dict[str, Any]) -> dict[str, Any]:
    """Return the incarnations of members that train, by name."""
    return {row["id"]: row["incarnation"] for row in status.get("members", ()) if row["state"] == "alive"}


def test_swarm_trains_over_the_firewall_of_init(duo):
    duo.run("train", "swarm.toml", "--yes", "--paid", "--detach")
    wait_until(duo, lambda status: (status.get("version") or 0) >= 2 and len(members(status)) == 2)


def test_rebooted_machine_returns_as_the_same_member(duo):
    before = members(wait_until(duo, lambda status: len(members(status)) == 2))
    name = min(before)
    duo.run("exec", name.removeprefix("j-"), "--", "sudo reboot")
    wait_until(duo, lambda status: members(status).get(name) not in (None, before[name]))


def test_another_head_continues_after_the_death_of_the_first(duo):
    before = wait_until(duo, lambda status: len(members(status)) == 2)
    (duo.project / "delete_head.py").write_text(DELETE_HEAD)
    assert duo.start(program="delete_head.py").wait() == 0
    duo.run("up", "--yes", "--paid", "--keep")
    after = wait_until(
        duo, lambda status: (status.get("version") or 0) > before["version"] + 1 and len(members(status)) == 2
    )
    assert after["epoch"] > before["epoch"] and after["tokens"]["applied"] > before["tokens"]["applied"]
