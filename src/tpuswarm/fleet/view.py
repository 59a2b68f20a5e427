"""A fleet as people look at it: its machines, its grants, what it costs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.config.formatting import format_age, format_figure
from tpuswarm.config.units import GIB
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.limits import is_billable, machine_quota
from tpuswarm.fleet.decide.money import DAY_S, HOUR_S, Rate, covered_machines, format_dollars, machine_price, quota_key
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.decide.observe import observe
from tpuswarm.fleet.decide.spending import Spending, charge
from tpuswarm.fleet.decide.state import FleetState, Observed
from tpuswarm.fleet.store.document import Document

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tpuswarm.fleet.activity import MachineActivity

ACTIVITY_COLORS = {"training": "green", "joining": "yellow", "not ready": "yellow", "missing": "red", "lost": "red"}
"""Colours of what machines of a training do."""
STATE_COLORS = {"ready": "green", "dead": "red", "deleting": "red", "stopped": "dim"}


@dataclass(frozen=True)
class MachineRow:
    """A machine."""

    name: str
    pool: str
    type: str
    zone: str
    how: str
    state: str
    said: str
    healthy: bool | None
    why: str
    age_s: float | None
    preemptions: int
    hourly: float | None
    """Dollars; 0 under a grant; None: unknown."""
    cost: float | None
    """Dollars since it was created."""
    workers: tuple[tuple[str | None, str | None], ...]


def machine_rows(desired: Desired, listing: Listing, events: Iterable[Event], now: float) -> list[MachineRow]:
    """A fleet's machines, by pool and name."""
    there = [each for each in listing.machines if is_billable(each)]
    free, _ = covered_machines(there, desired.grants, now)
    lost = Counter(each.machine for each in events if each.kind in ("preempted", "lost"))
    ours = [each for each in listing.machines if each.fleet == desired.fleet]
    return [
        _row(each, free, lost[each.name], now) for each in sorted(ours, key=lambda one: (one.pool, by_number(one.name)))
    ]


def _row(machine: Machine, free: set[tuple[str, str]], preemptions: int, now: float) -> MachineRow:
    age_s = now - machine.created if machine.created else None
    hourly = 0.0 if (machine.zone, machine.name) in free else machine_price(machine)
    cost = None if hourly is None or age_s is None else hourly * age_s / HOUR_S
    return MachineRow(
        machine.name, machine.pool or "", machine.type, machine.zone, machine.how, machine.state, machine.said,
        machine.healthy, machine.why, age_s, preemptions, hourly, cost,
        tuple((each.internal, each.external) for each in machine.workers),
    )  # fmt: skip


@dataclass(frozen=True)
class GrantUse:
    """How much of a grant is used."""

    type: str
    zone: str
    how: str
    count: int
    used: float
    """In machines of its type."""
    days_left: float | None


def grant_uses(desired: Desired, listing: Listing, now: float) -> list[GrantUse]:
    """What is used of each grant, by anybody."""
    from tpuswarm.catalog import find

    found = []
    for grant in desired.grants:
        mine = quota_key(grant.type, grant.zone, grant.spot)
        alike = (each for each in listing.machines if each.kind == "tpu" and is_billable(each))
        chips = sum(find(each.type).chips for each in alike if machine_quota(each) == mine)
        days = None if grant.expires is None else (grant.expires - now) / DAY_S
        how = "spot" if grant.spot else "on-demand"
        used = min(grant.count, chips / find(grant.type).chips)
        found.append(GrantUse(grant.type, grant.zone, how, grant.count, used, days))
    return found


def machines_table(shown: Sequence[MachineRow], width: int) -> "Table":
    """In so many columns; what names a machine is not cut."""
    from tpuswarm.train.look.live import Column, table

    columns = [
        Column("machine"),
        Column("type", rank=1),
        Column("zone", rank=2),
        Column("state", wraps=9),
        Column("age", right=True),
        Column("lost", right=True, rank=3),
        Column("$/h", right=True),
        Column("cost, $", right=True),
    ]
    lines = [
        (
            each.name, each.type, each.zone, each.said.lower() if each.healthy is not False else "unhealthy",
            "–" if each.age_s is None else format_age(each.age_s), str(each.preemptions or ""),
            _amount(each.hourly), _amount(each.cost),
        )
        for each in shown
    ]  # fmt: skip
    colors = ["red" if each.healthy is False else STATE_COLORS.get(each.state, "yellow") for each in shown]
    return table(columns, lines, width, colors)


def activities_table(
    found: Sequence["MachineActivity"], unit: str, width: int, room: int | None
) -> list["RenderableType"]:
    """A row for each machine that trains or should; where there is not room for so many, the rest in a line."""
    count = len(found) if room is None else min(len(found), room)
    while True:
        parts = _doings_rows(found, count, unit, width)
        if room is None or count <= 1 or count_lines(parts, width) <= room:
            return parts
        count -= 1


def count_lines(parts: Sequence["RenderableType"], width: int) -> int:
    """Of a terminal so wide."""
    from rich.console import Console

    console = Console(width=width)
    return sum(len(console.render_lines(part)) for part in parts)


