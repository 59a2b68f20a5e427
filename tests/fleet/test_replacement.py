"""Which machines a plan replaces or removes: the late, the unhealthy and the surplus ones."""

from dataclasses import replace
from math import inf

import pytest

from tests.fleet.fake_cloud import BOOT_S
from tests.fleet.loop import A, B, Loop, desired, pool, started
from tpuswarm.fleet.core.memory import Work
from tpuswarm.fleet.core.plan import BOOT, PATIENCE, REPAIR, UNHEALTHY

KEY = (A, "v2-usc1f-0")


@pytest.mark.parametrize(
    ("how", "state", "timeout_s"),
    [("on-demand", "repairing", PATIENCE), ("spot", "repairing", REPAIR), ("spot", "creating", BOOT)],
)
def test_machine_that_stays_unready_is_replaced_after_a_timeout(cloud, how, state, timeout_s):
    loop = started(cloud, pool(how=how), seconds=0 if state == "creating" else 600)
    cloud.update(KEY, state=state)
    cloud.transitions[KEY] = inf
    loop.run(timeout_s - 100)
    assert not cloud.deleted
    loop.run(300)
    assert [machine.state for machine in cloud.deleted] == [state]


def test_queued_request_moves_to_the_next_zone_after_its_wait(cloud):
    cloud.capacity[A] = 0
    loop = started(cloud, pool(how="queued", zones=(A, B), wait_s=7200.0), seconds=7000)
    assert cloud.names("waiting") == ["v2-usc1f-0"] and not cloud.deleted
    loop.run(900)
    assert cloud.names() == ["v2-usc1b-0"] and cloud.deleted[0].request == "v2-usc1f-0-q"


def test_queued_request_waits_forever_in_the_last_zone(cloud):
    cloud.capacity[A] = 0
    started(cloud, pool(how="queued"), seconds=30 * 86_400, every=3600.0)
    assert cloud.names("waiting") == ["v2-usc1f-0"] and not cloud.deleted


def test_request_and_the_machine_it_becomes_count_as_one(cloud):
    """They have different creation times; `down` of the request also deletes the machine."""
    cloud.capacity[A] = 0
    loop = started(cloud, pool(how="queued"), seconds=60)
    requested_at = cloud.existing[KEY].created
    cloud.update(KEY, state="creating", said="CREATING", created=cloud.now)
    cloud.transitions[KEY] = cloud.now + BOOT_S
    loop.desired = replace(desired(pool(how="queued", count=0)), dropped={"v2-usc1f-0": requested_at}, revision=2)
    loop.tick()
    assert [machine.name for machine in cloud.deleted] == ["v2-usc1f-0"] and "requested by" in loop.actions[-1].why
    assert "us-central1-f/v2-usc1f-0" in loop.memory.seen and not loop.memory.places
    cloud.update(KEY, created=cloud.now + 1)
    loop.run(30)
    assert loop.memory.deleting, "its deletion is remembered"


def test_unhealthy_machine_is_replaced_three_times_a_day_at_most(cloud):
    loop = started(cloud, pool(), every=30.0)
    for _ in range(5):
        cloud.update(KEY, healthy=False, why="UNHEALTHY_TENSORFLOW")
        loop.run(UNHEALTHY + 1140)
    assert len(cloud.deleted) == 3
    assert [wait.why for wait in loop.waits] == [
        f"v2-usc1f-0 is not healthy (UNHEALTHY_TENSORFLOW), and left as it is: 3 of {A} were replaced within a day"
    ]


def test_machine_whose_setup_fails_is_replaced_twice_and_then_reported(cloud):
    loop = started(cloud, pool(count=2), every=30.0)
    for _ in range(4):
        loop.work = Work(spoilt={"v2-usc1f-0": (cloud.existing[KEY].created, "packages: no space left on device")})
        loop.run(900)
    assert [machine.name for machine in cloud.deleted] == ["v2-usc1f-0"] * 2 and len(cloud.names("ready")) == 2
    assert [wait.why for wait in loop.waits] == [
        "v2-usc1f-0 cannot be set up (packages: no space left on device), and left as it is: "
        f"2 of {A} were replaced within a day"
    ]


def test_machine_that_recovers_in_time_stays(cloud):
    loop = started(cloud, pool())
    for _ in range(4):
        cloud.update(KEY, healthy=False)
        loop.run(UNHEALTHY - 60)
        cloud.update(KEY, healthy=True)
        loop.run(120)
    assert not cloud.deleted


@pytest.mark.parametrize("how", ["on-demand", "queued", "reserved"])
def test_unhealthy_machine_that_is_not_spot_is_reported_and_left(cloud, how):
    loop = started(cloud, pool(how=how), every=300.0)
    cloud.update(KEY, healthy=False, why="the guest agent timed out")
    loop.run(2 * PATIENCE)
    assert not cloud.deleted and loop.waits[0].of == "pool small"
    assert loop.waits[0].why.startswith("v2-usc1f-0 is not healthy (the guest agent timed out), and left as it is")


def test_unhealthy_machine_with_a_running_job_is_replaced_much_later(cloud):
    loop = Loop(cloud, desired(pool(count=2)), every=60.0)
    loop.busy = frozenset({"v2-usc1f-0"})
    loop.run(600)
    for name in ("v2-usc1f-0", "v2-usc1f-1"):
        cloud.update((A, name), healthy=False, why="UNHEALTHY_TENSORFLOW")
    loop.run(PATIENCE - 60)
    assert [machine.name for machine in cloud.deleted] == ["v2-usc1f-1"]
    loop.run(300)
    assert [machine.name for machine in cloud.deleted] == ["v2-usc1f-1", "v2-usc1f-0"], "its job may hang"


def test_scale_down_keeps_the_machine_that_trains(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.busy = frozenset({"v2-usc1f-1"})
    loop.run(600)
    cloud.update((A, "v2-usc1f-1"), created=cloud.now, healthy=False)
    loop.desired = desired(pool())
    loop.run(120)
    assert cloud.names("ready") == ["v2-usc1f-1"]


def test_scale_down_removes_unready_machines_first_then_the_youngest(cloud):
    loop = started(cloud, pool(count=2))
    loop.desired = desired(pool(count=4))
    loop.run(30)
    loop.desired = desired(pool())
    loop.run(600)
    assert cloud.names() == ["v2-usc1f-0"] and cloud.deleted[-1].name == "v2-usc1f-1"
