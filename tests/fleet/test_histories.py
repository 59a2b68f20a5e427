"""Random histories of a cloud: the fleet breaks no rule, and converges once the cloud allows it."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fleet.fake_cloud import FakeCloud
from tests.fleet.loop import EUROPE, FLEET, A, B, Loop, desired, pool, vm
from tpuswarm.catalog import find
from tpuswarm.cloud.errors import Denied
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Machine
from tpuswarm.fleet.decide.actions import Action, Create, Delete
from tpuswarm.fleet.decide.choose_actions import LONG_REPAIR_TIMEOUT_S, list_remaining
from tpuswarm.fleet.decide.desired import Budget
from tpuswarm.fleet.decide.fleet_state import FleetState
from tpuswarm.fleet.decide.money import Grant, quota_key

pytestmark = pytest.mark.slow

ZONES = (A, B, EUROPE)
POOLS = (
    pool("small", 3, ZONES),
    pool("big", 2, ZONES[2:], "on-demand", "v3-32"),
    pool("line", 1, ZONES[1:], "queued", wait_s=1800.0),
    pool("iron", 2, ZONES[:2], "spot", "v6e-16", api="compute"),
    vm("head"),
)
OTHER_LABELS = {FLEET_LABEL: "other-xyz789", POOL_LABEL: "small"}
HEAD_PRICE = 0.6
zones = st.sampled_from(ZONES)
indices = st.integers(0, 50)
FAULTS = {
    "listing_lag_s": st.sampled_from([0.0, 30.0, 200.0]),
    "unreachable": st.sets(zones),
    "lost_responses": st.integers(1, 3),
    "refuses_late": st.booleans(),
    "cut_short": st.integers(1, 2),
    "create_error": st.just(Denied("you lack tpu.nodes.create")),
}


def hourly_cost(machines: list[Machine], granted: int) -> float:
    """Return dollars per hour, where the oldest `granted` of all spot v2-8 in the first zone are free."""
    alike = [machine for machine in machines if (machine.zone, machine.type, machine.spot) == (A, "v2-8", True)]
    free = sorted(alike, key=lambda machine: (machine.created, machine.name))[:granted]
    total = 0.0
    for machine in machines:
        if machine.fleet != FLEET or machine in free:
            continue
        if machine.kind == "vm":
            total += HEAD_PRICE
        elif price := find(machine.type).price(machine.zone):
            total += (price.spot if machine.spot else price.on_demand) or 0.0
    return total


class CheckedLoop(Loop):
    """Check each action against the cloud's real state as it is carried out."""

    granted = 0

    def advance(self, seconds: float) -> None:
        self.cloud.advance(seconds)  # no rule depends on what was spent

    def act(self, action: Action) -> None:
        if isinstance(action, Create):
            self._check_create(action)
        elif isinstance(action, Delete):
            self._check_delete(action.machine, action.why)
        super().act(action)
        if isinstance(action, Create):
            self._check_cost()

    def _check_create(self, action: Create) -> None:
        wanted = next(pool for pool in self.desired.pools if pool.name == action.spec.pool)
        assert self.desired.down is None, "created for a fleet that comes down"
        assert len(self.cloud.live_machines(FLEET, wanted.name)) < wanted.count, f"more than {wanted.count} created"
        assert action.spec.zone in wanted.zones

    def _check_delete(self, machine: Machine, why: str) -> None:
        assert machine.fleet == FLEET, "deleted somebody else's machine"
        found = self.cloud.existing.get((machine.zone, machine.name))
        if found is None or found.state != "ready" or found.healthy is not True or self.desired.down:
            return
        count = next(pool.count for pool in self.desired.pools if pool.name == machine.pool)
        assert len(self.cloud.live_machines(FLEET, machine.pool)) > count, f"{machine.name} was well and wanted: {why}"

    def _check_cost(self) -> None:
        existing = self.cloud.existing.values()
        alive = [machine for machine in existing if machine.state not in ("dead", "deleting", "waiting")]
        limit = self.desired.budget.per_hour
        assert limit is None or hourly_cost(alive, self.granted) <= limit + 1e-6, "above the budget"
        if not self.desired.paid:
            tpus = [machine for machine in alive if machine.kind == "tpu"]
            assert hourly_cost(tpus, self.granted) == 0.0, "bought without permission"


