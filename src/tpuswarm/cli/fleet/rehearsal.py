"""`tpuswarm rehearsal`: the local cloud, and bad weather for it."""

import json
import os
import shlex
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tpuswarm.cli.console import Json
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.cloud.rehearsal.place import Place

app = typer.Typer(help="A local cloud to rehearse on, and bad weather for it.", rich_markup_mode=None)
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A machine: its name, its number, or a unique prefix; see `status`.")
]


@app.command()
def start(
    speed: Annotated[
        float | None, typer.Option(help="Seconds of its clock per second of ours. Default: as before, initially 10.")
    ] = None,
) -> None:
    """Start the local cloud in the background, unless it is already running."""
    from tpuswarm.cloud.rehearsal.client import ask
    from tpuswarm.cloud.rehearsal.connect import connect

    if speed is not None and not 0 < speed <= 100_000:
        raise InputError(f"--speed must be above 0 and at most 100,000, not {speed:g}")
    place = _place()
    connect(place.folder)
    if speed is not None:
        ask(place, "speed", speed=speed)
    say(f"the local cloud runs; its clock goes {ask(place, 'status')['speed']:g} times as fast as ours")
    say(f"its files are in {place.folder}")
    if os.geteuid() == 0:
        say(
            "note: you are root: what a start-up script writes to /etc and the like, it writes to this computer",
            err=True,
        )


