"""Grants, budgets and ends of a fleet in a plan, and what a ledger charges."""

from dataclasses import replace

import pytest

from tests.fleet.cloud_model import Cloud
from tests.fleet.loop import Loop, desired, names, pool
from tpuswarm.fleet.core.desired import Budget, DownWhen
from tpuswarm.fleet.core.ledger import UNSEEN, Ledger, charge
from tpuswarm.fleet.core.memory import Memory, Observed
from tpuswarm.fleet.core.money import Grant
from tpuswarm.fleet.core.plan import plan
from tpuswarm.fleet.core.remember import remember

A, B, C = "us-central1-f", "us-central1-b", "us-central1-c"


def test_grants_cover_first_and_nothing_else_is_bought_unasked(cloud):
    grants = (Grant("v2-8", A, True, 2, None),)
    loop = Loop(cloud, replace(desired(pool(count=4, zones=(A, B))), grants=grants, paid=False))
    loop.run(900)
    assert names(cloud, "ready") == ["v2-usc1f-0", "v2-usc1f-1"]
    assert loop.waits[0].missing == 2 and loop.waits[0].why.startswith(
        f"{A}: no grant covers a further v2-8, which costs $1.35 an hour: `tpuswarm up --paid`; {B}: no grant"
    )
    loop.desired = replace(loop.desired, paid=True, revision=2)
    loop.run(900)
    assert len(names(cloud, "ready")) == 4


def test_somebody_elses_machines_draw_on_the_same_grant(cloud):
    cloud.foreign("theirs", A, how="spot")
    cloud.advance(10)
    loop = Loop(cloud, replace(desired(pool(count=2)), grants=(Grant("v2-8", A, True, 2, None),), paid=False))
    loop.run(900)
    assert names(cloud, "ready") == ["theirs", "v2-usc1f-0"]


def test_when_a_grant_ends_its_machines_are_gone_in_time(cloud):
    ends = cloud.now + 4000
    loop = Loop(cloud, replace(desired(pool(count=2)), grants=(Grant("v2-8", A, True, 2, ends),), paid=False))
    loop.run(600)
    loop.run(2700)
    assert len(names(cloud, "ready")) == 2
    loop.run(600)
    assert names(cloud) == [] and cloud.now < ends
    loop.run(3600)
    assert names(cloud) == []


def test_the_budget_of_an_hour_and_of_all(cloud):
    loop = Loop(cloud, replace(desired(pool(count=5)), budget=Budget(per_hour=4.0)))
    loop.run(900)
    assert len(names(cloud, "ready")) == 2  # of 1.35 each
    assert loop.waits[0].why == f"{A}: $4.05 an hour would be above the budget's $4.00"

    loop = Loop(Cloud(), replace(desired(pool(count=2)), budget=Budget(total=10.0)))
    loop.run(6 * 3600)
    assert loop.desired.down and loop.desired.down.endswith("are spent of the budget's $10.00 in all")
    assert loop.cloud.there == {}
    assert 9.0 < loop.spent <= 10.0


def test_what_waits_in_a_queue_counts_as_what_it_will_cost(cloud):
    """All of it may come at once, and then stays."""
    cloud.capacity = {A: 0}
    loop = Loop(cloud, replace(desired(pool(count=6, how="queued")), budget=Budget(per_hour=10.0)))
    loop.run(200)
    assert (
        len(names(cloud, "waiting")) == 2 and "$13.50 an hour would be above the budget's $10.00" in loop.waits[0].why
    )
    cloud.capacity = {}
    loop.run(900)
    assert len(names(cloud)) == len(names(cloud, "ready")) == 2

    cloud = Cloud()
    cloud.capacity = {A: 0}
    granted = (Grant("v2-8", A, False, 1, None),)
    loop = Loop(cloud, replace(desired(pool(count=4, how="queued")), grants=granted, paid=False))
    loop.run(200)
    cloud.capacity = {}
    loop.run(900)
    assert len(names(cloud)) == 1 and loop.spent == 0


def test_what_waits_takes_no_grant_from_what_runs_and_ends_no_fleet(cloud):
    granted = (Grant("v2-8", A, False, 1, None),)
    loop = Loop(cloud, replace(desired(pool(how="on-demand")), grants=granted, budget=Budget(total=20.0)))
    loop.run(600)
    cloud.change((A, "v2-usc1f-0"), created=cloud.now)  # the request is older
    cloud.capacity = {A: 1}
    loop.desired = replace(loop.desired, pools=(pool(how="on-demand"), pool("line", 3, how="queued")), revision=2)
    loop.run(7200)
    assert len(names(cloud, "waiting")) == 3 and loop.spent == 0 and loop.desired.down is None


