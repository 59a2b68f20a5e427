"""What a person should look at: a swarm that works, but not as it should."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import median
from typing import NamedTuple

from tpuswarm.swarm.core.values import Record

ALONE = 5
"""Commits in a row with one contributor, while more members train, are no chance."""
ENOUGH = 20
"""Steps before a member is compared with others, and the last ones that are: one batch differs from another."""
REMEMBERED = 20 * ENOUGH
"""Steps of a member that are known."""
FAR = 6.0
"""Median absolute deviations from the median."""
FAR_SHARE = 0.5
"""A member less than this share of the median away is never far: of few members the deviations may be tiny."""
QUIET = 120.0
"""Seconds without a commit that are never too long."""
QUIET_CYCLES = 5.0
"""A round may take four: one until its first contribution, three more until its deadline."""
JUMP = 3600.0
"""Seconds by which clocks of different machines may differ."""


class Step(NamedTuple):
    """A step of a member; None for what is not finite."""

    version: int
    """That the member had adopted."""
    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class Watched:
    """A member that is alive."""

    member: str
    steps: Sequence[Step]
    """Its newest, the oldest first: some hundred."""


def alarms(
    recent: Sequence[Record], members: Sequence[Watched], cycle: float | None, quiet: float, now: float
) -> list[str]:
    """A sentence for each thing that is wrong.

    recent: the newest records, oldest first, a few times ALONE; members: those that are alive; cycle: median seconds
    of one, where it is known; quiet: seconds since the last progress that was seen, by a clock that never jumps; now:
    seconds since 1970.
    """
    return [*_alone(recent, len(members)), *_far(members), *_quiet(cycle, quiet), *_jumped(recent, now)]


def _alone(recent: Sequence[Record], alive: int) -> list[str]:
    counted = [(record.version, _contributors(record)) for record in recent if _contributors(record)]
    alone = list(takewhile(lambda each: len(each[1]) == 1, reversed(counted)))[::-1]
    if alive < 2 or len(alone) < ALONE:
        return []
    # Who reported work both early and late in these commits has trained through most of them: nobody who was killed,
    # came back, or has just joined.
    early, _ = alone[len(alone) // 3]
    before = {key for record in recent if record.version <= early for key, _ in record.processed}
    since = {key for record in recent if record.version > early for key, _ in record.processed}
    there = {key.member for key in before & since}
    if len(there) < 2:
        return []
    names = sorted({name for _, names in alone for name in names})
    others = sorted(there.difference(names))
    what = f"no push of {', '.join(others)} counted" if others else "they never push in time to be merged together"
    return [
        f"at least {ALONE} commits in a row had one contributor ({', '.join(names)}) while {', '.join(sorted(there))} "
        f"were training: {what}; `tpuswarm ledger show` tells what became of their work"
    ]


def _contributors(record: Record) -> set[str]:
    return {each.identity.incarnation.member for each in record.decisions if each.fate == "applied"}


def _far(members: Sequence[Watched]) -> list[str]:
    """Who is far from where the others are, and from where they were since the version that it trains on.

    One that started late is where the others were, and at the beginning all change fast.
    """
    found: dict[str, str] = {}  # at most one a member
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        medians = {each.member: made for each in members if (made := _medians(each.steps, name))}
        finite = [now for own in medians.values() if math.isfinite(now := own[-1][1])]
        if len(medians) < 3 or not finite:
            continue
        middle = median(finite)
        spread = median(abs(value - middle) for value in finite)
        for member, own in medians.items():
            since, value = own[-1]
            low, high = (
                _way(medians.values(), since) if abs(value - middle) > _limit(middle, spread) else (value, value)
            )
            if not low - _limit(low, spread) <= value <= high + _limit(high, spread):
                found.setdefault(
                    member,
                    f"{member} has a {what} of {value:.4g}, the others about {middle:.4g}: check its machine and its "
                    "data",
                )
    return [found[member] for member in sorted(found)]


def _limit(value: float, spread: float) -> float:
    """How much more, or less, is far."""
    return max(FAR * spread, FAR_SHARE * abs(value))


def _medians(steps: Sequence[Step], name: str) -> list[tuple[int, float]]:
    """Of each ENOUGH steps in a row: the version of the first of them, and the median; the newest steps last."""
    if len(steps) < ENOUGH:
        return []
    ends = sorted({ENOUGH, *range(len(steps), ENOUGH, -ENOUGH)})
    parts = [steps[end - ENOUGH : end] for end in ends]
    values = ([getattr(step, name) for step in part] for part in parts)
    return [
        (part[0].version, median(math.inf if value is None else value for value in own))
        for part, own in zip(parts, values, strict=True)
    ]


def _way(medians: Iterable[Sequence[tuple[int, float]]], since: int) -> tuple[float, float]:
    """Between what values the members were since a version: of most of them."""
    ways = [
        known
        for own in medians
        if (known := [value for version, value in own if version >= since and math.isfinite(value)])
    ]
    return (median(map(min, ways)), median(map(max, ways))) if ways else (math.inf, -math.inf)


def _quiet(cycle: float | None, quiet: float) -> list[str]:
    limit = max(QUIET, QUIET_CYCLES * (cycle or 0.0))
    if quiet <= limit:
        return []
    return [f"no commit for {quiet:.0f} s (limit {limit:.0f} s): `tpuswarm logs` shows what the members are doing"]


def _jumped(recent: Sequence[Record], now: float) -> list[str]:
    times = [*(record.time for record in recent), now]
    back = max((before - after for before, after in pairwise(times)), default=0.0)
    if back <= JUMP:
        return []
    return [f"the clock jumped back by {back:.0f} s; only times in the ledger are wrong, no decision depends on them"]
