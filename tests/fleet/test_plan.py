"""The rules of a plan, one by one; `test_histories.py` has them all at once."""

import time
from dataclasses import replace

import pytest

from tests.fleet.cloud_model import BOOT as BOOT_TIME
from tests.fleet.loop import Loop, desired, names, pool, vm
from tpuswarm.cloud.errors import Denied, Invalid, NotSignedIn
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine
from tpuswarm.fleet.core.actions import Create, Delete
from tpuswarm.fleet.core.memory import Memory, Observed
from tpuswarm.fleet.core.plan import left, plan
from tpuswarm.fleet.core.remember import remember

A, B, C = "us-central1-f", "us-central1-b", "us-central1-c"


def test_an_empty_cloud_is_filled_in_the_first_zone(cloud):
    loop = Loop(cloud, desired(pool(count=3)))
    loop.run(600)
    assert names(cloud, "ready") == ["v2-usc1f-0", "v2-usc1f-1", "v2-usc1f-2"]
    assert [each.kind for each in loop.events] == ["asked"] * 3 + ["ready"] * 3
    assert loop.actions[0].why == "pool small has 0 of 3"


@pytest.mark.parametrize("how", ["PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED", "404"])
def test_whatever_is_dead_is_replaced_and_its_remains_deleted(cloud, how):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.run(600)
    cloud.preempt((A, "v2-usc1f-0"), how)
    loop.run(600)
    assert names(cloud, "ready") == names(cloud) == ["v2-usc1f-0", "v2-usc1f-1"]
    assert [each.name for each in cloud.deleted] == (["v2-usc1f-0"] if how != "404" else [])
    assert next(each.text for each in loop.events if each.kind == "preempted").startswith(
        "the cloud took it away after "
    )


def test_a_stockout_moves_on_to_the_next_zone_and_comes_back_to_the_first(cloud):
    cloud.capacity[A] = 0
    loop = Loop(cloud, desired(pool(count=2, zones=(A, B))))
    loop.run(900)
    assert names(cloud, "ready") == ["v2-usc1b-0", "v2-usc1b-1"]
    moved = next(each for each in loop.actions if isinstance(each, Create) and each.spec.zone == B)
    assert moved.why == "pool small has 0 of 2; us-central1-f: no v2-8 to be had now"
    cloud.capacity[A] = 9
    cloud.preempt((B, "v2-usc1b-0"))
    loop.run(900)
    assert names(cloud, "ready") == ["v2-usc1b-1", "v2-usc1f-0"]


def test_capacity_is_asked_for_without_end_but_ever_more_seldom(cloud):
    cloud.capacity[A] = 0
    loop = Loop(cloud, desired(pool(count=20)))
    loop.run(3600)
    first, last = (sum(from_ <= at < to for at in loop.times) for from_, to in ((0, 60), (3000, 3600)))
    assert first >= 20 and 1 <= last <= 12
    cloud.capacity[A] = 20
    loop.run(1200)
    assert len(names(cloud, "ready")) == 20


def test_room_that_comes_back_is_felt_for_with_one_machine_and_then_taken(cloud):
    cloud.capacity[A] = 0
    loop = Loop(cloud, desired(pool(count=20)))
    loop.run(1800)
    cloud.capacity[A], asked, begun = 20, len(loop.actions), len(loop.times)
    loop.run(900)
    assert len(names(cloud, "ready")) == 20
    times = loop.times[begun:]
    assert len(loop.actions) - asked == 20, "nothing was refused any more"
    first = times[0]
    assert [sum(at == each for at in times) for each in sorted(set(times))] == [1, 10, 9]
    # Within a minute or so of the first: long before that one is ready.
    assert times[-1] - first <= 120 < BOOT_TIME


def test_machines_taken_away_together_are_replaced_in_another_zone_at_once(cloud):
    loop = Loop(cloud, desired(pool(count=6, zones=(A, B))))
    loop.run(600)
    cloud.capacity[A] = 2
    for number in range(4):
        cloud.preempt((A, f"v2-usc1f-{number}"))
    begun = len(loop.actions)
    loop.run(10)
    made = [each.spec.name for each in loop.actions[begun:] if isinstance(each, Create)]
    assert made == [f"v2-usc1b-{number}" for number in range(4)], "their remains are in the way of nobody there"
    loop.run(600)
    assert names(cloud, "ready") == names(cloud) == [*made, "v2-usc1f-4", "v2-usc1f-5"]


