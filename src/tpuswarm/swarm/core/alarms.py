"""What a person should look at: a swarm that works, but not as it should."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import median

from tpuswarm.swarm.core.values import Record

ALONE = 5
"""Commits in a row with one contributor, while more members train, are no chance."""
ENOUGH = 20
"""Steps before a member is compared with others, and the last ones that are: one batch differs from another."""
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


@dataclass(frozen=True)
class Watched:
    """What is known of a member that is alive."""

    member: str
    loss: float | None
    """Median of its last steps."""
    grad_norm: float | None


def watched(member: str, steps: Sequence[tuple[float | None, float | None]]) -> Watched:
    """A member by loss and gradient norm of its newest steps, oldest first; None for what is not finite."""
    return Watched(member, _typical([loss for loss, _ in steps]), _typical([norm for _, norm in steps]))


def _typical(values: Sequence[float | None]) -> float | None:
    if len(values) < ENOUGH:
        return None
    return median(math.inf if value is None else value for value in values[-ENOUGH:])


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
    what = f"nothing of {', '.join(others)} was counted" if others else "they never push in time to be merged together"
    return [
        f"at least {ALONE} commits in a row had one contributor ({', '.join(names)}), while {', '.join(sorted(there))} "
        f"train: {what}; `tpuswarm ledger show` tells what became of their work"
    ]


def _contributors(record: Record) -> set[str]:
    return {each.identity.incarnation.member for each in record.decisions if each.fate == "applied"}


def _far(members: Sequence[Watched]) -> list[str]:
    found: dict[str, str] = {}  # at most one a member
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm")):
        values = {each.member: getattr(each, name) for each in members if getattr(each, name) is not None}
        finite = [value for value in values.values() if math.isfinite(value)]
        if len(values) < 3 or not finite:
            continue
        middle = median(finite)
        spread = median(abs(value - middle) for value in finite)
        limit = max(FAR * spread, FAR_SHARE * abs(middle))
        for member, value in values.items():
            if abs(value - middle) > limit:
                found.setdefault(
                    member,
                    f"{member} has a {what} of {value:.4g}, the others about {middle:.4g}: look at its machine and "
                    "its data",
                )
    return [found[member] for member in sorted(found)]


def _quiet(cycle: float | None, quiet: float) -> list[str]:
    limit = max(QUIET, QUIET_CYCLES * (cycle or 0.0))
    if quiet <= limit:
        return []
    return [
        f"nothing was committed for {quiet:.0f} s, more than {limit:.0f} s: `tpuswarm logs` tells what the members do"
    ]


def _jumped(recent: Sequence[Record], now: float) -> list[str]:
    times = [*(record.time for record in recent), now]
    back = max((before - after for before, after in pairwise(times)), default=0.0)
    if back <= JUMP:
        return []
    return [f"the clock jumped back by {back:.0f} s; nothing is decided by it, only times in the ledger are wrong"]
