"""`tpuswarm list`, `describe`, `cost`: looking at a fleet."""

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.runs import Json, make_console
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.cloud.protocol import Listing
    from tpuswarm.fleet.core.actions import Event
    from tpuswarm.fleet.keeping.document import Document
    from tpuswarm.fleet.keeping.fleets import Fleet

LOOKS = 5.0
"""Seconds between two looks of --live."""
Target = Annotated[str | None, typer.Argument(metavar="[FILE|FLEET]", help="swarm.toml, or a fleet's name.")]
Fleets = Annotated[str | None, typer.Option("--fleet", help="Of this fleet or file. Default: swarm.toml here.")]


def list_(
    target: Target = None,
    live: Annotated[bool, typer.Option("--live", help="Again and again, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """List a fleet's machines in all zones: state, age, how often each was lost, what it costs; and its grants."""
    _fleet, read = _look(target)
    if as_json:
        from tpuswarm.fleet.view import document_object

        document, listing, events = read()
        print(json.dumps(document_object(document, listing, events, time.time())))
        return
    if not live:
        make_console().print(_drawn(*read()))
        return
    from rich.live import Live

    with Live(_drawn(*read()), console=make_console(), auto_refresh=False) as screen:
        while True:
            time.sleep(LOOKS)
            screen.update(_drawn(*read()), refresh=True)


def describe(
    name: Annotated[str, typer.Argument(help="A machine: its name, its number, or a beginning that only it has.")],
    fleet: Fleets = None,
    as_json: Json = False,
) -> None:
    """Show everything known of a machine: what it is, what happened to it and why, also after its death."""
    from tpuswarm.fleet.core.names import resolve
    from tpuswarm.fleet.view import age, rows

    _, read = _look(fleet)
    document, listing, events = read()
    now = time.time()
    there = {row.name: row for row in rows(document.desired, listing, events, now)}
    found = resolve(name, {*there, *(each.machine for each in events if each.machine)})
    mine = [each for each in events if each.machine == found]
    row = there.get(found)
    if as_json:
        print(json.dumps({"machine": asdict(row) if row else None, "events": [each._asdict() for each in mine]}))
        return
    if row is None:
        print(f"{found}: it is not there any more")
    else:
        health = {True: "healthy", False: f"unhealthy: {row.why}", None: row.why or "health not known"}[row.healthy]
        print(f"{row.name}: {row.type} ({row.how}) of pool {row.pool} in {row.zone}")
        print(f"state: {row.said}, {health}; {age(row.age_s)} old")
        for number, (internal, external) in enumerate(row.workers):
            print(f"worker {number}: {internal or '–'} inside, {external or '–'} outside")
        price = (
            "unknown"
            if row.hourly is None
            else "free under a grant"
            if row.hourly == 0
            else f"${row.hourly:,.2f} an hour"
        )
        print(f"price: {price}" + (f"; ${row.cost:,.2f} since it was created" if row.cost else ""))
    print("history:" if mine else "no history of it is known here")
    for each in mine:
        print(f"  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(each.at))}  {each.kind}: {each.text}")


def cost(target: Target = None, as_json: Json = False) -> None:
    """Show what a fleet has cost so far and costs an hour, by pool, from what was seen of it and public prices."""
    from tpuswarm.fleet.core.ledger import Spent
    from tpuswarm.fleet.core.money import Rate, dollars
    from tpuswarm.fleet.view import rows

    _, read = _look(target)
    document, listing, _ = read()
    rates: dict[str, Rate] = {}
    for row in rows(document.desired, listing, (), time.time()):
        if row.state not in ("dead", "deleting", "waiting", "stopped"):
            rates[row.pool] = rates.get(row.pool, Rate()).plus(row.hourly)
    spent = document.ledger.pools
    pools = list(dict.fromkeys((*(each.name for each in document.desired.pools), *spent)))
    if as_json:
        shown = {
            pool: {**asdict(spent.get(pool, Spent())), "hourly": asdict(rates.get(pool, Rate()))} for pool in pools
        }
        print(json.dumps({"dollars": document.ledger.dollars, "at": document.ledger.at, "pools": shown}))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("pool", "machine-hours", "under grants", "unknown price", "so far", "an hour"):
        table.add_column(column, justify="left" if column == "pool" else "right", no_wrap=True)
    for pool in pools:
        one = spent.get(pool, Spent())
        table.add_row(
            pool, f"{one.hours:,.1f}", f"{one.free_hours:,.1f}", f"{one.unknown_hours:,.1f}", dollars(one.dollars),
            rates.get(pool, Rate()).hour,
        )  # fmt: skip
    make_console().print(table)
    print(
        f"{dollars(document.ledger.dollars)} so far, without traffic, buckets and disks of TPUs; Google's bill decides"
    )


def _look(target: str | None) -> "tuple[Fleet, Any]":
    """A fleet, and what reads it: document, listing, events."""
    from tpuswarm.fleet.keeping import fleets

    fleet, _ = fleets.find(target)
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


def _drawn(document: "Document", listing: "Listing", events: "list[Event]") -> Any:
    from rich.console import Group
    from rich.text import Text

    from tpuswarm.fleet.view import machines_table, rows, strangers, summary

    now = time.time()
    shown = rows(document.desired, listing, events, now)
    parts: list[Any] = [machines_table(shown)] if shown else [Text("no machines")]
    parts += [Text(line) for line in summary(document, listing, now)]
    if listing.unreachable:
        parts.append(
            Text(f"not known, as they do not answer: {', '.join(sorted(listing.unreachable))}", style="yellow")
        )
    parts += [Text(f"not of this fleet: {line}", style="dim") for line in strangers(document.desired, listing)]
    return Group(*parts)
