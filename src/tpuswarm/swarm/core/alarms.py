"""Find problems of a swarm that still works, for a person to check."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import median
from typing import NamedTuple

from tpuswarm.swarm.core.choose import FALSELY_FINITE, UNTRUE_NORM
from tpuswarm.swarm.core.values import Record

MIN_SOLO_COMMITS = 5
"""Commits in a row with one contributor, while other members train, before an alarm."""
COMPARED_STEP_COUNT = 20
"""Newest steps to compare with other members; single batches differ too much."""
MAX_REMEMBERED_STEPS = 20 * COMPARED_STEP_COUNT
OUTLIER_FACTOR = 6.0
"""A value this many median absolute deviations from the median is an outlier."""
MIN_OUTLIER_SHARE = 0.5
"""An outlier differs from the median by at least this share: with few members the deviations may be tiny."""
QUIET_ALARM_S = 120.0
MAX_QUIET_CYCLES = 5.0
"""A round may take four cycles: one until its first contribution, three more until its deadline."""
UNTRUE = {
    FALSELY_FINITE: "{} pushed NaN or infinity as finite values, which were dropped: check its machine",
    UNTRUE_NORM: "{} pushed work with an untrue norm, which was dropped: no unchanged tpuswarm does that",
}
CLOCK_JUMP_S = 3600.0
"""Clocks of different machines may differ by this much."""


class Step(NamedTuple):
    """A step of a member. None stands for a value that is not finite."""

    version: int
    """The version that the member had adopted."""
    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True)
class LiveMember:
    """A live member and its newest steps, oldest first."""

    member: str
    steps: Sequence[Step]


def alarms(
    recent: Sequence[Record], members: Sequence[LiveMember], cycle: float | None, quiet: float, now: float
) -> list[str]:
    """Return one sentence for each problem.

    recent: the newest records, oldest first, several times MIN_SOLO_COMMITS; members: the live members; cycle: median
    cycle in seconds, None while unknown; quiet: seconds since the last progress, by a clock that never jumps; now:
    seconds since 1970.
    """
    return [
        *_solo_commits(recent, len(members)),
        *_untrue(recent),
        *_outliers(members),
        *_quiet(cycle, quiet),
        *_jumped(recent, now),
    ]


def _solo_commits(recent: Sequence[Record], alive: int) -> list[str]:
    counted = [(record.version, _contributors(record)) for record in recent if _contributors(record)]
    alone = list(takewhile(lambda commit: len(commit[1]) == 1, reversed(counted)))[::-1]
    if alive < 2 or len(alone) < MIN_SOLO_COMMITS:
        return []
    # A member that reported work both early and late in these commits was training throughout. One that was killed,
    # restarted or has just joined was not.
    early, _ = alone[len(alone) // 3]
    before = {key for record in recent if record.version <= early for key, _ in record.processed}
    since = {key for record in recent if record.version > early for key, _ in record.processed}
    there = {key.member for key in before & since}
    if len(there) < 2:
        return []
    names = sorted({name for _, names in alone for name in names})
    others = sorted(there.difference(names))
    what = f"no push of {', '.join(others)} counted" if others else "no two pushes came in time to be merged together"
    return [
        f"at least {MIN_SOLO_COMMITS} commits in a row had one contributor ({', '.join(names)}) while "
        f"{', '.join(sorted(there))} were training: {what}; `tpuswarm ledger show` has the verdicts; a longer --cycle "
        "leaves a slow member more time"
    ]


def _untrue(recent: Sequence[Record]) -> list[str]:
    found = {
        (decision.reason, decision.identity.incarnation.member)
        for record in recent for decision in record.decisions if decision.reason in UNTRUE
    }  # fmt: skip
    return [UNTRUE[reason].format(member) for reason, member in sorted(found)]


def _contributors(record: Record) -> set[str]:
    return {decision.identity.incarnation.member for decision in record.decisions if decision.fate == "applied"}


def _outliers(members: Sequence[LiveMember]) -> list[str]:
    """Name members far from the others now, and from where the others were since the same version.

    A member that started late trains where the others were before, and early in a run values change fast.
    """
    found: dict[str, str] = {}  # at most one a member
    for name, label in (("loss", "loss"), ("grad_norm", "gradient norm")):
        medians = {member.member: made for member in members if (made := _medians(member.steps, name))}
        finite = [now for own in medians.values() if math.isfinite(now := own[-1][1])]
        if len(medians) < 3 or not finite:
            continue
        middle = median(finite)
        spread = median(abs(value - middle) for value in finite)
        for member, own in medians.items():
            since, value = own[-1]
            low, high = (
                _usual_range(medians.values(), since)
                if abs(value - middle) > _tolerance(middle, spread)
                else (value, value)
            )
            if not low - _tolerance(low, spread) <= value <= high + _tolerance(high, spread):
                found.setdefault(
                    member,
                    f"{member} has a {label} of {value:.4g}, the others about {middle:.4g}: check its machine and its "
                    "data",
                )
    return [found[member] for member in sorted(found)]


def _tolerance(value: float, spread: float) -> float:
    return max(OUTLIER_FACTOR * spread, MIN_OUTLIER_SHARE * abs(value))


def _medians(steps: Sequence[Step], name: str) -> list[tuple[int, float]]:
    """Return version and median of each block of COMPARED_STEP_COUNT steps, newest last."""
    if len(steps) < COMPARED_STEP_COUNT:
        return []
    ends = sorted({COMPARED_STEP_COUNT, *range(len(steps), COMPARED_STEP_COUNT, -COMPARED_STEP_COUNT)})
    parts = [steps[end - COMPARED_STEP_COUNT : end] for end in ends]
    values = ([getattr(step, name) for step in part] for part in parts)
    return [
        (part[0].version, median(math.inf if value is None else value for value in own))
        for part, own in zip(parts, values, strict=True)
    ]


def _usual_range(medians: Iterable[Sequence[tuple[int, float]]], since: int) -> tuple[float, float]:
    """Return the range in which most members have been since a version."""
    histories = [
        known
        for own in medians
        if (known := [value for version, value in own if version >= since and math.isfinite(value)])
    ]
    if not histories:
        return math.inf, -math.inf
    return median(map(min, histories)), median(map(max, histories))


def _quiet(cycle: float | None, quiet: float) -> list[str]:
    limit = max(QUIET_ALARM_S, MAX_QUIET_CYCLES * (cycle or 0.0))
    if quiet <= limit:
        return []
    return [f"no commit for {quiet:.0f} s (limit {limit:.0f} s): `tpuswarm logs` shows what the members are doing"]


def _jumped(recent: Sequence[Record], now: float) -> list[str]:
    times = [*(record.time for record in recent), now]
    back = max((before - after for before, after in pairwise(times)), default=0.0)
    if back <= CLOCK_JUMP_S:
        return []
    return [f"the clock jumped back by {back:.0f} s; only times in the ledger are wrong, no decision depends on them"]