def test_what_runs_outside_of_a_grant_unasked_is_said(cloud):
    loop = Loop(cloud, desired(pool(count=3)))
    loop.run(600)
    loop.desired = replace(loop.desired, grants=(Grant("v2-8", A, True, 1, None),), paid=False, revision=2)
    loop.run(60)
    assert len(names(cloud, "ready")) == 3 and loop.waits[0].of == "pool small"
    assert loop.waits[0].why.startswith("2 of its machines cost $2.70 an hour, as no grant covers them")


def test_a_zone_of_which_one_list_alone_failed_is_counted_once(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.run(600)
    listing = loop.listing._replace(unreachable=frozenset({A}))
    memory, _ = remember(loop.memory, loop.desired, listing, [], cloud.now)
    observed = Observed(listing, memory)
    assert len(observed.machines) == 2
    ledger = charge(Ledger({}, cloud.now), loop.desired, observed, cloud.now + 3600)
    assert ledger.pools["small"].hours == pytest.approx(2)
    assert plan(loop.desired, observed, cloud.now).actions == ()


def test_a_clock_that_is_behind_the_clouds_charges_all_the_same(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.jump(-7200)
    loop.run(600)
    begun = Ledger({}, loop.now - 600)
    ledger = charge(begun, loop.desired, loop.observed(), loop.now + 900)
    assert ledger.pools["small"].hours == pytest.approx(2 * 1500 / 3600)
    assert charge(Ledger(), loop.desired, loop.observed(), loop.now).dollars == 0
    loop.memory = Memory()  # a keeper that has not seen them come
    loop.tick()
    cloud.advance(3600)
    cloud.preempt((A, "v2-usc1f-0"))
    loop.tick()
    assert "took it away after 1.0 h" in loop.events[-1].text
    assert not any(each.failures for each in loop.memory.places.values()), "the zone is as good as it was"


def test_what_went_while_nobody_looked_was_there_and_is_paid_for_once(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.run(600)
    ledger = charge(Ledger(), loop.desired, loop.observed(), loop.now)
    cloud.advance(3600)
    cloud.preempt((A, "v2-usc1f-0"))
    loop.memory = Memory()  # of a keeper on another computer
    loop.tick()
    assert [each.kind for each in loop.events if each.machine == "v2-usc1f-0"][-1] == "preempted"
    assert not any(each.failures for each in loop.memory.places.values()), "the zone refused nothing"
    later = charge(ledger, loop.desired, loop.observed(), loop.now)
    assert later.pools["small"].hours - ledger.pools["small"].hours == pytest.approx(2 * (loop.now - ledger.at) / 3600)
    cloud.advance(10)
    loop.tick()
    last = charge(later, loop.desired, loop.observed(), loop.now)
    assert last.pools["small"].hours - later.pools["small"].hours == pytest.approx(10 / 3600)


def test_hours_that_nobody_saw_end_no_fleet(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.run(600)
    ledger = charge(Ledger(), loop.desired, loop.observed(), loop.now)
    cloud.preempt((A, "v2-usc1f-0"))
    cloud.advance(72 * 3600)
    loop.memory = Memory()  # of a keeper that was away for three days
    loop.tick()
    later = charge(ledger, loop.desired, loop.observed(), loop.now)
    unseen = loop.now - ledger.at
    assert later.pools["small"].hours - ledger.pools["small"].hours == pytest.approx((unseen + UNSEEN) / 3600)


def test_no_budget_has_an_unknown_price(cloud):
    unknown = pool(type_="v6e-8", zones=("asia-east1-c",))
    loop = Loop(cloud, replace(desired(unknown), budget=Budget(per_hour=1e6)))
    loop.run(300)
    assert cloud.there == {} and "nobody says what a v6e-8 costs there" in loop.waits[0].why


@pytest.mark.parametrize(
    ("when", "work", "why"),
    [
        (DownWhen(at=1_800_003_000.0), {}, "its date has come"),
        (DownWhen(done=True), {"done": True}, "the work is done"),
        (DownWhen(idle_s=1800.0), {"busy_at": 1_800_000_900.0}, "nothing has run for 30 min"),
    ],
)
def test_down_when(cloud, when, work, why):
    loop = Loop(cloud, replace(desired(pool(count=2)), down_when=when))
    loop.run(1200)
    assert len(names(cloud, "ready")) == 2
    loop.work = replace(loop.work, **work)
    loop.run(2400)
    assert cloud.there == {} and why in (loop.desired.down or "")