def test_one_that_is_taken_away_alone_comes_back_under_its_name(cloud):
    loop = Loop(cloud, desired(pool(count=6, zones=(A, B))))
    loop.run(600)
    before = names(cloud)
    cloud.preempt((A, "v2-usc1f-3"))
    loop.run(600)
    assert names(cloud, "ready") == before and all(each.zone == A for each in cloud.there.values())


def test_a_quota_stops_with_its_sentence_and_lets_what_it_allows(cloud):
    from tpuswarm.fleet.core.money import lot

    cloud.quota[lot("v2-8", A, True)] = 3
    loop = Loop(cloud, desired(pool(count=5)))
    loop.run(1200)
    assert len(names(cloud, "ready")) == 3
    assert loop.waits[0].why == f"{A}: quota of v2-8 in {A} is used up; more is tried after `tpuswarm up`"
    asked = len(loop.actions)
    loop.run(3600)
    assert len(loop.actions) == asked  # not asked again
    cloud.preempt((A, "v2-usc1f-1"))
    loop.run(1200)
    assert len(names(cloud, "ready")) == 3  # what the quota allowed once is asked for again
    cloud.quota.clear()
    loop.desired = replace(loop.desired, revision=2)
    loop.run(1200)
    assert len(names(cloud, "ready")) == 5


@pytest.mark.parametrize("error", [Denied("you lack tpu.nodes.create", "tpu.nodes.create"), Invalid("no such runtime")])
def test_what_a_person_has_to_mend_stops_the_pool(cloud, error):
    cloud.deny = error
    loop = Loop(cloud, desired(pool(count=2), pool("other", count=1)))
    loop.run(600)
    assert len(loop.actions) == 3
    assert loop.waits[0].why == f"{error}; it is tried again after `tpuswarm up`"
    cloud.deny = None
    loop.desired = replace(loop.desired, revision=2)
    loop.run(600)
    assert len(names(cloud, "ready")) == 3


def test_expired_credentials_are_no_reason_to_give_up(cloud):
    cloud.deny = NotSignedIn("sign in")
    loop = Loop(cloud, desired(pool()))
    loop.run(120)
    cloud.deny = None
    loop.run(900)
    assert len(names(cloud, "ready")) == 1


def test_machines_in_a_zone_that_does_not_answer_are_unknown_not_absent(cloud):
    loop = Loop(cloud, desired(pool(count=2, zones=(A, B))))
    loop.run(600)
    cloud.unreachable = {A}
    before = len(loop.actions)
    loop.run(3600)
    assert len(loop.actions) == before
    loop.memory = Memory()  # another keeper, which has never seen that zone
    loop.run(600)
    assert len(loop.actions) == before and loop.waits[0].why.startswith(f"{A} does not answer, and what the fleet has")
    cloud.unreachable = set()
    loop.run(600)
    assert len(loop.actions) == before


