"""The keeper's own time: deciding about ten thousand machines, calls of a look, and a machine that is made again.

Limits: 0.2 s for a plan of 10,000 machines; as many calls whatever the number of machines; 5 s from a preemption until
the machine is ready again in a rehearsal, without the cloud's own time; 0.2 s for `--help` and 0.5 s for a dry run. The
cloud's clock goes so fast that a machine's notice, end and beginning take 0.2 s; the rest is waiting for the keeper's
next look, and what it does. Each machine has lived for two minutes by then: what is taken away sooner makes the keeper
wait before it asks its zone again. On a machine that others use, seconds of CPU say more than those of a clock. Four
minutes.
"""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from benchmarks.fleet import FLEET, NAMES, NoHistory
from benchmarks.fleet import spec as spec_of
from benchmarks.rehearsal import INIT, PROGRAM, SPEED
from benchmarks.report import Median, Settings, Table, median, verdict
from benchmarks.startup import taken
from benchmarks.weather import Sky, Spell
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.place import Place
from tpuswarm.fleet.decide.desired import Desired, PoolSpec
from tpuswarm.fleet.decide.observe import MIN_LIFETIME_S, observe
from tpuswarm.fleet.decide.plan import make_plan
from tpuswarm.fleet.decide.state import FleetState, Observed
from tpuswarm.fleet.keeper.clock import Clock
from tpuswarm.fleet.keeper.keeper import Keeper
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.store.fleets import MemoryStore

MACHINES, PLAN_S, AGAIN_S, HELP_S, DRY_S = 10_000, 0.2, 5.0, 0.2, 0.5
NOTICE, DELETION, CREATION = 30.0, 30.0, 60.0
"""Seconds that the local cloud takes, by its clock."""
ZONES = ("us-central1-f", "us-central1-b", "us-central1-c", "europe-west4-a", "asia-east1-c")
"""A machine in each, so that what happens to one says nothing of the others' zones."""
SETTLE_S, PATIENCE = 4.3, 60.0
NOW = 1_800_000_000.0


def run(settings: Settings) -> Table:
    """Plans, calls, a rehearsal, starts."""
    times, starts = (2, 2) if settings.quick else (9, 10)
    rows = [
        _planned(what, dead, times) for what, dead in (("all are well", 0), ("a third is gone", 3), ("none yet", 1))
    ]
    few, many = _calls(10), _calls(1_000)
    rows.append(("calls of a look, 10 machines and 1,000", f"{few} and {many}", "the same", verdict(few == many)))
    again, helps, dries = _rehearsed(settings.quick, starts)
    cloud = (NOTICE + DELETION + CREATION) / SPEED
    rows.append(
        (
            f"preempted to ready again, less {cloud:.1f} s of the cloud's",
            f"{Median(*(each - cloud for each in again)).show('.2f')} s",
            f"at most {AGAIN_S:.0f}",
            verdict(again.middle - cloud <= AGAIN_S),
        )
    )
    for name, (wall, worked), limit in (("--help", helps, HELP_S), ("up --dry-run", dries, DRY_S)):
        said = f"{wall.show('.2f')} s, {worked.middle:.2f} s of CPU"
        rows.append((f"tpuswarm {name}", said, f"at most {limit}", verdict(wall.middle <= limit)))
    notes = [f"{times} plans each, {len(ZONES)} preemptions, {starts} starts: median and its interval"]
    return Table("The keeper's own time", ("", "", "limit", ""), rows, notes)


