"""Grants, budgets and end conditions of a fleet, and what its ledger charges."""

from dataclasses import replace

import pytest

from tests.fleet.fake_cloud import FakeCloud
from tests.fleet.loop import ZONE, A, B, Loop, desired, pool, started
from tpuswarm.cloud.protocol import Machine, VmSpec
from tpuswarm.fleet.decide import money
from tpuswarm.fleet.decide.choose_actions import make_plan
from tpuswarm.fleet.decide.desired import Budget
from tpuswarm.fleet.decide.fleet_state import FleetState, Observed
from tpuswarm.fleet.decide.observe import observe
from tpuswarm.fleet.decide.spending import MAX_UNSEEN_S, Spending, charge

NOW = 1_800_000_000.0


def grant(type_: str = "v2-8", is_spot: bool = True, count: int = 2, ends: float | None = None) -> money.Grant:
    return money.Grant(type_, ZONE, is_spot, count, ends)


def tpu(name: str, created: float, type_: str = "v2-8", zone: str = ZONE, how: str = "spot") -> Machine:
    return Machine(name, zone, "tpu", type_, "ready", "READY", how=how, created=created)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("type_", "is_spot", "wanted", "how", "is_covered"),
    [
        ("v2-8", True, "v2-8", "on-demand", False),
        ("v2-8", False, "v2-8", "on-demand", True),
        ("v2-8", False, "v2-8", "queued", True),  # a queued request is for an on-demand TPU
        ("v2-8", False, "v2-8", "reserved", False),
        ("v2-32", True, "v2-8", "spot", False),  # pod quota is separate
        ("v2-8", True, "v2-32", "spot", False),
        ("v4-8", True, "v4-16", "spot", True),  # two v4-8 have the chips of one v4-16
        ("v4-8", True, "v4-32", "spot", False),
        ("v3-8", True, "v2-8", "spot", False),
    ],
)
def test_grant_covers_its_type_zone_and_provisioning(type_, is_spot, wanted, how, is_covered):
    cover = money.GrantCover([grant(type_, is_spot)], NOW)
    assert not cover.claim(replace(tpu("a", 0.0, wanted, how=how), api="compute")), "grants are for the TPU API"
    assert cover.claim(tpu("a", 0.0, wanted, how=how)) == is_covered
    assert not cover.claim(tpu("a", 0.0, wanted, B, how))


def test_grant_covers_the_oldest_machines_up_to_its_count():
    found, left = money.covered_machines([tpu("new", 3.0), tpu("old", 1.0), tpu("middle", 2.0)], [grant()], NOW)
    assert found == {(ZONE, "old"), (ZONE, "middle")} and not left.claim(tpu("next", 4.0))


def test_prices_of_machines_and_disks_and_their_sums():
    assert money.machine_price(tpu("a", 0.0)) == pytest.approx(1.35)
    assert money.machine_price(tpu("a", 0.0, how="on-demand")) == pytest.approx(4.5)
    assert money.machine_price(tpu("a", 0.0, "v6e-8", "asia-east1-c")) is None
    assert money.machine_price(tpu("a", 0.0, "v99-8")) is None, "a type that only the cloud knows"
    spec = VmSpec("head", ZONE, "n2-highmem-8", "fleet", "head", "image", disk_gib=200)
    head = Machine("head", ZONE, "vm", "n2-highmem-8", "ready", "RUNNING", disk_gib=200)
    with_disk, without = money.machine_price(head), money.machine_price(replace(head, disk_gib=None))
    assert with_disk and without and with_disk - without == pytest.approx(200 * 0.1 / 730)
    assert with_disk == money.spec_price(spec), "the price before it is created"
    rate = money.Rate().plus(1.35).plus(None).plus(1.35)
    assert rate.hour == "$2.70 and 1 unknown price" and rate.day == "$64.80 and 1 unknown price"
    assert money.Rate().plus(None).plus(None).hour == "2 unknown prices"
    assert money.Rate().hour == "$0.00"


def test_only_granted_machines_are_created_unless_paying_is_allowed(cloud):
    cloud.add_foreign("theirs", A, how="spot")  # uses the same grant
    cloud.advance(10)
    loop = started(cloud, pool(count=4, zones=(A, B)), grants=(grant(count=3),), paid=False, seconds=900)
    assert cloud.names("ready") == ["theirs", "v2-usc1f-0", "v2-usc1f-1"]
    assert loop.waits[0].missing == 2 and loop.waits[0].why.startswith(
        f"{A}: no grant covers another v2-8, which costs $1.35 an hour: `tpuswarm up --paid`; {B}: no grant"
    )
    loop.change(paid=True)
    loop.run(900)
    assert len(cloud.names("ready")) == 5
    loop.change(paid=False)
    loop.run(60)
    assert len(cloud.names("ready")) == 5 and loop.waits[0].subject == "pool small"
    assert loop.waits[0].why.startswith("no grant covers 2 of its machines, which cost $2.70 an hour")


