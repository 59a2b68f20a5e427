"""What machines get done together although some are taken away: a small simulation, and an estimate.

In each draw the spot machines of a zone live in one climate, that of a spot TPU whose losses somebody has shown
(`catalog.kept_spot_tpus`). Each machine trains, is taken away, and begins again from what it had handed over. It is
paid for all the time, which is a little too much. Other machines are never taken away here, for nobody has shown how
often they are. `tpuswarm simulate` has the real protocol of a swarm instead, and takes minutes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Any

import numpy as np
from rich.table import Table

from tpuswarm.catalog import spot_records
from tpuswarm.plan.roofline import Range
from tpuswarm.plan.row import span_object
from tpuswarm.plan.words import UNKNOWN, columns, span, time_span

DRAWS, WORST, BEST = 200, 9, 190
"""Of which these two, in order of size, are reported: nine of ten lie between them."""
MOST = 50
"""Machines of a group that are simulated: more of them fare as these do."""
WEEK, LONGEST = 7 * 24.0, 60 * 24.0
"""Hours that are simulated where no number of tokens is asked for, and at most."""


@dataclass(frozen=True)
class MachineGroup:
    """Machines of one type in one zone."""

    type: str
    zone: str
    how: str
    """spot, on-demand, queued or reserved."""
    count: int
    dollars: float | None = 0.0
    """An hour of all of them; 0: a grant covers them; None: nobody says."""
    ends: float | None = None
    """Unix seconds at which they are given back."""


@dataclass(frozen=True)
class Fared:
    """What came of a group."""

    group: MachineGroup
    share: Range
    """Of its time that counts."""
    tokens_per_s: Range
    """That count, of all its machines."""


@dataclass(frozen=True)
class Outlook:
    """Of all groups together; ranges go from the slowest expected speed in bad weather to the fastest in good."""

    groups: tuple[Fared, ...]
    left_out: tuple[str, ...]
    """Types whose speed nobody can tell, so that they are in no sum."""
    tokens_per_s: Range
    tokens: int | None
    """Asked for."""
    hours: Range | None
    """Until they are trained; None: nobody asked, or the machines end before, at least in bad weather."""
    dollars: Range | None
    """Of the machines in that time; None: no such time, or a price is unknown."""
    ends: float | None
    """Unix seconds when the last machine is given back; None: some stay."""
    until_then: Range | None
    """Tokens until then."""

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "groups": [
                {
                    "accelerator": each.group.type,
                    "zone": each.group.zone,
                    "how": each.group.how,
                    "count": each.group.count,
                    "share_that_counts": span_object(each.share),
                    "tokens_per_s": span_object(each.tokens_per_s),
                }
                for each in self.groups
            ],
            "left_out": list(self.left_out),
            "tokens_per_s": span_object(self.tokens_per_s),
            "hours": span_object(self.hours),
            "dollars": UNKNOWN if self.hours and not self.dollars else span_object(self.dollars),
            "ends": self.ends,
            "tokens_until_then": span_object(self.until_then),
            "preemptions_from": basis(),
            "estimate": True,
        }


def outlook(
    groups: Sequence[MachineGroup], speeds: Mapping[str, Range], kept_s: float, tokens: int | None, now: float
) -> Outlook:
    """Of machines that are all ready now, Unix seconds.

    speeds: tokens a second of one undisturbed machine, by type. kept_s: seconds between two moments at which a machine
    hands over what it has trained since; what lies after the last is lost with it.
    """
    known = [each for each in groups if each.type in speeds]
    slow, fast = ([each.count * getattr(speeds[each.type], end) for each in known] for end in ("low", "high"))
    left = [inf if each.ends is None else max(0.0, each.ends - now) / 3600 for each in known]
    asked = WEEK if tokens is None or not known else tokens / sum(slow) / 3600
    shares = _shares(known, min(asked, LONGEST, max(left, default=WEEK)), kept_s / 3600)
    ordered = np.sort(shares, axis=1)
    fared = tuple(
        Fared(
            group,
            Range(float(row[WORST]), float(row[BEST])),
            Range(low * float(row[WORST]), high * float(row[BEST])),
        )
        for group, row, low, high in zip(known, ordered, slow, fast, strict=True)
    )

    def between(worst: Sequence[float], best: Sequence[float]) -> Range:
        return Range(sorted(worst)[WORST], sorted(best)[BEST])

    rates = [[np.multiply(each, draw) for draw in shares.T] for each in (slow, fast)]
    hours = dollars = None
    if tokens is not None and known:
        worst, best = ([-_hours(draw, left, tokens) for draw in each] for each in rates)
        turned = between(worst, best)
        if turned.low > -inf:
            hours = Range(-turned.high, -turned.low)
            dollars = _dollars(known, left, hours)
    ends = max((each.ends for each in known if each.ends is not None), default=None)
    ends = None if any(each.ends is None for each in known) else ends
    return Outlook(
        fared,
        tuple(dict.fromkeys(each.type for each in groups if each.type not in speeds)),
        between(*([float(sum(draw)) for draw in each] for each in rates)),
        tokens,
        hours,
        dollars,
        ends,
        None if ends is None else between(*([float(3600 * np.dot(draw, left)) for draw in each] for each in rates)),
    )


def _shares(groups: Sequence[MachineGroup], hours: float, kept: float) -> np.ndarray:
    """Of the time of each group that counts, in each draw: an array of groups and draws."""
    dice = np.random.default_rng(0)
    climates = spot_records()
    weather = {zone: dice.integers(len(climates), size=DRAWS) for zone in dict.fromkeys(each.zone for each in groups)}
    found = np.ones((len(groups), DRAWS))
    for row, group in enumerate(groups):
        if group.how != "spot" or not hours:
            continue
        here = [climates[index] for index in weather[group.zone]]
        between = np.array([[each.hours_between] for each in here])
        away = np.array([[each.hours_away] for each in here])
        size = (DRAWS, min(group.count, MOST))
        at, counts = np.zeros(size), np.zeros(size)
        while (at < hours).any():
            ran = dice.exponential(between, size)
            lost = at + ran < hours
            counts += np.where(lost, kept * np.floor(ran / kept), np.maximum(0.0, hours - at))
            at += ran + dice.exponential(away, size)
        found[row] = counts.mean(axis=1) / hours
    return found


def _hours(rates: Sequence[float], left: Sequence[float], tokens: float) -> float:
    """Until so many tokens are trained at these rates a second, each as long as it lasts; inf: never."""
    at = 0.0
    for end in (*sorted(set(left) - {inf}), inf):
        rate = 3600 * sum(each for each, until in zip(rates, left, strict=True) if until >= end)
        if rate and tokens <= rate * (end - at):
            return at + tokens / rate
        tokens -= rate * (end - at) if rate else 0.0
        at = end
    return inf


def _dollars(groups: Sequence[MachineGroup], left: Sequence[float], hours: Range) -> Range | None:
    if any(each.dollars is None for each in groups):
        return None
    return Range(
        *(
            sum((each.dollars or 0.0) * min(end, until) for each, until in zip(groups, left, strict=True))
            for end in (hours.low, hours.high)
        )
    )


def basis() -> str:
    """What the preemptions rest on, in a sentence."""
    climates = spot_records()
    lost, ran = sum(each.lost for each in climates), sum(each.ran for each in climates)
    away = sum(each.hours - each.ran for each in climates) / sum(each.lost + 1 for each in climates)
    types = dict.fromkeys(each.type for each in climates)
    return (
        f"spot machines are lost as {len(climates)} of {', '.join(types)} were in December 2022: {lost} losses in "
        f"{ran:,.0f} h, {60 * away:.0f} min until the job ran again ({climates[0].source.url}); no public figures were "
        "found that are newer, of other types, or for how long a zone has no machine at all"
    )


def table(found: Outlook, unit: str) -> Table:
    """What each group does, and all of them; unit: what tokens are, `tokens` or `rows`."""
    total = sum(each.group.count for each in found.groups)
    shown = columns(
        "together, with simulated preemptions (estimate)",
        ("TPU", "zone", "how", "count", "time that counts", f"{unit}/s"),
        [
            (
                each.group.type,
                each.group.zone,
                each.group.how,
                f"{each.group.count:,}",
                "100%" if each.share.low == 1 else f"{_percent(each.share.low)} to {_percent(each.share.high)}%",
                span(each.tokens_per_s),
            )
            for each in found.groups
        ]
        + [("all", "", "", f"{total:,}", "", span(found.tokens_per_s))],
        left=("zone", "how"),
    )
    shown.caption = basis() if any(each.group.how == "spot" for each in found.groups) else ""
    return shown


def _percent(share: float) -> str:
    return "100" if share == 1 else f"{min(99.9, 100 * share):.1f}"  # never 100 where something is lost


def sentences(found: Outlook, unit: str) -> list[str]:
    """What it comes to."""
    said = []
    if found.left_out:
        said.append(f"left out, for their speed is unknown: {', '.join(found.left_out)}")
    day = Range(86_400 * found.tokens_per_s.low, 86_400 * found.tokens_per_s.high)
    said.append(f"a day: {span(day)} {unit}")
    if found.tokens is not None and found.hours is not None:
        cost = f"for {UNKNOWN} dollars" if found.dollars is None else f"for ${span(found.dollars)}"
        if found.dollars is not None and not found.dollars.high:
            cost = "free of charge"
        said.append(f"{found.tokens:,} {unit}: {time_span(found.hours)}, {cost}; traffic comes on top")
    if found.ends is not None and found.until_then is not None:
        day_of = f"{datetime.fromtimestamp(found.ends, UTC):%Y-%m-%d}"
        amount = f"{span(found.until_then)} {unit} until the last grant ends on {day_of}"
        short_of = found.tokens is not None and found.hours is None
        said.append(f"{amount}: perhaps fewer than the {found.tokens:,} asked for" if short_of else amount)
    return said