def _planned(what: str, dead: int, times: int) -> tuple[str, ...]:
    """A plan of all machines; each `dead`th is dead, none where it is 0, and all are missing where it is 1."""
    wanted = Desired(FLEET, tuple(_pool(f"p{number}", MACHINES // 10) for number in range(10)), paid=True)
    machines = tuple(
        Machine(
            f"v5e-usc1a-{n}", NAMES[0], "tpu", "v5e-8", "dead" if dead and n % dead == 0 else "ready", "READY",
            how="spot", created=1.0, healthy=True, labels={FLEET_LABEL: FLEET, POOL_LABEL: f"p{n % 10}"},
        )
        for n in range(0 if dead == 1 else MACHINES)
    )  # fmt: skip
    memory, _ = observe(FleetState(), wanted, Listing(machines, frozenset()), (), NOW)
    observed = Observed(Listing(machines, frozenset()), memory)
    seconds = []
    for _ in range(times):
        start = time.process_time()
        make_plan(wanted, observed, NOW)
        seconds.append(time.process_time() - start)
    found = median(seconds)
    shown = f"{found.show('.3f')} s of CPU"
    return f"plan of {MACHINES:,} machines, {what}", shown, f"at most {PLAN_S}", verdict(found.middle <= PLAN_S)


def _pool(name: str, count: int) -> PoolSpec:
    return PoolSpec(name, spec_of("", NAMES[0]), NAMES, count)


def _calls(count: int) -> int:
    """Calls of one look at so many machines that are well."""
    sky = Sky([Spell(0.0, NAMES[0], 10 * count)], 1)
    for number in range(count):
        sky.create(spec_of(f"v5e-usc1a-{number}", NAMES[0]))
    sky.advance(600.0)
    wanted = Desired(FLEET, (PoolSpec("year", spec_of("", NAMES[0]), NAMES, count),), paid=True)
    store = MemoryStore(Document("year", "google", "model", wanted, wanted.zones))
    clock = Clock(wall=lambda: sky.now, steady=lambda: sky.now)
    keeper = Keeper(cast(Any, sky), store, cast(Any, NoHistory()), clock, threads=1)
    keeper.tick()
    sky.calls.clear()
    keeper.tick()
    return sum(sky.calls.values())


def _rehearsed(quick: bool, starts: int) -> tuple[Median, tuple[Median, Median], tuple[Median, Median]]:
    """Seconds from preemptions to machines that are ready again; of the clock and of CPU of `--help` and dry runs."""
    with tempfile.TemporaryDirectory() as name:
        folder, place = Path(name), Place(Path(name) / "cloud")
        environment = {**os.environ, "HOME": name, "TPUSWARM_REHEARSAL": f"{name}/cloud"}

        def call(*words: str) -> None:
            subprocess.run([PROGRAM, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)

        call("rehearsal", "start", "--speed", str(SPEED))
        try:
            call(*INIT, *(word for zone in ZONES[1:] for word in ("--zone", zone)), "--allow-cross-region")
            file = folder / "swarm.toml"
            head, _, pool = file.read_text().partition("[[pool]]")
            pools = (
                re.sub(r"zones = .*", f'zones = ["{zone}"]', pool.replace('"v2-8"', f'"{zone}"', 1)) for zone in ZONES
            )
            file.write_text(head + "".join(f"[[pool]]{each}" for each in pools))
            call("up", "--yes", "--paid")
            with (folder / "keeper.log").open("w") as log:
                keeper = subprocess.Popen([PROGRAM, "keep"], cwd=folder, env=environment, stdout=log, stderr=log)
            try:
                time.sleep(0.0 if quick else MIN_LIFETIME_S)
                again = median(_again(place))
            finally:
                keeper.send_signal(signal.SIGINT)
                keeper.wait(PATIENCE)
            helps, dries = (
                [taken([PROGRAM, *words], folder=folder) for _ in range(starts)]
                for words in (["--help"], ["up", "--dry-run"])
            )
            call("down", "--yes")
        finally:
            call("rehearsal", "stop")
    both = ((median([wall for wall, _ in one]), median([cpu for _, cpu in one])) for one in (helps, dries))
    return (again, *both)  # type: ignore[return-value]  # two


def _again(place: Place) -> list[float]:
    """Preempts one machine after the other when the keeper has settled; seconds until there is one again."""
    found = []
    for name in _wait(place, lambda states: _ready(states) == len(ZONES)):
        time.sleep(SETTLE_S)
        start = time.perf_counter()
        ask(place, "preempt", name=name)
        _wait(place, lambda states: _ready(states) < len(ZONES))
        _wait(place, lambda states: _ready(states) == len(ZONES))
        found.append(time.perf_counter() - start)
    return found


def _ready(states: dict[str, str]) -> int:
    return sum(state == "READY" for state in states.values())


def _wait(place: Place, right: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Names of machines and their states, when they are so."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        states = {each["name"]: each["state"] for each in ask(place, "status")["machines"]}
        if right(states):
            return states
        time.sleep(0.01)
    raise RuntimeError(f"the keeper makes no machine: {ask(place, 'status')}")