def test_what_is_not_ours_is_never_touched(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    cloud.foreign("v2-usc1f-0", A)
    cloud.foreign("stray", A, labels={FLEET_LABEL: "other-abc123", POOL_LABEL: "small"})
    cloud.change((A, "stray"), state="dead")
    loop.run(900)
    assert names(cloud, "ready") == ["v2-usc1f-0", "v2-usc1f-1", "v2-usc1f-2"]
    loop.desired = replace(loop.desired, down="asked")
    loop.run(900)
    assert names(cloud) == ["stray", "v2-usc1f-0"]


def test_a_name_that_only_the_cloud_knows_as_taken_is_passed_over(cloud):
    loop = Loop(cloud, desired(pool()))
    hidden = cloud.foreign("v2-usc1f-0", A)
    listing = cloud.machines
    cloud.machines = lambda zones: Listing(
        tuple(each for each in listing(zones).machines if each != hidden), frozenset()
    )
    loop.run(900)
    assert names(cloud, "ready") == ["v2-usc1f-0", "v2-usc1f-1"]


def test_a_lost_answer_makes_no_second_machine(cloud):
    cloud.lost_answers = 1
    loop = Loop(cloud, desired(pool(zones=(A, B))))
    loop.run(900)
    assert names(cloud) == ["v2-usc1f-0"]


def test_paused_machines_stop_and_come_back(cloud):
    loop = Loop(cloud, desired(pool(count=2, how="on-demand")))
    loop.run(600)
    loop.desired = replace(loop.desired, paused={"v2-usc1f-1": "small"})
    loop.run(3600)
    assert names(cloud, "stopped") == ["v2-usc1f-1"] and len(cloud.there) == 2
    loop.desired = replace(loop.desired, paused={})
    loop.run(600)
    assert len(names(cloud, "ready")) == 2 and not cloud.deleted


def test_a_paused_machine_that_is_gone_is_not_made_again_until_it_is_resumed(cloud):
    loop = Loop(cloud, replace(desired(pool(count=2, how="on-demand")), paused={"v2-usc1f-1": "small"}))
    loop.run(3600)
    assert names(cloud) == ["v2-usc1f-0"]
    loop.desired = replace(loop.desired, paused={})
    loop.run(600)
    assert len(names(cloud, "ready")) == 2


def test_a_vm_is_kept_like_a_pool_of_one(cloud):
    loop = Loop(cloud, desired(pool(), vm("head")))
    loop.run(600)
    assert names(cloud, "ready") == ["gpt2-head", "v2-usc1f-0"]
    cloud.preempt((A, "gpt2-head"), "TERMINATED")
    loop.run(600)
    assert names(cloud, "ready") == names(cloud) == ["gpt2-head", "v2-usc1f-0"]


def test_a_vm_whose_name_somebody_else_has_waits(cloud):
    cloud.foreign("gpt2-head", A)
    loop = Loop(cloud, desired(vm("head")))
    loop.run(600)
    assert loop.actions == [] and loop.waits[0].why == f"{A} has a machine of the name gpt2-head already"


def test_a_pool_that_is_taken_out_goes(cloud):
    loop = Loop(cloud, desired(pool(), pool("other", type_="v3-8", zones=("europe-west4-a",))))
    loop.run(600)
    loop.desired = desired(pool())
    loop.run(600)
    assert names(cloud) == ["v2-usc1f-0"]
    assert [each.why for each in loop.actions if isinstance(each, Delete)] == ["there is no pool other any more"]


def test_down_proves_that_nothing_is_left(cloud):
    cloud.capacity[B] = 0
    loop = Loop(cloud, desired(pool(count=3), pool("line", how="queued", zones=(B,)), vm("head")))
    loop.run(100)
    assert names(cloud, "waiting") == ["v2-usc1b-0"]
    loop.desired = replace(loop.desired, down="asked")
    loop.tick()
    assert left(loop.desired, loop.observed())
    loop.run(300)
    assert cloud.there == {} and left(loop.desired, loop.observed()) == []
    cloud.unreachable = {A}
    loop.tick()
    assert left(loop.desired, loop.observed()) == [f"{A}, which does not answer"]


def test_a_jump_of_the_clock_makes_nothing_late(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.run(60)
    loop.jump(86_400)
    loop.run(600)
    assert len(names(cloud, "ready")) == 2 and not cloud.deleted
    loop.jump(-2 * 86_400)
    cloud.preempt((A, "v2-usc1f-0"))
    loop.run(600)
    assert len(names(cloud, "ready")) == 2


def test_ten_thousand_machines_are_planned_at_once():
    count = 10_000
    pools = [pool(f"p{number}", count=count // 10, zones=(A, B, C)) for number in range(10)]
    wanted = desired(*pools)
    labels = [{FLEET_LABEL: wanted.fleet, POOL_LABEL: each.name} for each in pools]
    machines = tuple(
        Machine(f"v2-usc1f-{n}", A, "tpu", "v2-8", "dead" if n % 3 == 0 else "ready", "READY", how="spot",
                created=1.0, healthy=True, labels=labels[n % 10])
        for n in range(count - 2_000)
    )  # fmt: skip
    listing = Listing(machines, frozenset())
    memory, _ = remember(Memory(), wanted, listing, (), 1_800_000_000.0)
    observed = Observed(listing, memory)
    start = time.process_time()
    found = plan(wanted, observed, 1_800_000_000.0)
    few = time.process_time() - start
    # What is left of the dead goes; their successors need not wait for that in another zone.
    assert len(found.actions) == 2_667 + 2_667 + 2_000
    hundredth = Observed(Listing(machines[:80], frozenset()), memory)
    start = time.process_time()
    plan(replace(wanted, pools=tuple(replace(each, count=10) for each in pools)), hundredth, 1_800_000_000.0)
    assert few < 400 * max(time.process_time() - start, 1e-3)  # no more than linear, and then some
