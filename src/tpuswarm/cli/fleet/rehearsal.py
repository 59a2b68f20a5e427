"""`tpuswarm rehearsal`: the local cloud and its faults."""

import json
import os
import shlex
from typing import Annotated, Literal

import typer

from tpuswarm.cli.console import Json
from tpuswarm.cloud.rehearsal import connect
from tpuswarm.cloud.rehearsal.connect import default_folder, gcloud_variables, send_command
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.names import resolve_name
from tpuswarm.train.process.terminal import echo

app = typer.Typer(help="A local cloud to rehearse on, and its faults.", rich_markup_mode=None)
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A machine: its name, its number, or a unique prefix; see `status`.")
]


@app.command()
def start(
    speed: Annotated[
        float | None, typer.Option(help="Seconds of its clock per real second. Default: as before, at first 10.")
    ] = None,
) -> None:
    """Start the local cloud in the background, unless it is already running."""
    if speed is not None and not 0 < speed <= 100_000:
        raise InputError(f"--speed must be above 0 and at most 100,000, not {speed:g}")
    place = default_folder()
    connect.connect(place.path)
    if speed is not None:
        send_command(place, "speed", speed=speed)
    echo(f"the local cloud runs; its clock is {send_command(place, 'status')['speed']:g} times as fast as ours")
    echo(f"its files are in {place.path}")
    if os.geteuid() == 0:
        echo("note: you are root, so start-up scripts that write to /etc write to this computer's /etc", err=True)


