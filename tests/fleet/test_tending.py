"""What a plan does about machines that are late, ill or too many."""

from dataclasses import replace
from math import inf

import pytest

from tests.fleet.cloud_model import BOOT as BOOT_TIME
from tests.fleet.cloud_model import Cloud
from tests.fleet.loop import Loop, desired, names, pool
from tpuswarm.fleet.core.memory import Work
from tpuswarm.fleet.core.plan import BOOT, PATIENCE, UNHEALTHY

A, B, C = "us-central1-f", "us-central1-b", "us-central1-c"


def test_creating_and_repairing_have_deadlines_and_a_queue_another(cloud):
    loop = Loop(cloud, desired(pool(count=1, how="on-demand")))
    loop.run(600)
    key = (A, "v2-usc1f-0")
    cloud.change(key, state="repairing", said="REPAIRING")
    loop.run(PATIENCE - 100)
    assert not cloud.deleted, "on demand it may take days to come again"
    loop.run(300)
    assert [each.said for each in cloud.deleted] == ["REPAIRING"]

    spot = Cloud()
    loop = Loop(spot, desired(pool()))
    loop.run(600)
    spot.change(key, state="repairing", said="REPAIRING")
    loop.run(1700)
    assert not spot.deleted
    loop.run(300)
    assert [each.said for each in spot.deleted] == ["REPAIRING"]

    waiting = Cloud()
    waiting.capacity[A] = 0
    loop = Loop(waiting, desired(pool(how="queued", zones=(A, B), wait_s=7200.0)))
    loop.run(7000)
    assert names(waiting, "waiting") == ["v2-usc1f-0"] and not waiting.deleted
    loop.run(900)
    assert names(waiting) == ["v2-usc1b-0"] and waiting.deleted[0].request == "v2-usc1f-0-q"

    slow = Cloud()
    loop = Loop(slow, desired(pool()))
    loop.run(10)
    slow.due[A, "v2-usc1f-0"] = inf
    loop.run(BOOT - 60)
    assert not slow.deleted
    loop.run(120)
    assert [each.name for each in slow.deleted] == ["v2-usc1f-0"]


def test_a_request_and_what_comes_of_it_are_one_machine(cloud):
    """Each has its own time of creation; who asked for the end of one has asked for that of the other."""
    cloud.capacity[A] = 0
    loop = Loop(cloud, desired(pool(how="queued")))
    loop.run(60)
    key = (A, "v2-usc1f-0")
    waiting = cloud.there[key]
    cloud.change(key, state="creating", said="CREATING", created=cloud.now)
    cloud.due[key] = cloud.now + BOOT_TIME
    loop.desired = replace(desired(pool(how="queued", count=0)), dropped={"v2-usc1f-0": waiting.created}, revision=2)
    loop.tick()
    assert [each.name for each in cloud.deleted] == ["v2-usc1f-0"] and "requested by" in loop.actions[-1].why
    assert "us-central1-f/v2-usc1f-0" in loop.memory.seen and not loop.memory.places
    cloud.change(key, created=cloud.now + 1)
    loop.run(30)
    assert loop.memory.deleting, "its deletion is not forgotten"


def test_in_the_last_zone_a_request_waits_for_ever(cloud):
    cloud.capacity[A] = 0
    loop = Loop(cloud, desired(pool(how="queued")), every=600.0)
    loop.run(30 * 86_400)
    assert names(cloud, "waiting") == ["v2-usc1f-0"] and not cloud.deleted


def test_an_unhealthy_machine_is_replaced_but_not_again_and_again(cloud):
    loop = Loop(cloud, desired(pool(count=1)), every=30.0)
    loop.run(600)
    for _ in range(5):
        cloud.change((A, "v2-usc1f-0"), healthy=False, why="UNHEALTHY_TENSORFLOW")
        loop.run(UNHEALTHY - 60)
        loop.run(1200)
    assert len(cloud.deleted) == 3
    assert [each.why for each in loop.waits] == [
        f"v2-usc1f-0 is not healthy (UNHEALTHY_TENSORFLOW), and left as it is: 3 of {A} were replaced within a day"
    ]


def test_a_machine_that_cannot_be_set_up_is_replaced_twice_and_then_told(cloud):
    """Only the one that was tried: what takes its name later is another one."""
    loop = Loop(cloud, desired(pool(count=2)), every=30.0)
    loop.run(600)
    for _ in range(4):
        created = cloud.there[A, "v2-usc1f-0"].created
        loop.work = Work(spoilt={"v2-usc1f-0": (created, "packages: no space left on device")})
        loop.run(900)
    assert [each.name for each in cloud.deleted] == ["v2-usc1f-0"] * 2 and len(names(cloud, "ready")) == 2
    assert [each.why for each in loop.waits] == [
        "v2-usc1f-0 cannot be set up (packages: no space left on device), and left as it is: "
        f"2 of {A} were replaced within a day"
    ]


def test_a_machine_that_gets_well_in_time_stays(cloud):
    loop = Loop(cloud, desired(pool()))
    loop.run(600)
    for _ in range(4):
        cloud.change((A, "v2-usc1f-0"), healthy=False)
        loop.run(UNHEALTHY - 60)
        cloud.change((A, "v2-usc1f-0"), healthy=True)
        loop.run(120)
    assert not cloud.deleted


@pytest.mark.parametrize("how", ["on-demand", "queued", "reserved"])
def test_what_is_not_spot_is_left_to_a_person_where_it_is_not_healthy(cloud, how):
    loop = Loop(cloud, desired(pool(how=how)), every=60.0)
    loop.run(600)
    cloud.change((A, "v2-usc1f-0"), healthy=False, why="the guest agent timed out")
    loop.run(2 * PATIENCE)
    assert not cloud.deleted and loop.waits[0].of == "pool small"
    assert loop.waits[0].why.startswith("v2-usc1f-0 is not healthy (the guest agent timed out), and left as it is")


def test_a_machine_on_which_a_job_runs_is_not_replaced_for_what_its_agent_says(cloud):
    loop = Loop(cloud, desired(pool(count=2)), every=60.0)
    loop.busy = frozenset({"v2-usc1f-0"})
    loop.run(600)
    for name in ("v2-usc1f-0", "v2-usc1f-1"):
        cloud.change((A, name), healthy=False, why="UNHEALTHY_TENSORFLOW")
    loop.run(PATIENCE - 60)
    assert [each.name for each in cloud.deleted] == ["v2-usc1f-1"]
    loop.run(300)
    assert [each.name for each in cloud.deleted] == ["v2-usc1f-1", "v2-usc1f-0"], "a job that hangs keeps none for ever"


def test_scale_down_leaves_the_machine_that_trains(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.busy = frozenset({"v2-usc1f-1"})
    loop.run(600)
    cloud.change((A, "v2-usc1f-1"), created=cloud.now, healthy=False)
    loop.desired = desired(pool(count=1))
    loop.run(120)
    assert names(cloud, "ready") == ["v2-usc1f-1"]


def test_scale_down_takes_what_is_not_ready_first_then_the_youngest(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.run(600)
    loop.desired = desired(pool(count=4))
    loop.run(30)
    loop.desired = desired(pool(count=1))
    loop.run(600)
    assert names(cloud) == ["v2-usc1f-0"]
    assert [each.name for each in cloud.deleted][-1] == "v2-usc1f-1"
