"""Show a fleet: its machines, grants, costs and keeper."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tpuswarm.catalog import find
from tpuswarm.cloud.protocol import Listing
from tpuswarm.config.formatting import format_age, format_figure
from tpuswarm.config.units import GIB
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import FleetState, Observed
from tpuswarm.fleet.decide.job_failures import find_failures
from tpuswarm.fleet.decide.limits import FREE_STATES, is_billable, machine_quota
from tpuswarm.fleet.decide.money import (
    DAY_S,
    HOUR_S,
    Rate,
    chips_of,
    covered_machines,
    format_dollars,
    is_generation,
    machine_price,
    quota_key,
)
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.decide.observe import observe
from tpuswarm.fleet.decide.spending import Spending, charge
from tpuswarm.fleet.store.document import Document, is_holder_alive

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tpuswarm.fleet.activity import MachineActivity

ACTIVITY_COLORS = {"training": "green", "joining": "yellow", "not ready": "yellow", "missing": "red", "lost": "red"}
STATE_COLORS = {"ready": "green", "dead": "red", "deleting": "red", "stopped": "dim"}
STALE_LEASE_S = 60.0
"""Twice this without a renewal: the keeper may be gone."""


@dataclass(frozen=True)
class MachineRow:
    name: str
    pool: str
    type: str
    zone: str
    how: str
    state: str
    state_word: str
    """As Machine.state_word."""
    said: str
    healthy: bool | None
    why: str
    age_s: float | None
    preemptions: int
    hourly: float | None
    """Dollars; 0 under a grant, or while it does not run; None: unknown."""
    cost: float | None
    """Since its creation; None: unknown, as for a machine that has stopped."""
    workers: tuple[tuple[str | None, str | None], ...]


def machine_rows(desired: Desired, listing: Listing, events: Iterable[Event], now: float) -> list[MachineRow]:
    free, _ = covered_machines([machine for machine in listing.machines if is_billable(machine)], desired.grants, now)
    lost = Counter(event.machine for event in events if event.kind in ("preempted", "lost"))
    rows = []
    for machine in sorted(desired.own(listing.machines), key=lambda machine: (machine.pool, by_number(machine.name))):
        age_s = now - machine.created if machine.created else None
        is_free = not is_billable(machine) or (machine.zone, machine.name) in free
        hourly = 0.0 if is_free else machine_price(machine)
        cost = None if hourly is None or age_s is None else hourly * age_s / HOUR_S
        if not is_billable(machine):
            cost = 0.0 if machine.state == "waiting" else None
        rows.append(MachineRow(
            machine.name, machine.pool or "", machine.type, machine.zone, machine.how, machine.state,
            machine.state_word, machine.said, machine.healthy, machine.why, age_s, lost[machine.name], hourly, cost,
            tuple((worker.internal, worker.external) for worker in machine.workers),
        ))  # fmt: skip
    return rows


def running_rate(rows: Iterable[MachineRow]) -> Rate:
    """Return the hourly price of the machines that cost money now."""
    rate = Rate()
    for row in rows:
        if row.state not in FREE_STATES:
            rate = rate.plus(row.hourly)
    return rate


@dataclass(frozen=True)
class GrantUse:
    type: str
    zone: str
    how: str
    count: int
    used: float
    days_left: float | None


def grant_uses(desired: Desired, listing: Listing, now: float) -> list[GrantUse]:
    billable = [machine for machine in listing.machines if machine.kind == "tpu" and is_billable(machine)]
    uses = []
    for grant in desired.grants:
        quota = quota_key(grant.type, grant.zone, grant.spot)
        chips = sum(find(machine.type).chips for machine in billable if machine_quota(machine) == quota)
        used = min(grant.count, chips / chips_of(grant.type))
        days_left = None if grant.expires is None else (grant.expires - now) / DAY_S
        how = "spot" if grant.spot else "on-demand"
        uses.append(GrantUse(grant.type, grant.zone, how, grant.count, used, days_left))
    return uses


def machines_table(rows: Sequence[MachineRow], width: int) -> "Table":
    from tpuswarm.train.look.widgets import Column, make_table

    columns = [
        Column("machine"), Column("type", rank=1), Column("zone", rank=2), Column("state", wraps=9),
        Column("age", right=True), Column("lost", right=True, rank=3), Column("$/h", right=True),
        Column("cost, $", right=True),
    ]  # fmt: skip
    prices = [("–", "–") if row.state in FREE_STATES else (_amount(row.hourly), _amount(row.cost)) for row in rows]
    if all(hourly in ("–", "?") for hourly, _ in prices):
        prices = [("", "")] * len(rows)
    lines = [
        (
            row.name, row.type, row.zone, row.state_word if row.healthy is not False else "unhealthy",
            "–" if row.age_s is None else format_age(row.age_s), str(row.preemptions or ""),
            *price,
        )
        for row, price in zip(rows, prices, strict=True)
    ]  # fmt: skip
    colors = ["red" if row.healthy is False else STATE_COLORS.get(row.state, "yellow") for row in rows]
    return make_table(columns, lines, width, colors)


def activities_table(
    activities: Sequence["MachineActivity"], unit: str, width: int, height: int | None
) -> list["RenderableType"]:
    """Return a table of the training's machines; a last line counts those beyond the height."""
    count = len(activities) if height is None else min(len(activities), height)
    while True:
        parts = _activity_rows(activities, count, unit, width)
        if height is None or count <= 1 or count_lines(parts, width) <= height:
            return parts
        count -= 1