@app.command()
def status(
    as_json: Json = False,
    env: Annotated[bool, typer.Option("--env", help="Print variables that make gcloud use it, for `eval`.")] = False,
) -> None:
    """Show the machines, the waiting requests and the faults."""
    from tpuswarm.cloud.rehearsal.client import ask, environment
    from tpuswarm.cloud.rehearsal.connect import running

    place = _place()
    endpoints = running(place)
    if env:
        if endpoints is None:
            raise InputError(f"no local cloud runs in {place.folder}; `tpuswarm rehearsal start` starts it")
        for name, value in environment(place, endpoints).items():
            print(f"export {name}={shlex.quote(value)}")
        return
    found = ask(place, "status") if endpoints else None
    if as_json:
        about = {"running": endpoints is not None, "folder": str(place.folder)}
        print(json.dumps({**about, **(found or {}), **({"http": endpoints.http} if endpoints else {})}))
        return
    if found is None or endpoints is None:
        say(f"no local cloud runs in {place.folder}; `tpuswarm rehearsal start` starts it")
        return
    say(f"{place.folder}, {found['speed']:g} times as fast as ours, at {endpoints.http}")
    lines = [("name", "zone", "type", "state", "address")]
    for each in found["machines"]:
        addresses = [worker["external"] or worker["internal"] for worker in each["workers"]]
        more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
        state = "leaving" if any(worker["leaving"] for worker in each["workers"]) else each["state"]
        lines.append((each["name"], each["zone"], each["type"], state, (addresses or ["–"])[0] + more))
    for each in found["requests"]:
        lines.append((each["name"], each["zone"], "request", each["state"], "–"))
    if len(lines) == 1:
        say("no machines")
    else:
        widths = [max(len(line[column]) for line in lines) for column in range(5)]
        for line in lines:
            print("  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip())
    for broken, faults in (found["zones"] | found["buckets"]).items():
        say(f"{broken}: {', '.join(faults)}")
    for what, limit in found["quotas"].items():
        zone, generation = what.split(" ")
        say(f"{zone}: at most {limit:,} of {'each generation' if generation == '*' else generation}")
    for failure in found["failures"]:
        say(f"fault of the local cloud itself: {failure}; {place.log} has more")


@app.command()
def preempt(
    name: Name,
    ending: Annotated[
        Literal["preempted", "terminated", "gone"],
        typer.Option("--as", help="How the cloud shows it afterwards."),
    ] = "preempted",
) -> None:
    """Preempt a machine: its processes get SIGTERM, and SIGKILL 30 s later by the cloud's clock."""
    from tpuswarm.cloud.rehearsal.client import ask

    name = _machine(name)
    ask(_place(), "preempt", name=name, ending=ending)
    say(f"{name} is being preempted: its processes have got SIGTERM, and SIGKILL follows")


@app.command()
def maintenance(name: Name) -> None:
    """Put a machine through maintenance: it reboots and comes back with a new external address."""
    from tpuswarm.cloud.rehearsal.client import ask

    name = _machine(name)
    ask(_place(), "maintenance", name=name)
    say(f"{name} is being repaired: it reboots, and gets another external address")


@app.command()
def stockout(
    zone: Annotated[str, typer.Argument(metavar="ZONE")],
    over: Annotated[bool, typer.Option("--over", help="End the stockout.")] = False,
) -> None:
    """Make a zone run out of TPUs."""
    from tpuswarm.cloud.rehearsal.client import ask

    ask(_place(), "stockout", zone=zone, over=over)
    say(f"{zone} has TPUs again" if over else f"{zone} has no TPUs left; --over ends that")


@app.command()
def quota(
    limit: Annotated[
        str,
        typer.Argument(
            metavar="ZONE=N", help="Cores (chips for v5e and v6e) at a time; ZONE/v3=N for one generation; N none: any."
        ),
    ],
) -> None:
    """Limit how many TPUs a project may have in a zone at a time."""
    from tpuswarm.cloud.rehearsal.client import ask

    where, _, number = limit.partition("=")
    zone, _, generation = where.partition("/")
    if not (number.isdecimal() or number == "none"):
        raise InputError(f"{limit}: write ZONE=N, such as us-central1-f=16, or ZONE=none")
    ask(
        _place(),
        "quota",
        zone=zone,
        generation=generation or None,
        limit=None if number == "none" else int(number),
    )
    what = generation or "each generation"
    say(f"{zone}: no limit on {what}" if number == "none" else f"{zone}: at most {number} of {what}")


@app.command("break")
def break_(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A machine (NAME/2: its worker 2), a zone, a project, a bucket.")
    ],
    fault: Annotated[
        str,
        typer.Argument(
            metavar="FAULT",
            help="Of a machine: lock, holder, missing-device, tpu-logs, preload, apt, worker-id, read-only, "
            "maintenance, symptom, unhealthy. Of a zone: stockout, vm-stockout, hidden, unreachable, stuck. Of a "
            "project: no-billing, no-apis, os-login. Of a bucket: lost-answers, outage, silent, stalls, lost-chunks, "
            "lost-uploads, corrupt, rate-limit, retention, requester-pays.",
        ),
    ],
    mend: Annotated[bool, typer.Option("--mend", help="Remove the fault.")] = False,
) -> None:
    """Inject a fault."""
    from tpuswarm.cloud.rehearsal.client import ask
    from tpuswarm.cloud.rehearsal.machines.faults import MACHINE_FAULTS, NODE_FAULTS

    if fault in {**MACHINE_FAULTS, **NODE_FAULTS}:
        machine, slash, worker = name.partition("/")
        name = f"{_machine(machine)}{slash}{worker}"
    what = ask(_place(), "break", name=name, fault=fault, mend=mend)["what"]
    say(f"{name}: {fault} is mended" if mend else f"{name}: {what}")


@app.command()
def stop() -> None:
    """Stop the local cloud and everything on its machines. Its state stays; `start` continues from it."""
    from tpuswarm.cloud.rehearsal import connect

    place = _place()
    if connect.stop(place):
        say(f"the local cloud has ended; delete {place.folder} to forget it")
    else:
        say(f"no local cloud runs in {place.folder}")


def _machine(text: str) -> str:
    """The name of the machine that is meant; what means none is left for the local cloud to judge."""
    from tpuswarm.cloud.rehearsal.client import ask
    from tpuswarm.fleet.decide.names import resolve_name

    names = [each["name"] for each in ask(_place(), "status")["machines"]]
    if not any(each.startswith(text) or each.endswith(f"-{text}") for each in names):
        return text
    return resolve_name(text, names)


def _place() -> "Place":
    from tpuswarm.cloud.rehearsal.place import default_place

    return default_place()
