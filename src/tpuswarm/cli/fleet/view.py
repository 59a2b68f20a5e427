"""`tpuswarm list`, `describe`, `cost`: show a fleet."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tpuswarm.cli.console import FleetOption, Json, Target, make_console
from tpuswarm.cloud.protocol import Listing
from tpuswarm.cloud.rehearsal.connect import default_folder, require_running
from tpuswarm.config.formatting import format_age
from tpuswarm.errors import InputError
from tpuswarm.fleet import view
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.limits import FREE_STATES
from tpuswarm.fleet.decide.money import Rate, format_dollars
from tpuswarm.fleet.decide.names import resolve_name
from tpuswarm.fleet.decide.spending import PoolSpending
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.store.fleets import Fleet, find_fleet
from tpuswarm.train.process.stop import end_quietly
from tpuswarm.train.process.terminal import echo

POLL_INTERVAL_S = 5.0

FleetReader = Callable[[], tuple[Document, Listing, list[Event]]]
"""Reads a fleet's document, the cloud's list of its machines, and its events."""


def list_(
    target: Target = None,
    live: Annotated[bool, typer.Option("--live", help="Redraw until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """List a fleet's machines in all zones: state, age, losses and price; and its grants."""
    _, read = open_fleet(target)
    if as_json:
        print(json.dumps(view.fleet_object(*read(), time.time())))
        return
    console = make_console()
    if not live:
        console.print(_draw_fleet(*read(), console.width))
        return
    from tpuswarm.train.process.live_region import LiveRegion

    def draw() -> Any:
        return _draw_fleet(*read(), console.width, console)

    end_quietly()
    with LiveRegion(draw(), console=console, auto_refresh=False) as screen:
        while True:
            time.sleep(POLL_INTERVAL_S)
            screen.update(draw(), refresh=True)


def describe(
    name: Annotated[str, typer.Argument(help="A machine: its name, its number, or a unique prefix.")],
    fleet: FleetOption = None,
    as_json: Json = False,
) -> None:
    """Show everything known about a machine: what it is, what happened to it and why, even after it is gone."""
    _, read = open_fleet(fleet)
    document, listing, events = read()
    rows = {row.name: row for row in view.machine_rows(document.desired, listing, events, time.time())}
    machine = resolve_name(name, {*rows, *(event.machine for event in events if event.machine)})
    history = [event for event in events if event.machine == machine]
    row = rows.get(machine)
    if as_json:
        objects = [event._asdict() for event in history]
        print(json.dumps({"machine": asdict(row) if row else None, "events": objects}))
        return
    if row is None:
        echo(f"{machine} no longer exists")
    else:
        health = {True: "healthy", False: f"unhealthy: {row.why}", None: row.why or "health unknown"}[row.healthy]
        echo(f"{row.name}: {row.type} ({row.how}) of pool {row.pool} in {row.zone}")
        age = "" if row.age_s is None else f"; {format_age(row.age_s)} old"
        echo(f"state: {row.state} ({row.said}), {health}{age}")
        for number, (internal, external) in enumerate(row.workers):
            echo(f"worker {number}: internal address {internal or '–'}, external {external or '–'}")
        price = (
            "unknown" if row.hourly is None else f"${row.hourly:,.2f} an hour" if row.hourly else "free under a grant"
        )
        price = f"nothing while it is {row.state}, but for its disk" if row.state in FREE_STATES else price
        echo(f"price: {price}" + (f"; ${row.cost:,.2f} since it was created" if row.cost else ""))
    echo("history:" if history else "no history is stored")
    for event in history:
        echo(f"  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(event.at))}  {event.kind}: {event.text}")


def cost(target: Target = None, as_json: Json = False) -> None:
    """Show what a fleet has cost so far and costs per hour, by pool, from observed hours and public prices."""
    from rich.table import Table

    _, read = open_fleet(target)
    document, listing, _ = read()
    now = time.time()
    spending = view.total_spending(document, listing, now)
    rates: dict[str, Rate] = {}
    for row in view.machine_rows(document.desired, listing, (), now):
        if row.state not in FREE_STATES:
            rates[row.pool] = rates.get(row.pool, Rate()).plus(row.hourly)
    names = dict.fromkeys((*(pool.name for pool in document.desired.pools), *spending.pools))
    pools = {name: (spending.pools.get(name, PoolSpending()), rates.get(name, Rate())) for name in names}
    if as_json:
        objects = {name: {**asdict(spent), "hourly": asdict(rate)} for name, (spent, rate) in pools.items()}
        print(json.dumps({"dollars": spending.dollars, "at": spending.at, "pools": objects}))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("pool", "machine-hours", "under grants", "unknown price", "so far", "an hour"):
        table.add_column(column, justify="left" if column == "pool" else "right", no_wrap=True)
    for name, (spent, rate) in pools.items():
        hours = (f"{spent.hours:,.2f}", f"{spent.free_hours:,.2f}", f"{spent.unknown_hours:,.2f}")
        table.add_row(name, *hours, format_dollars(spent.dollars), rate.hour)
    make_console().print(table)
    total = format_dollars(spending.dollars)
    echo(f"{total} so far, without traffic, buckets and disks of TPUs; only Google's bill is exact")


def open_fleet(target: str | None) -> tuple[Fleet, FleetReader]:
    """Return a fleet and its reader, which raises InputError if the fleet does not exist."""
    fleet, _ = find_fleet(target)
    if fleet.provider_name == "rehearsal":
        require_running(default_folder())  # to look starts nothing
    cloud = fleet.provider()
    store = fleet.store(cloud)

    def read() -> tuple[Document, Listing, list[Event]]:
        document = store.load()
        if document is None:
            raise InputError(f"there is no fleet {fleet.name} in project {cloud.project}. Create it: `tpuswarm up`")
        listing = cloud.machines(document.zones)
        return document, listing, sorted({*fleet.history.events(), *document.events})

    return fleet, read


def _draw_fleet(document: Document, listing: Listing, events: list[Event], width: int, screen: Any = None) -> Any:
    """Draw the machines. If they do not fit on `screen`, leave out healthy ones first."""
    from rich.console import Group
    from rich.text import Text

    now = time.time()
    rows = view.machine_rows(document.desired, listing, events, now)
    parts: list[Any] = [Text(line) for line in view.summary_lines(document, listing, now)]
    if listing.unreachable:
        parts.append(Text(f"unknown, no answer from: {', '.join(sorted(listing.unreachable))}", style="yellow"))
    strangers = view.list_strangers(document.desired, listing)
    parts += [Text(f"not of this fleet: {line}", style="dim") for line in strangers]
    if not rows:
        return Group(Text("no machines"), *parts)
    if screen is not None:
        lines_below = sum(len(screen.render_lines(part)) for part in parts)
        room = max(1, screen.height - lines_below - 3)  # column heads, "and … more", and the cursor's line
        if len(rows) > room:
            rows.sort(key=lambda row: row.state == "ready" and row.healthy is not False)
            parts.insert(0, Text(f"and {len(rows) - room} more", style="dim"))
            rows = rows[:room]
    return Group(view.machines_table(rows, width), *parts)