def count_lines(parts: Sequence["RenderableType"], width: int) -> int:
    from rich.console import Console

    console = Console(width=width)
    return sum(len(console.render_lines(part)) for part in parts)


def _activity_rows(
    activities: Sequence["MachineActivity"], count: int, unit: str, width: int
) -> list["RenderableType"]:
    from rich.text import Text

    from tpuswarm.fleet.activity import count_activities
    from tpuswarm.train.look.widgets import Column, make_table

    columns = [
        Column("machine"), Column("pool", rank=1), Column("state", width=len("not ready")),
        Column(f"{unit}/s", right=True, width=9), Column("loss", right=True, width=len("0.01234")),
        Column("commit", right=True, rank=2), Column("what and why", wraps=24),
    ]  # fmt: skip
    lines = []
    for activity in activities[:count]:
        member = activity.member
        speed = "" if member is None or member.tokens_per_s is None else f"{member.tokens_per_s:,.0f}"
        loss = "" if member is None or member.loss is None else format_figure(member.loss)
        base = "" if member is None or member.base is None else f"{member.base}"
        lines.append((activity.machine or "–", activity.pool, activity.kind, speed, loss, base, activity.why))
    colors = [ACTIVITY_COLORS.get(activity.kind, "") for activity in activities[:count]]
    parts: list[RenderableType] = [make_table(columns, lines, width, colors)]
    if rest := activities[count:]:
        parts.append(Text(f"and {len(rest):,} more: {count_activities(rest)}", style="dim"))
    return parts


def costs_line(document: Document, listing: Listing, now: float, left: float | None, carried: int) -> str:
    """Describe past and future costs of a training. `left`: seconds until its end; `carried`: bytes so far."""
    rate = running_rate(machine_rows(document.desired, listing, (), now))
    budget = document.desired.budget.total
    spent = format_dollars(total_spending(document, listing, now).dollars)
    limit = f" of {format_dollars(budget)}" if budget is not None else ""
    ahead = ""
    if left is not None:
        hours = left / HOUR_S
        time_left = f"{hours:,.1f} hours" if hours >= 1 else format_age(left)
        ahead = f"; {time_left} left, {format_dollars(rate.dollars * hours)} at this pace"
    carried_gib = f"{carried / GIB:,.2f} GiB carried between members and head"
    return f"{spent}{limit} so far, {rate.hour} an hour{ahead}; {carried_gib}"


