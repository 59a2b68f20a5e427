"""Measure a keeper's tick over 10,000 machines, half of them in Compute Engine. Half a minute.

Seconds of CPU, without a cloud: the listing and the fleet's document are in memory, the history is a local file. Plans
of a fleet that has just lost a third of its machines, or has none yet, are measured alone: their ticks wait for the
cloud.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.fleet.fake_cloud import START
from tests.fleet.loop import FLEET, ManagedFleet, desired, pool

from benchmarks.report import Median, Settings, Table, median, verdict
from tpuswarm.catalog import Api
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, Worker
from tpuswarm.fleet.decide.choose_actions import make_plan
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import FleetState, Observed
from tpuswarm.fleet.decide.observe import observe

MACHINE_COUNT, TICK_COUNT, LIMIT_S = 10_000, 21, 0.2
ZONES: dict[Api, str] = {"tpu": "us-central1-f", "compute": "us-east5-a"}
TYPES: dict[Api, str] = {"tpu": "v2-8", "compute": "v6e-8"}
POOLS_PER_API, LOST_EVERY = 5, 3


def run(settings: Settings) -> Table:
    count = 100 if settings.quick else MACHINE_COUNT
    fleet, ready = wanted(count), machines(count)
    preempted = tuple(
        replace(machine, state="dead", said="PREEMPTED") if number % LOST_EVERY == 0 else machine
        for number, machine in enumerate(ready)
    )
    results = {
        "tick, all ready": ticks(fleet, ready),
        "plan, a third preempted": plans(fleet, ready, preempted),
        "plan, none yet": plans(fleet, (), ()),
    }
    rows = [
        (name, f"{seconds.show('.3f')} s", f"at most {LIMIT_S}", verdict(seconds.middle <= LIMIT_S))
        for name, seconds in results.items()
    ]
    return Table(f"A keeper with {count:,} machines", ("", "CPU", "limit", ""), rows, [f"{TICK_COUNT} runs of each"])


def wanted(count: int) -> Desired:
    pools = [
        pool(f"{api}{number}", count // (2 * POOLS_PER_API), (ZONES[api],), type_=TYPES[api], api=api)
        for api in ZONES
        for number in range(POOLS_PER_API)
    ]
    return desired(*pools)


def machines(count: int) -> tuple[Machine, ...]:
    return tuple(
        Machine(
            f"{TYPES[api].partition('-')[0]}-{number}", ZONES[api], "tpu", TYPES[api], "ready", "READY", how="spot",
            api=api, created=START - 3600, healthy=True, workers=(Worker("10.0.0.1", "192.0.2.1"),),
            labels={FLEET_LABEL: FLEET, POOL_LABEL: f"{api}{number % POOLS_PER_API}"},
        )
        for api in ZONES
        for number in range(count // 2)
    )  # fmt: skip


def ticks(fleet: Desired, listed: tuple[Machine, ...]) -> Median:
    with tempfile.TemporaryDirectory() as folder:
        managed = ManagedFleet(Path(folder), fleet)
        managed.cloud.existing = {(machine.zone, machine.name): machine for machine in listed}
        listing = Listing(listed, frozenset())
        managed.cloud.machines = lambda zones: listing  # type: ignore[method-assign]
        keeper = managed.keeper()
        assert keeper.tick().converged

        def tick() -> None:
            managed.cloud.now += 3
            keeper.tick()

        return measure(tick)


def plans(fleet: Desired, before: tuple[Machine, ...], after: tuple[Machine, ...]) -> Median:
    state, _ = observe(FleetState(), fleet, Listing(before, frozenset()), (), START)

    def plan() -> None:
        listing = Listing(after, frozenset())
        seen, _ = observe(state, fleet, listing, (), START + 3)
        assert make_plan(fleet, Observed(listing, seen), START + 3).actions

    return measure(plan)


def measure(action: Callable[[], None]) -> Median:
    seconds = []
    for _ in range(TICK_COUNT):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return median(seconds)