def test_machines_are_deleted_before_their_grant_ends(cloud):
    ends = cloud.now + 4000
    loop = Loop(cloud, desired(pool(count=2), grants=(grant(ends=ends),), paid=False))
    loop.run(4000 - money.DELETE_MARGIN_S - 100)
    assert len(cloud.names("ready")) == 2
    loop.run(600)
    assert cloud.names() == [] and cloud.now < ends
    loop.run(3600)
    assert cloud.names() == []


def test_hourly_budget_limits_machines_and_allows_no_unknown_price(cloud):
    unknown = pool("unknown", type_="v6e-8", zones=("asia-east1-c",))
    loop = started(cloud, pool(count=5), unknown, budget=Budget(per_hour=4.0), seconds=900)
    assert cloud.names() == ["v2-usc1f-0", "v2-usc1f-1"], "at $1.35 each"
    assert loop.waits[0].why == f"{A}: $4.05 an hour would be above the budget's $4.00"
    assert "the price of a v6e-8 there is unknown" in loop.waits[1].why


def test_fleet_comes_down_before_its_total_budget_is_exceeded(cloud):
    loop = started(cloud, pool(count=2), budget=Budget(total=10.0), seconds=6 * 3600)
    assert loop.desired.down and loop.desired.down.endswith("are spent, and the budget allows $10.00")
    assert cloud.existing == {} and 9.0 < loop.spent <= 10.0


def test_queued_requests_count_against_budget_and_grants(cloud):
    cloud.capacity = {A: 0}
    loop = started(cloud, pool(count=6, how="queued"), budget=Budget(per_hour=10.0), seconds=200)
    assert len(cloud.names("waiting")) == 2
    assert "$13.50 an hour would be above the budget's $10.00" in loop.waits[0].why
    cloud.capacity = {}
    loop.run(900)
    assert len(cloud.names()) == len(cloud.names("ready")) == 2

    cloud = FakeCloud()
    cloud.capacity = {A: 0}
    loop = started(cloud, pool(count=4, how="queued"), grants=(grant(is_spot=False, count=1),), paid=False, seconds=200)
    cloud.capacity = {}
    loop.run(900)
    assert len(cloud.names()) == 1 and loop.spent == 0


def test_queued_request_takes_no_grant_from_a_running_machine(cloud):
    fleet = desired(pool(how="on-demand"), grants=(grant(is_spot=False, count=1),), budget=Budget(total=20.0))
    loop = Loop(cloud, fleet)
    loop.run(600)
    cloud.update((A, "v2-usc1f-0"), created=cloud.now)  # the request is older
    cloud.capacity = {A: 1}
    loop.change(pools=(pool(how="on-demand"), pool("line", 3, how="queued")))
    loop.run(7200)
    assert len(cloud.names("waiting")) == 3 and loop.spent == 0 and loop.desired.down is None


@pytest.fixture
def running(cloud) -> Loop:
    return started(cloud, pool(count=2))


def hours(ledger: Spending) -> float:
    return ledger.pools["small"].hours


def test_partly_listed_zone_is_charged_once(cloud, running):
    listing = running.listing._replace(unreachable=frozenset({A}))
    memory, _ = observe(running.state, running.desired, listing, [], cloud.now)
    observed = Observed(listing, memory)
    assert len(observed.machines) == 2
    ledger = charge(Spending({}, cloud.now), running.desired, observed, cloud.now + 3600)
    assert hours(ledger) == pytest.approx(2)
    assert make_plan(running.desired, observed, cloud.now).actions == ()


def test_late_clock_charges_all_hours(cloud):
    loop = Loop(cloud, desired(pool(count=2)))
    loop.jump_clock(-7200)
    loop.run(600)
    ledger = charge(Spending({}, loop.now - 600), loop.desired, loop.observed(), loop.now + 900)
    assert hours(ledger) == pytest.approx(2 * 1500 / 3600)
    assert charge(Spending(), loop.desired, loop.observed(), loop.now).dollars == 0


def test_machine_preempted_while_no_keeper_ran_is_charged_once_and_blames_no_zone(cloud, running):
    first = charge(Spending(), running.desired, running.observed(), running.now)
    cloud.advance(3600)
    cloud.preempt((A, "v2-usc1f-0"))
    running.state = FleetState()  # of a keeper on another computer
    running.tick()
    assert [event.kind for event in running.events if event.machine == "v2-usc1f-0"][-1] == "preempted"
    assert not any(place.failures for place in running.state.backoffs.values())
    second = charge(first, running.desired, running.observed(), running.now)
    assert hours(second) - hours(first) == pytest.approx(2 * (running.now - first.at) / 3600)
    cloud.advance(10)
    running.tick()
    third = charge(second, running.desired, running.observed(), running.now)
    assert hours(third) - hours(second) == pytest.approx(10 / 3600)


def test_only_some_unobserved_hours_of_a_dead_machine_are_charged(cloud, running):
    ledger = charge(Spending(), running.desired, running.observed(), running.now)
    cloud.preempt((A, "v2-usc1f-0"))
    cloud.advance(72 * 3600)
    running.state = FleetState()  # of a keeper that was away for three days
    running.tick()
    later = charge(ledger, running.desired, running.observed(), running.now)
    assert hours(later) - hours(ledger) == pytest.approx((running.now - ledger.at + MAX_UNSEEN_S) / 3600)
