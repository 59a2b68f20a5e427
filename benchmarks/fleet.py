"""A year of weather: the keeper beside a loop like tpunicorn's babysit and one like SkyPilot's eager fail-over.

All three want a hundred spot machines, under the same spells (see `weather`). Ours is the keeper itself, which looks as
often as it does on a real cloud; looks in which nothing can have changed are left out. The other two are written anew
from what their code does, without its mistakes: babysit, which stays in a zone, tries again after a failed creation,
and the fail-over forgets no machine. Each of their machines has a loop of its own.
"""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, repeat
from math import ceil
from typing import Any, NamedTuple, cast

from benchmarks.report import Settings, Table, verdict
from benchmarks.weather import DAY, HOUR, TYPE, ZONES, Key, Sky, allowed, forecast
from tpuswarm.catalog import find
from tpuswarm.cloud.protocol import TpuSpec
from tpuswarm.fleet.decide.desired import Desired, PoolSpec
from tpuswarm.fleet.keeper.clock import Clock
from tpuswarm.fleet.keeper.keeper import BUSY_INTERVAL_S, IDLE_INTERVAL_S, Keeper
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.store.fleets import MemoryStore

WANTED, DAYS, SEED = 100, 365, 1
FLEET = "year-abc123"
SHARE = 0.95
NAMES = tuple(zone.name for zone in ZONES)


def spec(name: str, zone: str) -> TpuSpec:
    """A machine."""
    return TpuSpec(name, zone, TYPE, "spot", FLEET, "year", "v2-alpha-tpuv5-lite")


class NoHistory:
    """Keeps nothing: the keeper runs in one go."""

    trouble = None

    def memory(self) -> None:
        """See History."""

    def keep(self, *what: object) -> None:
        """See History."""


def keep(sky: Sky, seconds: float) -> None:
    """The keeper."""
    pool = PoolSpec("year", spec("", NAMES[0]), NAMES, WANTED)
    wanted = Desired(FLEET, (pool,), paid=True)
    store = MemoryStore(Document("year", "google", "model", wanted, wanted.zones))
    clock = Clock(wall=lambda: sky.now, steady=lambda: sky.now)
    keeper = Keeper(cast(Any, sky), store, cast(Any, NoHistory()), clock, threads=1)
    while sky.now < seconds:
        tick = keeper.tick()
        moving = tick.plan.actions or tick.observed.memory.asked or any(
            each.state != "ready" for each in sky.there.values()
        )  # fmt: skip
        every = BUSY_INTERVAL_S if moving else IDLE_INTERVAL_S
        # Nothing changes before: here no machine hangs, so no deadline of the planner's comes to its end.
        news = min([sky.next, *(each.until for each in tick.plan.waits if each.until is not None)])
        looks = 1 if tick.plan.actions else max(1, ceil((news - sky.now) / every))
        sky.advance(min(seconds, sky.now + looks * every))


class Change(NamedTuple):
    """A change of a machine, which a loop sees at its next look."""

    key: Key
    every: float
    """Seconds between two looks."""


Loop = Iterator[float | Change]
"""Of one machine: yields the seconds, or the change, for which it waits."""
CALL = 5.0
"""Seconds between two looks of a command that waits for an operation."""


class Loops:
    """Runs loops of single machines."""

    def __init__(self, sky: Sky):
        self._sky, self._dice = sky, random.Random(sky.seed)
        self._waiting: dict[Key, tuple[Loop, float]] = {}
        sky.changed = self._changed

    def go(self, loop: Loop) -> None:
        """On to its next step."""
        step = next(loop)
        if isinstance(step, Change):
            self._waiting[step.key] = loop, step.every
        else:
            self._sky.at(self._sky.now + step, lambda: self.go(loop))

    def _changed(self, key: Key) -> None:
        if found := self._waiting.pop(key, None):
            loop, every = found
            self._sky.at(self._sky.now + self._dice.uniform(0, every), lambda: self.go(loop))


def create(sky: Sky, key: Key) -> Loop:
    """Until it is ready, or has come to nothing."""
    sky.create(spec(key[1], key[0]))
    while key in sky.there and sky.there[key].state == "creating":
        yield Change(key, CALL)


def delete(sky: Sky, key: Key) -> Loop:
    """Until it is gone."""
    if key in sky.there:
        sky.delete(sky.there[key])
    while key in sky.there:
        yield Change(key, CALL)


def babysit(sky: Sky, name: str, zone: str) -> Loop:
    """Looks every 30 s; what was taken away is deleted and created again, in its zone, every 60 s until it is there."""
    key = (zone, name)
    while True:
        yield from create(sky, key)
        while key in sky.there and sky.there[key].state == "ready":
            yield Change(key, 30.0)
        if key in sky.there:
            yield from delete(sky, key)
        else:
            yield 60.0