def summary_lines(document: Document, listing: Listing, now: float) -> list[str]:
    desired, lease = document.desired, document.lease
    rows = machine_rows(desired, listing, (), now)
    spent = format_dollars(total_spending(document, listing, now).dollars)
    if desired.down is not None and not rows and not listing.unreachable:
        return [f"the fleet is down: {desired.down}; it has cost {spent}; `tpuswarm up` brings it back"]
    if lease is not None and is_holder_alive(lease) is False:
        lines = [f"its keeper, process {lease.pid} of this computer, has ended: `tpuswarm keep` takes over"]
    elif lease is not None:
        age_s = max(0.0, now - lease.at)
        stale = ", so it may be gone: `tpuswarm keep` takes over" if age_s > 2 * STALE_LEASE_S else ""
        lines = [f"kept by {lease.host}, process {lease.pid}, last seen {format_age(age_s)} ago{stale}"]
    elif desired.down is not None:
        lines = ["no keeper brings it down: `tpuswarm down` continues"]
    else:
        lines = ["no keeper runs, so nothing lost is replaced and no limit is enforced: `tpuswarm keep`"]
    lines += [f"{failure.says}; `tpuswarm logs {failure.job.name}`" for failure in find_failures(document.jobs)]
    lines += [f"pool {missing.pool}: {missing.why}" for missing in _list_missing(document, listing, now)]
    for use in grant_uses(desired, listing, now):
        left = "" if use.days_left is None else f", {use.days_left:.0f} days left"
        what = f"{use.type} chips" if is_generation(use.type) else use.type
        lines.append(f"grant of {what}, {use.how}, in {use.zone}: {use.used:g} of {use.count} used{left}")
    total = f" of {format_dollars(desired.budget.total)}" if desired.budget.total is not None else ""
    lines.append(f"{running_rate(rows).hour} an hour; {spent}{total} so far")
    if (limit := desired.budget.traffic_per_day) is not None:
        paid = format_dollars(document.traffic.last_day(now))
        lines.append(f"traffic of the last 24 hours: {paid} of {format_dollars(limit)} a day")
    if desired.down is not None:
        lines.append(f"it comes down: {desired.down}")
    return lines


def _list_missing(document: Document, listing: Listing, now: float) -> "list[MachineActivity]":
    from tpuswarm.fleet.activity import list_missing

    alive = [machine for machine in document.desired.own(listing.machines) if machine.state != "dead"]
    return list_missing(document, alive, sorted(document.events), now)


def total_spending(document: Document, listing: Listing, now: float) -> Spending:
    """Return the fleet's cost until now, including the time since the keeper's last count."""
    state, _ = observe(FleetState(), document.desired, listing, (), now)
    return charge(document.spending, document.desired, Observed(listing, state), now)


def list_strangers(desired: Desired, listing: Listing) -> list[str]:
    fleets: dict[str, list[str]] = {}
    for machine in listing.machines:
        if machine.fleet and machine.fleet != desired.fleet:
            fleets.setdefault(machine.fleet, []).append(machine.name)
    return [
        f"{len(names)} of fleet {fleet}: {', '.join(names[:4])}{' …' * (len(names) > 4)}"
        for fleet, names in fleets.items()
    ]


def _amount(dollars: float | None) -> str:
    return "?" if dollars is None else "free" if dollars == 0 else f"{dollars:,.2f}"


def fleet_object(document: Document, listing: Listing, events: Iterable[Event], now: float) -> dict[str, Any]:
    desired = document.desired
    return {
        "name": document.name,
        "fleet": desired.fleet,
        "provider": document.provider,
        "project": document.project,
        "down": desired.down,
        "keeper": asdict(document.lease) if document.lease else None,
        "pools": [
            {"name": pool.name, "type": pool.type, "how": pool.how, "count": pool.count} for pool in desired.pools
        ],
        "machines": [asdict(row) for row in machine_rows(desired, listing, events, now)],
        "missing": [{"pool": it.pool, "why": it.why} for it in _list_missing(document, listing, now)],
        "waits": [wait._asdict() for wait in document.waits],
        "grants": [asdict(use) for use in grant_uses(desired, listing, now)],
        "dollars": total_spending(document, listing, now).dollars,
        "unreachable": sorted(listing.unreachable),
    }
