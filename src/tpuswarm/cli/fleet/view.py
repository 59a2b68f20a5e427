"""`tpuswarm list`, `describe`, `cost`: looking at a fleet."""

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import FleetOption, Json, Target, make_console
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.cloud.protocol import Listing
    from tpuswarm.fleet.decide.actions import Event
    from tpuswarm.fleet.store.document import Document
    from tpuswarm.fleet.store.fleets import Fleet

LOOKS = 5.0
"""Seconds between two looks of --live."""


def list_(
    target: Target = None,
    live: Annotated[bool, typer.Option("--live", help="Redraw until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """List a fleet's machines in all zones: state, age, losses and price; and its grants."""
    _fleet, read = look_at(target)
    if as_json:
        from tpuswarm.fleet.view import fleet_object

        document, listing, events = read()
        print(json.dumps(fleet_object(document, listing, events, time.time())))
        return
    if not live:
        console = make_console()
        document, listing, events = read()
        console.print(_drawn(document, listing, events, console.width))
        return
    from tpuswarm.train.process.drawn import Drawn

    console = make_console()

    def look() -> Any:
        document, listing, events = read()
        return _drawn(document, listing, events, console.width, console)

    with Drawn(look(), console=console, auto_refresh=False) as screen:
        while True:
            time.sleep(LOOKS)
            screen.update(look(), refresh=True)


def describe(
    name: Annotated[str, typer.Argument(help="A machine: its name, its number, or a unique prefix.")],
    fleet: FleetOption = None,
    as_json: Json = False,
) -> None:
    """Show everything known about a machine: what it is, what happened to it and why, even after it is gone."""
    from tpuswarm.config.formatting import format_age
    from tpuswarm.fleet.decide.names import resolve_name
    from tpuswarm.fleet.view import machine_rows

    _, read = look_at(fleet)
    document, listing, events = read()
    now = time.time()
    there = {row.name: row for row in machine_rows(document.desired, listing, events, now)}
    found = resolve_name(name, {*there, *(each.machine for each in events if each.machine)})
    mine = [each for each in events if each.machine == found]
    row = there.get(found)
    if as_json:
        print(json.dumps({"machine": asdict(row) if row else None, "events": [each._asdict() for each in mine]}))
        return
    if row is None:
        say(f"{found}: it is not there any more")
    else:
        health = {True: "healthy", False: f"unhealthy: {row.why}", None: row.why or "health not known"}[row.healthy]
        say(f"{row.name}: {row.type} ({row.how}) of pool {row.pool} in {row.zone}")
        say(f"state: {row.said}, {health}" + (f"; {format_age(row.age_s)} old" if row.age_s is not None else ""))
        for number, (internal, external) in enumerate(row.workers):
            say(f"worker {number}: {internal or '–'} inside, {external or '–'} outside")
        price = (
            "unknown"
            if row.hourly is None
            else "free under a grant"
            if row.hourly == 0
            else f"${row.hourly:,.2f} an hour"
        )
        say(f"price: {price}" + (f"; ${row.cost:,.2f} since it was created" if row.cost else ""))
    say("history:" if mine else "no history of it is known here")
    for each in mine:
        say(f"  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(each.at))}  {each.kind}: {each.text}")


def cost(target: Target = None, as_json: Json = False) -> None:
    """Show what a fleet has cost so far and costs per hour, by pool, from what was observed and public prices."""
    from tpuswarm.fleet.decide.money import Rate, format_dollars
    from tpuswarm.fleet.decide.spending import PoolSpending
    from tpuswarm.fleet.view import machine_rows
    from tpuswarm.fleet.view import total_spending as spent_by

    _, read = look_at(target)
    document, listing, _ = read()
    now = time.time()
    ledger = spent_by(document, listing, now)
    rates: dict[str, Rate] = {}
    for row in machine_rows(document.desired, listing, (), now):
        if row.state not in ("dead", "deleting", "waiting", "stopped"):
            rates[row.pool] = rates.get(row.pool, Rate()).plus(row.hourly)
    spent = ledger.pools
    pools = list(dict.fromkeys((*(each.name for each in document.desired.pools), *spent)))
    if as_json:
        shown = {
            pool: {**asdict(spent.get(pool, PoolSpending())), "hourly": asdict(rates.get(pool, Rate()))}
            for pool in pools
        }
        print(json.dumps({"dollars": ledger.dollars, "at": ledger.at, "pools": shown}))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("pool", "machine-hours", "under grants", "unknown price", "so far", "an hour"):
        table.add_column(column, justify="left" if column == "pool" else "right", no_wrap=True)
    for pool in pools:
        one = spent.get(pool, PoolSpending())
        table.add_row(
            pool, f"{one.hours:,.2f}", f"{one.free_hours:,.2f}", f"{one.unknown_hours:,.2f}",
            format_dollars(one.dollars), rates.get(pool, Rate()).hour,
        )  # fmt: skip
    make_console().print(table)
    say(f"{format_dollars(ledger.dollars)} so far, without traffic, buckets and disks of TPUs; Google's bill decides")


def look_at(target: str | None) -> "tuple[Fleet, Any]":
    """A fleet, and what reads it: document, listing, events."""
    from tpuswarm.fleet.store import fleets

    fleet, _ = fleets.find_fleet(target)
    cloud = fleet.provider()
    store = fleet.store(cloud)

    def read() -> "tuple[Document, Listing, list[Event]]":
        document = store.load()
        if document is None:
            raise InputError(f"there is no fleet {fleet.name} in project {cloud.project}: `tpuswarm up` makes it")
        listing = cloud.machines(document.zones)
        seen = {*fleet.history.events(), *document.events}
        return document, listing, sorted(seen)

    return fleet, read


def _drawn(document: "Document", listing: "Listing", events: "list[Event]", width: int, screen: Any = None) -> Any:
    """`screen`: a console on which all has to be seen at once; what does not fit there is what is well."""
    from rich.console import Group
    from rich.text import Text

    from tpuswarm.fleet.view import list_strangers, machine_rows, machines_table, summary_lines

    now = time.time()
    shown = machine_rows(document.desired, listing, events, now)
    parts: list[Any] = [Text(line) for line in summary_lines(document, listing, now)]
    if listing.unreachable:
        parts.append(
            Text(f"not known, as they do not answer: {', '.join(sorted(listing.unreachable))}", style="yellow")
        )
    parts += [Text(f"not of this fleet: {line}", style="dim") for line in list_strangers(document.desired, listing)]
    if not shown:
        return Group(Text("no machines"), *parts)
    if screen is not None:
        below = sum(len(screen.render_lines(part)) for part in parts)
        room = max(1, screen.height - below - 3)  # heads of columns, what is left out, and the cursor's line
        if len(shown) > room:
            shown.sort(key=lambda row: row.state == "ready" and row.healthy is not False)
            parts.insert(0, Text(f"and {len(shown) - room} more", style="dim"))
            shown = shown[:room]
    return Group(machines_table(shown, width), *parts)