def fail_over(sky: Sky, name: str) -> Loop:
    """Looks every 15 s; what was taken away is deleted, and created in another zone, cheapest first.

    Where none has room, all are asked again: after 60 s, and each time 1.6 times as long, up to 300 s, varied by 40%.
    """
    dice, last = random.Random(name), None
    while True:
        key, gap = None, 60.0
        while key is None:
            for zone in NAMES:
                if zone == last:
                    continue
                yield from create(sky, (zone, name))
                if (zone, name) in sky.there and sky.there[zone, name].state == "ready":
                    key = (zone, name)
                    break
                yield from delete(sky, (zone, name))
            if key is None and last is None:
                yield gap * dice.uniform(0.6, 1.4)
                gap = min(300.0, gap * 1.6)
            last = None
        while sky.there[key].state == "ready":
            yield Change(key, 15.0)
        yield from delete(sky, key)
        last = key[0]


def with_loops(make: Callable[[Sky, int], Loop]) -> Callable[[Sky, float], None]:
    """A hundred of them."""

    def run(sky: Sky, seconds: float) -> None:
        loops = Loops(sky)
        for number in range(WANTED):
            loops.go(make(sky, number))
        sky.advance(seconds)

    return run


WAYS: dict[str, Callable[[Sky, float], None]] = {
    "tpuswarm's keeper": keep,
    "like babysit": with_loops(lambda sky, number: babysit(sky, f"m-{number}", NAMES[number % len(NAMES)])),
    "like an eager fail-over": with_loops(lambda sky, number: fail_over(sky, f"m-{number}")),
}


class Lived(NamedTuple):
    """What came of a way."""

    hours: list[float]
    """Of machines that were ready, by month."""
    dollars: float
    asked: int
    """Creations."""


def live(name: str, days: int, months: int) -> Lived:
    """Under the same weather as the others."""
    seconds, month = days * DAY, days * DAY / months
    sky, marks = Sky(forecast(SEED, seconds), SEED), [0.0]
    for number in range(1, months):
        sky.at(number * month, lambda: marks.append(sum(sky.held.values()) / HOUR))
    WAYS[name](sky, seconds)
    marks.append(sum(sky.held.values()) / HOUR)
    dollars = sum(each / HOUR * (price(zone) or 0.0) for zone, each in sky.held.items())
    return Lived([after - before for before, after in pairwise(marks)], dollars, sky.calls["create"])


def run(settings: Settings) -> Table:
    """A year, or less of it."""
    return table(10, 2) if settings.quick else table(DAYS, 12)


def table(days: int, months: int) -> Table:
    """Each way in a process of its own."""
    spells, month = forecast(SEED, days * DAY), days * DAY / months
    until = [allowed(spells, WANTED, number * month) for number in range(months + 1)]
    room = [after - before for before, after in pairwise(until)]
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(WAYS, pool.map(live, WAYS, repeat(days), repeat(months)), strict=True))
    wanted = WANTED * days * 24
    ours, *others = found.values()
    shares = {
        name: [100 * held / most for held, most in zip(each.hours, room, strict=True)] for name, each in found.items()
    }
    reached = sum(ours.hours) / sum(room) >= SHARE and all(sum(ours.hours) > sum(each.hours) for each in others)
    rows = [
        (
            name,
            f"{sum(each.hours) / wanted:.2%}",
            f"{sum(each.hours) / sum(room):.3%}",
            f"{min(shares[name]):.2f}% to {max(shares[name]):.2f}%",
            f"{each.dollars / sum(each.hours):.3f}",
            f"{each.asked / days:,.0f}",
            "" if each is not ours else f"at least {SHARE:.0%}, and ahead of both: {verdict(reached)}",
        )
        for name, each in found.items()
    ]
    ahead = [sum(mine > other for mine, other in zip(ours.hours, each.hours, strict=True)) for each in others]
    notes = [
        f"{WANTED} spot {TYPE} in {', '.join(f'{zone.name} ({zone.lost_a_day:.0%} lost a day)' for zone in ZONES)}",
        f"the weather had room for {sum(room) / wanted:.2%} of them; {days} days, of {months} months",
        f"ahead of babysit in {ahead[0]} of {months} months, of the eager fail-over in {ahead[1]}",
    ]
    columns = (
        "",
        "of the hours wanted",
        "of those allowed",
        "by month",
        "$ an hour",
        "creations asked for a day",
        "limit",
    )
    return Table("A year of weather", columns, rows, notes)


def price(zone: str) -> float | None:
    """Dollars an hour of a machine, spot."""
    found = find(TYPE).price(zone)
    return found.spot if found else None
