"""A keeper on the fleet's head, on real machines."""

import pytest

from tests.real.cloud import TIMEOUT_S
from tests.remote.conftest import swarm_toml
from tests.waiting import until

pytestmark = pytest.mark.real
FILE = (
    swarm_toml("solo", "us-central1", "one v5e-1 us-central1-a 1")
    + """
[head]
type = "n2-highmem-8"
zone = "us-central1-f"
network = "tpuswarm-solo"

[[grant]]
type = "v5e-1"
zone = "us-central1-a"
how = "spot"
count = 8

[setup]
python = "3.11"
"""
)


def test_keeper_on_the_head_sets_up_a_new_machine_after_a_preemption(cloud, monkeypatch):
    """The new machine and the head have no internet: the head sends its own uv, Python and the synced folder."""
    monkeypatch.setattr(cloud, "project", cloud.home / "solo")
    cloud.project.mkdir()
    (cloud.project / "swarm.toml").write_text(FILE)
    (cloud.project / "notes").write_text("")
    cloud.run("init", "--yes")
    cloud.run("up", "--yes", "--paid")
    cloud.run("sync", "--yes")
    cloud.run("exec", "one", "--detach", "--", "cat notes && sleep 1121")
    cloud.run("up", "--yes", "--paid", "--keep")

    def show() -> str:
        return cloud.run("list") + cloud.run("jobs")

    (before,) = until(lambda: cloud.machines_with("sleep 1121"), TIMEOUT_S, show)
    cloud.run("rehearsal", "preempt", before.rsplit("-", 2)[0])
    until(lambda: cloud.machines_with("sleep 1121") - {before}, TIMEOUT_S, show)
    cloud.run("down", "--yes")
