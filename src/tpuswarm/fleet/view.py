"""A fleet as people look at it: its machines, its grants, what it costs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.fleet.core.actions import Event
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.limits import costs, machine_quota
from tpuswarm.fleet.core.money import DAY, HOUR, Rate, covered, dollars, lot, machine_price
from tpuswarm.fleet.core.names import by_number
from tpuswarm.fleet.keeping.document import Document

if TYPE_CHECKING:
    from rich.table import Table

COLORS = {"ready": "green", "dead": "red", "deleting": "red", "stopped": "dim"}


@dataclass(frozen=True)
class Row:
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


def rows(desired: Desired, listing: Listing, events: Iterable[Event], now: float) -> list[Row]:
    """A fleet's machines, by pool and name."""
    there = [each for each in listing.machines if costs(each)]
    free, _ = covered(there, desired.grants, now)
    lost = Counter(each.machine for each in events if each.kind in ("preempted", "lost"))
    ours = [each for each in listing.machines if each.fleet == desired.fleet]
    return [
        _row(each, free, lost[each.name], now) for each in sorted(ours, key=lambda one: (one.pool, by_number(one.name)))
    ]


def _row(machine: Machine, free: set[tuple[str, str]], preemptions: int, now: float) -> Row:
    age = now - machine.created if machine.created else None
    hourly = 0.0 if (machine.zone, machine.name) in free else machine_price(machine)
    cost = None if hourly is None or age is None else hourly * age / HOUR
    return Row(
        machine.name, machine.pool or "", machine.type, machine.zone, machine.how, machine.state, machine.said,
        machine.healthy, machine.why, age, preemptions, hourly, cost,
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


def grants(desired: Desired, listing: Listing, now: float) -> list[GrantUse]:
    """What is used of each grant, by anybody."""
    from tpuswarm.catalog import find

    found = []
    for grant in desired.grants:
        mine = lot(grant.type, grant.zone, grant.spot)
        alike = (each for each in listing.machines if each.kind == "tpu" and costs(each))
        chips = sum(find(each.type).chips for each in alike if machine_quota(each) == mine)
        days = None if grant.expires is None else (grant.expires - now) / DAY
        how = "spot" if grant.spot else "on-demand"
        used = min(grant.count, chips / find(grant.type).chips)
        found.append(GrantUse(grant.type, grant.zone, how, grant.count, used, days))
    return found


def machines_table(shown: list[Row], title: str | None = None) -> "Table":
    """In 80 columns."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in ("machine", "type", "zone", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("age", "lost", "$/h", "$"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in shown:
        state = each.said.lower() if each.healthy is not False else "unhealthy"
        color = "red" if each.healthy is False else COLORS.get(each.state, "yellow")
        table.add_row(
            each.name, each.type, each.zone, f"[{color}]{state}[/]", age(each.age_s), str(each.preemptions or ""),
            _amount(each.hourly), _amount(each.cost),
        )  # fmt: skip
    return table


def summary(document: Document, listing: Listing, now: float) -> list[str]:
    """What there is beside the machines: keeper, grants, costs, limits."""
    desired, lease = document.desired, document.lease
    if lease is None:
        lines = ["nobody keeps it: `tpuswarm keep`"]
    else:
        lines = [f"kept by {lease.host}, process {lease.pid}, which was seen {age(max(0.0, now - lease.at))} ago"]
    for each in grants(desired, listing, now):
        left = "" if each.days_left is None else f", {each.days_left:.0f} days left"
        lines.append(f"grant of {each.type} {each.how} in {each.zone}: {each.used:g} of {each.count} used{left}")
    rate = Rate()
    for row in rows(desired, listing, (), now):
        if row.state not in ("dead", "deleting", "waiting", "stopped"):
            rate = rate.plus(row.hourly)
    total = f" of {dollars(desired.budget.total)}" if desired.budget.total is not None else ""
    lines.append(f"{rate.hour} an hour; {dollars(document.ledger.dollars)}{total} so far")
    if desired.down is not None:
        lines.append(f"it comes down: {desired.down}")
    return lines


def strangers(desired: Desired, listing: Listing) -> list[str]:
    """Machines of other fleets in the project, whose documents are elsewhere or lost."""
    others: dict[str, list[str]] = {}
    for each in listing.machines:
        if each.fleet and each.fleet != desired.fleet:
            others.setdefault(each.fleet, []).append(each.name)
    return [
        f"{len(names)} of fleet {fleet}: {', '.join(names[:4])}{' …' * (len(names) > 4)}"
        for fleet, names in others.items()
    ]


def age(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3.5 h`, `2.1 d`."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR:.1f} h" if seconds < 2 * DAY else f"{seconds / DAY:.1f} d"


def _amount(value: float | None) -> str:
    return "?" if value is None else "free" if value == 0 else f"{value:,.2f}"


def document_object(document: Document, listing: Listing, events: Iterable[Event], now: float) -> dict[str, Any]:
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
        "machines": [asdict(each) for each in rows(desired, listing, events, now)],
        "grants": [asdict(each) for each in grants(desired, listing, now)],
        "dollars": document.ledger.dollars,
        "unreachable": sorted(listing.unreachable),
    }
