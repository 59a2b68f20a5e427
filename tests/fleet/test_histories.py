"""Any history of a cloud: a fleet never does what it must not, and converges once the cloud allows it."""

from dataclasses import replace
from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fleet.cloud_model import Cloud
from tests.fleet.loop import FLEET, Loop, desired, pool, vm
from tpuswarm.catalog import find
from tpuswarm.cloud.errors import Denied
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Machine
from tpuswarm.fleet.core.actions import Action, Create, Delete
from tpuswarm.fleet.core.desired import Budget
from tpuswarm.fleet.core.memory import Memory
from tpuswarm.fleet.core.money import Grant, lot
from tpuswarm.fleet.core.plan import PATIENCE, left

ZONES = ("us-central1-f", "us-central1-b", "europe-west4-a")
POOLS = (
    pool("small", 3, ZONES),
    pool("big", 2, ZONES[2:], "on-demand", "v3-32"),
    pool("line", 1, ZONES[1:], "queued", wait_s=1800.0),
    vm("head"),
)
OTHERS = {FLEET_LABEL: "other-xyz789", POOL_LABEL: "small"}
HEAD_PRICE = 0.6
zones = st.sampled_from(ZONES)
which = st.integers(0, 50)


def hourly(machines: list[Machine], granted: int) -> float:
    """Dollars an hour of a fleet's machines; `granted` of all spot v2-8 in the first zone cost nothing."""
    alike = [each for each in machines if (each.zone, each.type, each.spot) == (ZONES[0], "v2-8", True)]
    free = {each.name for each in sorted(alike, key=lambda each: (each.created, each.name))[:granted]}
    total = 0.0
    for each in machines:
        if each.fleet != FLEET or (each in alike and each.name in free):
            continue
        if each.kind == "vm":
            total += HEAD_PRICE
        else:
            price = find(each.type).price(each.zone)
            total += (price.spot if each.spot else price.on_demand) or 0.0 if price else 0.0
    return total


class Watched(Loop):
    """Holds each action against the cloud's own truth at the moment at which it is carried out."""

    granted = 0

    def act(self, action: Action) -> None:
        if isinstance(action, Create):
            self._allowed(action)
        elif isinstance(action, Delete):
            assert action.machine.fleet == FLEET, "what is not ours was deleted"
            self._deserved(action.machine, action.why)
        super().act(action)
        rate, most = hourly(self._alive(), self.granted), self.desired.budget.per_hour
        if isinstance(action, Create) and most is not None:
            assert rate <= most + 1e-6, f"{rate} an hour are above the budget"
        if isinstance(action, Create) and not self.desired.paid:
            tpus = hourly([each for each in self._alive() if each.kind == "tpu"], self.granted)
            assert tpus == 0.0, f"{tpus} an hour were bought unasked"

    def _alive(self) -> list[Machine]:
        return [each for each in self.cloud.there.values() if each.state not in ("dead", "deleting", "waiting")]

    def _allowed(self, action: Create) -> None:
        wanted = next(each for each in self.desired.pools if each.name == action.spec.pool)
        assert self.desired.down is None, "something was created for a fleet that comes down"
        held = self.cloud.mine(FLEET, action.spec.pool)
        assert len(held) < wanted.count, f"{wanted.name} would have more than {wanted.count}"
        assert action.spec.zone in wanted.zones

    def _deserved(self, machine: Machine, why: str) -> None:
        found = self.cloud.there.get((machine.zone, machine.name))
        if found is None or found.state != "ready" or found.healthy is not True or self.desired.down:
            return
        wanted = next(each for each in self.desired.pools if each.name == machine.pool)
        assert len(self.cloud.mine(FLEET, machine.pool)) > wanted.count, f"{machine.name} was well and wanted: {why}"