def _doings_rows(found: Sequence["MachineActivity"], count: int, unit: str, width: int) -> list["RenderableType"]:
    from rich.text import Text

    from tpuswarm.fleet.activity import count_activities
    from tpuswarm.train.look.live import Column, table

    shown = found[:count]
    columns = [
        Column("machine"),
        Column("pool", rank=1),
        Column("state", width=len("not ready")),
        Column(f"{unit}/s", right=True, width=9),
        Column("loss", right=True, width=len("0.01234")),
        Column("commit", right=True, rank=2),
        Column("what and why", wraps=24),
    ]
    rows = []
    for each in shown:
        one = each.member
        speed = "" if one is None or one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}"
        loss = "" if one is None or one.loss is None else format_figure(one.loss)
        base = "" if one is None or one.base is None else f"{one.base}"
        rows.append((each.machine or "–", each.pool, each.kind, speed, loss, base, each.why))
    colors = [ACTIVITY_COLORS.get(each.kind, "") for each in shown]
    parts: list[RenderableType] = [table(columns, rows, width, colors)]
    if len(shown) < len(found):
        parts.append(
            Text(f"and {len(found) - len(shown):,} more: {count_activities(found[len(shown) :])}", style="dim")
        )
    return parts


def costs_line(document: Document, listing: Listing, now: float, left: float | None, carried: int) -> str:
    """What a training has cost and will cost. left: seconds until it is finished; carried: bytes so far."""
    rate = Rate()
    for row in machine_rows(document.desired, listing, (), now):
        if row.state not in ("dead", "deleting", "waiting", "stopped"):
            rate = rate.plus(row.hourly)
    budget = document.desired.budget.total
    so_far = format_dollars(total_spending(document, listing, now).dollars) + (
        f" of {format_dollars(budget)}" if budget is not None else ""
    )
    ahead = ""
    if left is not None:
        ahead = f"; {left / HOUR_S:,.1f} hours left, {format_dollars(rate.dollars * left / HOUR_S)} at this pace"
    return f"{so_far} so far, {rate.hour} an hour{ahead}; {carried / GIB:,.2f} GiB carried between members and head"


def summary_lines(document: Document, listing: Listing, now: float) -> list[str]:
    """What there is beside the machines: keeper, grants, costs, limits."""
    desired, lease = document.desired, document.lease
    ours = machine_rows(desired, listing, (), now)
    so_far = format_dollars(total_spending(document, listing, now).dollars)
    if desired.down is not None and not ours and not listing.unreachable:
        return [f"it is down: {desired.down}; it has cost {so_far}; `tpuswarm up` brings it back"]
    if lease is None and desired.down is not None:
        lines = ["nobody brings it down: `tpuswarm down` goes on"]
    elif lease is None:
        lines = ["no keeper runs, so nothing lost is replaced and no limit is enforced: `tpuswarm keep`"]
    else:
        still = max(0.0, now - lease.at)
        gone = ": it may be gone, and `tpuswarm keep` takes over" if still > 2 * STALE_LEASE_S else ""
        lines = [f"kept by {lease.host}, process {lease.pid}, which was seen {format_age(still)} ago{gone}"]
    for each in grant_uses(desired, listing, now):
        left = "" if each.days_left is None else f", {each.days_left:.0f} days left"
        lines.append(f"grant of {each.type} {each.how} in {each.zone}: {each.used:g} of {each.count} used{left}")
    rate = Rate()
    for row in ours:
        if row.state not in ("dead", "deleting", "waiting", "stopped"):
            rate = rate.plus(row.hourly)
    total = f" of {format_dollars(desired.budget.total)}" if desired.budget.total is not None else ""
    lines.append(f"{rate.hour} an hour; {so_far}{total} so far")
    if (limit := desired.budget.traffic_per_day) is not None:
        paid = format_dollars(document.traffic.last_day(now))
        lines.append(f"traffic of the last 24 hours: {paid} of {format_dollars(limit)} a day")
    if desired.down is not None:
        lines.append(f"it comes down: {desired.down}")
    return lines


def total_spending(document: Document, listing: Listing, now: float) -> Spending:
    """What it has cost up to now: what its keeper has counted, and what is there since then."""
    memory, _ = observe(FleetState(), document.desired, listing, (), now)
    return charge(document.spending, document.desired, Observed(listing, memory), now)


def list_strangers(desired: Desired, listing: Listing) -> list[str]:
    """Machines of other fleets in the project, whose documents are elsewhere or lost."""
    others: dict[str, list[str]] = {}
    for each in listing.machines:
        if each.fleet and each.fleet != desired.fleet:
            others.setdefault(each.fleet, []).append(each.name)
    return [
        f"{len(names)} of fleet {fleet}: {', '.join(names[:4])}{' …' * (len(names) > 4)}"
        for fleet, names in others.items()
    ]


STALE_LEASE_S = 60.0
"""Seconds after which a keeper that is not seen has lost the fleet."""


def _amount(value: float | None) -> str:
    return "?" if value is None else "free" if value == 0 else f"{value:,.2f}"


def fleet_object(document: Document, listing: Listing, events: Iterable[Event], now: float) -> dict[str, Any]:
    """For JSON."""
    from dataclasses import asdict

    desired = document.desired
    return {
        "name": document.name,
        "fleet": desired.fleet,
        "provider": document.provider,
        "project": document.project,
        "down": desired.down,
        "keeper": asdict(document.lease) if document.lease else None,
        "pools": [
            {"name": each.name, "type": each.type, "how": each.how, "count": each.count} for each in desired.pools
        ],
        "machines": [asdict(each) for each in machine_rows(desired, listing, events, now)],
        "grants": [asdict(each) for each in grant_uses(desired, listing, now)],
        "dollars": total_spending(document, listing, now).dollars,
        "unreachable": sorted(listing.unreachable),
    }
