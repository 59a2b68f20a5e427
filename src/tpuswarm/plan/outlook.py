"""Estimate how much machines train together despite preemptions.

A spot machine trains, is preempted, and resumes from its last push or checkpoint. With exponential uptimes, renewal
theory gives the share of the time that counts; ranges go from the worst to the best of the measured spot TPUs
(`catalog.spot_records`). Other machines count in full: nobody has published how often they are lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import expm1, inf
from typing import Any

from rich.table import Table

from tpuswarm.catalog import SpotRecord, spot_records
from tpuswarm.plan.format import UNKNOWN, format_hours, format_range, make_table
from tpuswarm.plan.row import range_object
from tpuswarm.plan.speed import Range


@dataclass(frozen=True)
class MachineGroup:
    """Machines of one type in one zone."""

    type: str
    zone: str
    how: str
    """spot, on-demand, queued, reserved or your own."""
    count: int
    dollars: float | None = 0.0
    """Hourly, for the whole group; 0: free; None: unknown."""
    ends: float | None = None
    """Unix time when they are given back."""


@dataclass(frozen=True)
class GroupOutlook:
    """Training of one group."""

    group: MachineGroup
    share: Range
    """Share of time that counts."""
    tokens_per_s: Range
    """All its machines, preemptions included."""


@dataclass(frozen=True)
class Outlook:
    """Training of all groups; ranges combine slow and fast expectations with bad and good luck."""

    groups: tuple[GroupOutlook, ...]
    left_out: tuple[str, ...]
    """Types without a known speed."""
    tokens_per_s: Range
    tokens: int | None
    """Requested."""
    hours: Range | None
    """Until then; None: not requested, or the machines may end before."""
    dollars: Range | None
    """Machine costs in that time."""
    ends: float | None
    """Unix time when the last machine is given back; None: some stay."""
    until_then: Range | None
    """Tokens until `ends`."""

    def document(self) -> dict[str, Any]:
        """Return the outlook for JSON."""
        return {
            "groups": [
                {
                    "accelerator": part.group.type,
                    "zone": part.group.zone,
                    "how": part.group.how,
                    "count": part.group.count,
                    "share_that_counts": range_object(part.share),
                    "tokens_per_s": range_object(part.tokens_per_s),
                }
                for part in self.groups
            ],
            "left_out": list(self.left_out),
            "tokens_per_s": range_object(self.tokens_per_s),
            "hours": range_object(self.hours),
            "dollars": UNKNOWN if self.hours and not self.dollars else range_object(self.dollars),
            "ends": self.ends,
            "tokens_until_then": range_object(self.until_then),
            "preemptions_from": preemption_source(),
            "estimate": True,
        }


def make_outlook(
    groups: Sequence[MachineGroup], speeds: Mapping[str, Range], save_interval_s: float, tokens: int | None, now: float
) -> Outlook:
    """Estimate the training of machines that are all ready at Unix time `now`.

    speeds: tokens a second of one machine by type; save_interval_s: time between two pushes or checkpoints.
    """
    known = [group for group in groups if group.type in speeds]
    parts = tuple(_outlook_of(group, speeds[group.type], save_interval_s) for group in known)
    left_hours = [inf if group.ends is None else max(0.0, group.ends - now) / 3600 for group in known]
    slow = [part.tokens_per_s.low for part in parts]
    fast = [part.tokens_per_s.high for part in parts]
    hours = dollars = None
    if tokens is not None and known:
        longest = _hours_to_train(slow, left_hours, tokens)
        if longest < inf:
            hours = Range(_hours_to_train(fast, left_hours, tokens), longest)
            dollars = _dollars(known, left_hours, hours)
    stays = any(group.ends is None for group in known)
    ends = None if stays else max((group.ends or 0.0 for group in known), default=None)
    totals = [3600 * sum(rate * left for rate, left in zip(rates, left_hours, strict=True)) for rates in (slow, fast)]
    return Outlook(
        parts,
        tuple(dict.fromkeys(group.type for group in groups if group.type not in speeds)),
        Range(sum(slow), sum(fast)),
        tokens,
        hours,
        dollars,
        ends,
        None if ends is None else Range(*totals),
    )


def _outlook_of(group: MachineGroup, speed: Range, save_interval_s: float) -> GroupOutlook:
    shares = [1.0]
    if group.how == "spot":
        shares = [share_that_counts(record, save_interval_s / 3600) for record in spot_records()]
    share = Range(min(shares), max(shares))
    return GroupOutlook(group, share, Range(group.count * speed.low * share.low, group.count * speed.high * share.high))


def share_that_counts(record: SpotRecord, save_interval_hours: float) -> float:
    """Return the long-run share of the time whose training is saved before a preemption.

    An uptime saves whole intervals: on average `interval / (exp(interval / uptime) - 1)` hours.
    """
    saved_hours = save_interval_hours / expm1(save_interval_hours / record.hours_between)
    return saved_hours / (record.hours_between + record.hours_away)


def _hours_to_train(rates: Sequence[float], left_hours: Sequence[float], tokens: float) -> float:
    """Return the hours until the tokens are trained, while each rate lasts; inf: never."""
    start = 0.0
    for end in (*sorted(set(left_hours) - {inf}), inf):
        rate = 3600 * sum(rate for rate, left in zip(rates, left_hours, strict=True) if left >= end)
        if rate and tokens <= rate * (end - start):
            return start + tokens / rate
        tokens -= rate * (end - start) if rate else 0.0
        start = end
    return inf


def _dollars(groups: Sequence[MachineGroup], left_hours: Sequence[float], hours: Range) -> Range | None:
    if any(group.dollars is None for group in groups):
        return None
    low, high = (
        sum((group.dollars or 0.0) * min(end, left) for group, left in zip(groups, left_hours, strict=True))
        for end in (hours.low, hours.high)
    )
    return Range(low, high)


def preemption_source() -> str:
    """Name the source of the preemption rates."""
    records = spot_records()
    lost, ran = sum(record.lost for record in records), sum(record.ran for record in records)
    away = sum(record.hours - record.ran for record in records) / sum(record.lost + 1 for record in records)
    types = dict.fromkeys(record.type for record in records)
    return (
        f"spot machines are lost like {len(records)} of {', '.join(types)} in December 2022: {lost} losses in "
        f"{ran:,.0f} h, {60 * away:.0f} min until the job ran again ({records[0].source.url}); no public figures are "
        "newer, of other types, or about zones without any capacity"
    )


def outlook_table(outlook: Outlook, unit: str) -> Table:
    """Return a table of the groups and their sum; unit: `tokens` or `rows`."""
    total = sum(part.group.count for part in outlook.groups)
    table = make_table(
        "together, with preemptions (estimate)",
        ("on", "zone", "how", "count", "time that counts", f"{unit}/s"),
        [
            (
                part.group.type,
                part.group.zone,
                part.group.how,
                f"{part.group.count:,}",
                "100%" if part.share.low == 1 else f"{100 * part.share.low:.1f} to {100 * part.share.high:.1f}%",
                format_range(part.tokens_per_s),
            )
            for part in outlook.groups
        ]
        + [("all", "", "", f"{total:,}", "", format_range(outlook.tokens_per_s))],
        left=("zone", "how"),
    )
    table.caption = preemption_source() if any(part.group.how == "spot" for part in outlook.groups) else ""
    return table


def outlook_sentences(outlook: Outlook, unit: str) -> list[str]:
    """Sum up an outlook."""
    sentences = []
    if outlook.left_out:
        sentences.append(f"left out because their speed is unknown: {', '.join(outlook.left_out)}")
    sentences.append(f"a day: {format_range(outlook.tokens_per_s, 86_400)} {unit}")
    if outlook.tokens is not None and outlook.hours is not None:
        cost = f"for {UNKNOWN} dollars" if outlook.dollars is None else f"for ${format_range(outlook.dollars)}"
        if outlook.dollars is not None and not outlook.dollars.high:
            cost = "free of charge"
        time = format_hours(outlook.hours)
        sentences.append(f"{outlook.tokens:,} {unit}: {time}, {cost}; traffic comes on top")
    if outlook.ends is not None and outlook.until_then is not None:
        last_day = f"{datetime.fromtimestamp(outlook.ends, UTC):%Y-%m-%d}"
        amount = f"{format_range(outlook.until_then)} {unit} until the last grant ends on {last_day}"
        may_be_short = outlook.tokens is not None and outlook.hours is None
        sentences.append(f"{amount}: perhaps fewer than the {outlook.tokens:,} requested" if may_be_short else amount)
    return sentences