class Histories(RuleBasedStateMachine):
    """Actions of a cloud, a person and a keeper, in any order."""

    @initialize(granted=st.sampled_from([0, 2]), money=st.sampled_from([(True, None), (True, 70.0), (False, None)]))
    def start(self, granted: int, money: tuple[bool, float | None]) -> None:
        paid, per_hour = money
        grants = (Grant("v2-8", A, True, granted, None),) if granted else ()
        self.cloud = FakeCloud()
        self.loop = CheckedLoop(self.cloud, desired(*POOLS, grants=grants, paid=paid, budget=Budget(per_hour=per_hour)))
        self.loop.granted = granted
        self.foreign = [self.cloud.add_foreign("v2-usc1f-1", A, how="on-demand", labels=OTHER_LABELS)]

    @invariant()
    def keeper_continues(self) -> None:
        if hasattr(self, "loop"):
            self.loop.every = 20.0
            self.loop.run(60.0)

    @rule(ticks=st.integers(5, 40), every=st.sampled_from([5.0, 30.0, 120.0]))
    def time_passes(self, ticks: int, every: float) -> None:
        self.loop.every = every
        self.loop.run(ticks * every)

    @rule(faults=st.fixed_dictionaries({}, optional=FAULTS))
    def cloud_has_faults(self, faults: dict[str, object]) -> None:
        vars(self.cloud).update(faults)

    @rule(zone=zones, machines=st.integers(0, 3) | st.none())
    def capacity_changes(self, zone: str, machines: int | None) -> None:
        self.cloud.capacity.pop(zone, None)
        if machines is not None:
            self.cloud.capacity[zone] = machines

    @rule(zone=zones, machines=st.integers(0, 2))
    def quota_shrinks(self, zone: str, machines: int) -> None:
        self.cloud.quota[quota_key("v2-8", zone, True)] = machines

    @rule(index=indices, status=st.sampled_from(["PREEMPTED", "TERMINATED", "FAILED", "404"]))
    def machine_is_preempted(self, index: int, status: str) -> None:
        if ours := self.cloud.live_machines(FLEET):
            machine = ours[index % len(ours)]
            self.cloud.preempt((machine.zone, machine.name), status)

    @rule(index=indices, change=st.sampled_from(["unhealthy", "repairing", "creating"]))
    def machine_is_unhealthy_or_hangs(self, index: int, change: str) -> None:
        states = ("ready",) if change == "unhealthy" else ("ready", "creating")
        if ours := [machine for machine in self.cloud.live_machines(FLEET) if machine.state in states]:
            key = (ours[index % len(ours)].zone, ours[index % len(ours)].name)
            if change == "unhealthy":
                self.cloud.update(key, healthy=False, why="UNHEALTHY")
            else:
                self.cloud.update(key, state=change, said=change.upper(), healthy=None)
                self.cloud.transitions[key] = inf

    @rule()
    def person_fixes_errors_and_retries(self) -> None:
        self.cloud.create_error = None
        self.cloud.quota.clear()
        self.loop.change()

    @rule(index=st.integers(0, 3), count=st.integers(0, 4))
    def person_scales_a_pool(self, index: int, count: int) -> None:
        pools = list(self.loop.desired.pools)
        pools[index] = replace(pools[index], count=count)
        self.loop.desired = replace(self.loop.desired, pools=tuple(pools))

    @rule(seconds=st.sampled_from([-86_400.0, -300.0, 300.0, 86_400.0]))
    def clock_jumps(self, seconds: float) -> None:
        self.loop.jump_clock(seconds)

    @rule(zones=st.sets(zones))
    def keeper_without_memory_takes_over(self, zones: set[str]) -> None:
        self.loop.state, self.loop.answers = FleetState(), []
        self.cloud.unreachable, self.cloud.listing_lag_s, self.cloud.listed_from = zones, 0.0, {}

    @rule(zone=zones, number=st.integers(0, 3))
    def somebody_else_creates_a_machine(self, zone: str, number: int) -> None:
        name = f"{ {A: 'v2-usc1f', B: 'v2-usc1b', EUROPE: 'v3-euw4a'}[zone] }-{number}"
        if (zone, name) not in self.cloud.existing:
            self.foreign.append(self.cloud.add_foreign(name, zone, how="on-demand", labels=OTHER_LABELS))

    def teardown(self) -> None:
        """Lift all limits and check that the fleet is complete; take it down and check that nothing is left."""
        if not hasattr(self, "loop"):
            return
        cloud, loop = self.cloud, self.loop
        cloud.capacity, cloud.quota, cloud.unreachable = {}, {}, set()
        cloud.cut_short = 0
        cloud.create_error, cloud.lost_responses, cloud.listing_lag_s, cloud.listed_from = None, 0, 0.0, {}
        for key, machine in cloud.existing.items():
            if machine.fleet == FLEET and machine.state == "ready":
                cloud.update(key, healthy=True)
        loop.change(paid=True, budget=Budget())
        loop.every = 240.0
        loop.run(2.5 * 3600 + LONG_REPAIR_TIMEOUT_S)  # on-demand machines that hang may take so long to be repaired
        ours = [machine for machine in cloud.existing.values() if machine.fleet == FLEET]
        assert all(machine.state == "ready" for machine in ours), f"left over: {ours}"
        counts = {pool.name: sum(machine.pool == pool.name for machine in ours) for pool in loop.desired.pools}
        assert counts == {pool.name: pool.count for pool in loop.desired.pools}, loop.waits
        assert all(wait.until is None and not wait.missing for wait in loop.waits), loop.waits
        loop.desired = replace(loop.desired, down="asked")
        loop.run(900)
        assert list_remaining(loop.desired, loop.observed()) == []
        assert sorted(cloud.existing.values(), key=str) == sorted(self.foreign, key=str)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