class Histories(RuleBasedStateMachine):
    """What a cloud, a person and a keeper may do, in any order."""

    @initialize(
        granted=st.sampled_from([0, 2]),
        money=st.sampled_from([(True, None), (True, 70.0), (False, None)]),
    )
    def begin(self, granted: int, money: tuple[bool, float | None]) -> None:
        paid, per_hour = money
        grants = (Grant("v2-8", ZONES[0], True, granted, None),) if granted else ()
        wanted = replace(desired(*POOLS), grants=grants, paid=paid, budget=Budget(per_hour=per_hour))
        self.cloud = Cloud()
        self.loop = Watched(self.cloud, wanted)
        self.loop.granted = granted
        self.foreign = [self.cloud.foreign("v2-usc1f-1", ZONES[0], how="on-demand", labels=OTHERS)]

    @invariant()
    def the_keeper_goes_on(self) -> None:
        if hasattr(self, "loop"):
            self.loop.every = 20.0
            self.loop.run(60.0)

    @rule(ticks=st.integers(5, 40), every=st.sampled_from([5.0, 30.0, 120.0]))
    def time_passes(self, ticks: int, every: float) -> None:
        self.loop.every = every
        self.loop.run(ticks * every)

    @rule(seconds=st.sampled_from([0.0, 30.0, 200.0]))
    def lists_lag_behind(self, seconds: float) -> None:
        self.cloud.lag = seconds

    @rule(zone=zones, machines=st.integers(0, 3))
    def capacity_shrinks(self, zone: str, machines: int) -> None:
        self.cloud.capacity[zone] = machines

    @rule(zone=zones)
    def capacity_returns(self, zone: str) -> None:
        self.cloud.capacity.pop(zone, None)

    @rule(zone=zones, machines=st.integers(0, 2))
    def a_quota_appears(self, zone: str, machines: int) -> None:
        self.cloud.quota[lot("v2-8", zone, True)] = machines

    @rule(zones=st.sets(zones))
    def zones_fall_silent(self, zones: set[str]) -> None:
        self.cloud.unreachable = zones

    @rule(which=which, how=st.sampled_from(["PREEMPTED", "TERMINATED", "FAILED", "404"]))
    def a_machine_is_taken_away(self, which: int, how: str) -> None:
        if mine := self.cloud.mine(FLEET):
            found = mine[which % len(mine)]
            self.cloud.preempt((found.zone, found.name), how)

    @rule(which=which)
    def a_machine_is_sick(self, which: int) -> None:
        if mine := [each for each in self.cloud.mine(FLEET) if each.state == "ready"]:
            found = mine[which % len(mine)]
            self.cloud.change((found.zone, found.name), healthy=False, why="UNHEALTHY")

    @rule(which=which, state=st.sampled_from(["repairing", "creating"]))
    def a_machine_hangs(self, which: int, state: str) -> None:
        if mine := [each for each in self.cloud.mine(FLEET) if each.state in ("ready", "creating")]:
            key = (mine[which % len(mine)].zone, mine[which % len(mine)].name)
            self.cloud.change(key, state=state, said=state.upper(), healthy=None)
            self.cloud.due[key] = inf

    @rule(count=st.integers(1, 3))
    def answers_are_lost(self, count: int) -> None:
        self.cloud.lost_answers = count

    @rule(late=st.booleans())
    def lack_of_capacity_shows_at_once_or_later(self, late: bool) -> None:
        self.cloud.late_refusals = late

    @rule()
    def a_permission_is_taken_away(self) -> None:
        self.cloud.deny = Denied("you lack tpu.nodes.create")

    @rule()
    def the_person_mends_and_asks_again(self) -> None:
        self.cloud.deny = None
        self.cloud.quota.clear()
        self.loop.desired = replace(self.loop.desired, revision=self.loop.desired.revision + 1)

    @rule(which=st.integers(0, 2), count=st.integers(0, 4))
    def the_person_scales(self, which: int, count: int) -> None:
        pools = list(self.loop.desired.pools)
        pools[which] = replace(pools[which], count=count)
        self.loop.desired = replace(self.loop.desired, pools=tuple(pools))

    @rule(seconds=st.sampled_from([-86_400.0, -300.0, 300.0, 86_400.0]))
    def the_clock_jumps(self, seconds: float) -> None:
        self.loop.jump(seconds)

    @rule(zones=st.sets(zones))
    def another_keeper_takes_over_and_knows_nothing(self, zones: set[str]) -> None:
        self.loop.memory, self.loop.answers = Memory(), []
        self.cloud.unreachable, self.cloud.lag, self.cloud.shown = zones, 0.0, {}

    @rule(zone=zones, number=st.integers(0, 3))
    def somebody_else_makes_a_machine(self, zone: str, number: int) -> None:
        stem = {"us-central1-f": "v2-usc1f", "us-central1-b": "v2-usc1b", "europe-west4-a": "v3-euw4a"}[zone]
        if (zone, f"{stem}-{number}") not in self.cloud.there:
            self.foreign.append(self.cloud.foreign(f"{stem}-{number}", zone, how="on-demand", labels=OTHERS))

    def teardown(self) -> None:
        """The cloud allows everything again: the fleet is what is wanted; then it comes down, and nothing is left."""
        if not hasattr(self, "loop"):
            return
        cloud, loop = self.cloud, self.loop
        cloud.capacity, cloud.quota, cloud.unreachable, cloud.deny, cloud.lost_answers = {}, {}, set(), None, 0
        cloud.lag, cloud.shown = 0.0, {}
        for key, machine in cloud.there.items():
            if machine.fleet == FLEET and machine.state == "ready":
                cloud.change(key, healthy=True)
        loop.desired = replace(loop.desired, paid=True, budget=Budget(), revision=loop.desired.revision + 1)
        loop.every = 60.0
        loop.run(2.5 * 3600 + PATIENCE)  # what hangs on demand has so long to be repaired
        ours = [each for each in cloud.there.values() if each.fleet == FLEET]
        assert all(each.state == "ready" for each in ours), f"left over: {ours}"
        assert {each.name: each.count for each in loop.desired.pools} == {
            each.name: sum(found.pool == each.name for found in ours) for each in loop.desired.pools
        }, loop.waits
        assert all(each.until is None and not each.missing for each in loop.waits), loop.waits
        loop.desired = replace(loop.desired, down="asked")
        loop.run(900)
        assert left(loop.desired, loop.observed()) == []
        assert sorted(cloud.there.values(), key=str) == sorted(self.foreign, key=str)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