@app.command()
def status(
    as_json: Json = False,
    env: Annotated[bool, typer.Option("--env", help="Print variables that make gcloud use it, for `eval`.")] = False,
) -> None:
    """Show the machines, the waiting requests and the faults."""
    place = default_folder()
    endpoints = connect.find_running(place)
    not_running = f"no local cloud runs in {place.path}. Start it: `tpuswarm rehearsal start`"
    if env:
        if endpoints is None:
            raise InputError(not_running)
        for name, value in gcloud_variables(place, endpoints).items():
            print(f"export {name}={shlex.quote(value)}")
        return
    cloud = send_command(place, "status") if endpoints else None
    if as_json:
        about = {"running": endpoints is not None, "folder": str(place.path)}
        print(json.dumps({**about, **(cloud or {}), **({"http": endpoints.http} if endpoints else {})}))
        return
    if cloud is None or endpoints is None:
        echo(not_running)
        return
    echo(f"{place.path}, {cloud['speed']:g} times as fast as ours, at {endpoints.http}")
    rows = [("name", "zone", "type", "state", "address")]
    for machine in cloud["machines"]:
        addresses = [worker["external"] or worker["internal"] for worker in machine["workers"]] or ["–"]
        more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
        state = "leaving" if any(worker["leaving"] for worker in machine["workers"]) else machine["state"]
        rows.append((machine["name"], machine["zone"], machine["type"], state, addresses[0] + more))
    rows += [(request["name"], request["zone"], "request", request["state"], "–") for request in cloud["requests"]]
    if len(rows) == 1:
        echo("no machines")
    else:
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for row in rows:
            print("  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
    for subject, faults in (cloud["zones"] | cloud["buckets"]).items():
        echo(f"{subject}: {', '.join(faults)}")
    for subject, limit in cloud["quotas"].items():
        zone, generation = subject.split(" ")
        echo(f"{zone}: at most {limit:,} of {'each generation' if generation == '*' else generation}")
    for failure in cloud["failures"]:
        echo(f"bug in the local cloud: {failure}. Its log: {place.log}")


@app.command()
def preempt(
    name: Name,
    ending: Annotated[
        Literal["preempted", "terminated", "gone"],
        typer.Option("--as", help="How the cloud shows it afterwards."),
    ] = "preempted",
) -> None:
    """Preempt a machine: its processes get SIGTERM, and SIGKILL 30 s later by the cloud's clock."""
    name = _find_machine(name)
    send_command(default_folder(), "preempt", name=name, ending=ending)
    echo(f"preempting {name}: its processes got SIGTERM, and SIGKILL follows")


@app.command()
def maintenance(name: Name) -> None:
    """Put a machine through maintenance: it reboots and comes back with a new external address."""
    name = _find_machine(name)
    send_command(default_folder(), "maintenance", name=name)
    echo(f"{name} is in maintenance: it reboots and gets a new external address")


@app.command()
def stockout(
    zone: Annotated[str, typer.Argument(metavar="ZONE")],
    over: Annotated[bool, typer.Option("--over", help="End the stockout.")] = False,
) -> None:
    """Make a zone run out of TPUs."""
    send_command(default_folder(), "stockout", zone=zone, over=over)
    echo(f"{zone} has TPUs again" if over else f"{zone} has no TPUs; --over ends the stockout")


@app.command()
def quota(
    limit: Annotated[
        str,
        typer.Argument(
            metavar="ZONE=N",
            help="Cores (chips for v5e and v6e) at a time; ZONE/v3=N: one generation; ZONE/v5e-serving=N: single "
            "hosts of v5e; REGION/IN_USE_ADDRESSES=N, REGION/INSTANCES=N: hosts of all kinds; N none: no limit.",
        ),
    ],
) -> None:
    """Limit how many TPUs a project may have in a zone, or external addresses or machines in a region, at a time."""
    where, _, number = limit.partition("=")
    zone, _, generation = where.partition("/")
    if not (number.isdecimal() or number == "none"):
        raise InputError(f"a quota is ZONE=N, such as us-central1-f=16, or ZONE=none, not {limit}")
    count = None if number == "none" else int(number)
    send_command(default_folder(), "quota", zone=zone, generation=generation or None, limit=count)
    subject = generation or "each generation"
    echo(f"{zone}: no limit on {subject}" if count is None else f"{zone}: at most {count} of {subject}")


@app.command("break")
def break_(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A machine (NAME/2: its worker 2), a zone, a project, a bucket.")
    ],
    fault: Annotated[
        str,
        typer.Argument(
            metavar="FAULT",
            help="Of a machine: lock, holder, missing-device, tpu-logs, preload, apt, dpkg-interrupted, repository, "
            "chatty-shell, worker-id, read-only, maintenance, upcoming-maintenance, symptom, unhealthy. Of a zone: "
            "stockout, vm-stockout, hidden, unreachable, stuck. Of a project: no-billing, no-apis, os-login. Of a "
            "bucket: lost-answers, outage, silent, stalls, lost-chunks, lost-uploads, corrupt, rate-limit, "
            "retention, requester-pays.",
        ),
    ],
    mend: Annotated[bool, typer.Option("--mend", help="Remove the fault.")] = False,
) -> None:
    """Inject a fault."""
    from tpuswarm.cloud.rehearsal.machines.faults import MACHINE_FAULTS, NODE_FAULTS

    if fault in {**MACHINE_FAULTS, **NODE_FAULTS}:
        machine, slash, worker = name.partition("/")
        name = f"{_find_machine(machine)}{slash}{worker}"
    effect = send_command(default_folder(), "break", name=name, fault=fault, mend=mend)["what"]
    echo(f"{name}: {fault} is mended" if mend else f"{name}: {effect}")


@app.command()
def stop() -> None:
    """Stop the local cloud and everything on its machines. Its state stays; `start` continues from it."""
    place = default_folder()
    if connect.stop(place):
        echo(f"the local cloud has stopped. To remove its state, delete {place.path}")
    else:
        echo(f"no local cloud runs in {place.path}")


def _find_machine(text: str) -> str:
    names = [machine["name"] for machine in send_command(default_folder(), "status")["machines"]]
    if not any(name.startswith(text) or name.endswith(f"-{text}") for name in names):
        return text
    return resolve_name(text, names)
