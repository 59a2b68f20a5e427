"""`tpuswarm flags`: set flags of XLA and libtpu on machines, and restart the programs that read them."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import reduce
from typing import Annotated

import typer

from tpuswarm.cli.console import FleetOption, Json, make_console
from tpuswarm.cli.machine.jobs import has_keeper
from tpuswarm.cloud.protocol import ENV_VARS_NEW, Machine
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.fleet.decide.flag_restarts import FLAG_RESTART_INTERVAL_S
from tpuswarm.fleet.decide.flags import Flag, Layer, set_flag, unset_flag
from tpuswarm.fleet.hosts.routes import Routes, Snapshot, open_routes
from tpuswarm.fleet.store import machine_flags
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.fleet.training import is_member
from tpuswarm.plan import flags as libraries
from tpuswarm.remote.connect import Connections, fan_out, run_shell
from tpuswarm.train.process.terminal import echo

app = typer.Typer(help="Set flags of XLA and libtpu for the programs on machines.", rich_markup_mode=None)
Where = Annotated[str, typer.Argument(metavar="WHERE", help="A generation (v5e), POOL, NAME or all.")]
ForJob = Annotated[str | None, typer.Option("--job", help="Only for this job, not for all programs there.")]
RESTART_TIMEOUT_S = 60.0


@app.command()
def show(
    where: Annotated[
        str | None, typer.Argument(metavar="[WHERE]", help="NAME: what applies there. POOL: what is set for it.")
    ] = None,
    job: ForJob = None,
    known: Annotated[bool, typer.Option("--known", help="List XLA's flags, as installed on this computer.")] = False,
    as_json: Json = False,
    fleet: FleetOption = None,
) -> None:
    """Show all flags that are set, or those that apply on a machine: value, scope and who set it."""
    from tpuswarm.train.look.widgets import Column, make_table

    if known:
        _print_known_flags(as_json)
        return
    snapshot = open_routes(find_fleet(fleet)[0]).snapshot()
    document = snapshot.document
    flags = [*document.desired.flags, *document.flags]
    if where is not None:
        layer, scope = machine_flags.parse_scope(where, document.desired, snapshot.listing.machines)
        if layer == "machine":
            machine = next(machine for machine in _own_machines(snapshot) if machine.name == scope)
            flags = list(machine_flags.machine_flags(document, machine, job).values())
        else:
            flags = [flag for flag in flags if (flag.layer, flag.where) == (layer, scope)]
    if job is not None:
        flags = [flag for flag in flags if flag.job in (None, job)]
    rows = [(flag, "swarm.toml" if flag in document.desired.flags else "flags set") for flag in flags]
    if as_json:
        print(json.dumps({"flags": [{**asdict(flag), "by": by} for flag, by in rows]}))
        return
    if not rows:
        echo(f"no flags are set{f' for {where}' if where else ''}; set one: `tpuswarm flags set WHERE KEY=VALUE`")
        return
    columns = (
        Column("flag", wraps=30), Column("value", wraps=20), Column("for"), Column("by", rank=2),
        Column("in", rank=1),
    )  # fmt: skip
    console = make_console()
    cells = [(flag.name, flag.value, flag.text, by, flag.variable) for flag, by in rows]
    console.print(make_table(columns, sorted(cells), console.width))


@app.command("set", context_settings={"ignore_unknown_options": True})  # allows --KEY=VALUE
def set_(
    where: Where,
    values: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="One or more.")],
    job: ForJob = None,
    fleet: FleetOption = None,
) -> None:
    """Set flags for programs that start from now on; members of a swarm restart with them, one after the other."""
    given = dict(_parse_flag(value) for value in values)
    checked = libraries.check_flags(given)
    routes = open_routes(find_fleet(fleet)[0])
    snapshot = routes.snapshot()
    layer, scope = _find_scope(snapshot, where, job)
    new = [Flag(name, value, checked.variables[name], layer, scope, job) for name, value in given.items()]
    document = _change_flags(routes, set_flag, new)
    for name in checked.unchecked:
        echo(f"warning: {name}: {libraries.UNCHECKED}", err=True)
    for flag in new:
        meaning = libraries.xla_flag_help().get(flag.name) if flag.variable == "XLA_FLAGS" else None
        note = ""
        if meaning:
            note = f" ({meaning.text.partition('. ')[0].rstrip('.')}; default {meaning.default or 'empty'})"
        echo(f"{flag.name}={flag.value} for {flag.text}{note}")
    _apply_flags(routes, snapshot, document)


@app.command(context_settings={"ignore_unknown_options": True})
def unset(
    where: Where,
    names: Annotated[list[str], typer.Argument(metavar="KEY", help="One or more.")],
    job: ForJob = None,
    fleet: FleetOption = None,
) -> None:
    """Remove flags that `flags set` has set. Remove those in swarm.toml from the file."""
    routes = open_routes(find_fleet(fleet)[0])
    snapshot = routes.snapshot()
    layer, scope = _find_scope(snapshot, where, job)
    set_flags = {flag.place: flag for flag in snapshot.document.flags}
    file_flags = {flag.place for flag in snapshot.document.desired.flags}
    old = [Flag(name.removeprefix("--"), "", "XLA_FLAGS", layer, scope, job) for name in names]
    for flag in old:
        if flag.place in set_flags:
            continue
        if flag.place in file_flags:
            raise InputError(f"{flag.name} for {flag.text} is in swarm.toml. Remove it there, then `tpuswarm up`.")
        known = [other.name for other in set_flags.values() if other.text == flag.text]
        raise InputError(f"{flag.name} is not set for {flag.text}; {did_you_mean(flag.name, known)}")
    document = _change_flags(routes, unset_flag, old)
    for flag in old:
        echo(f"removed {flag.name} for {flag.text}")
    _apply_flags(routes, snapshot, document)


def _parse_flag(text: str) -> tuple[str, str]:
    name, equals, value = text.removeprefix("--").partition("=")
    if not equals or not re.fullmatch(libraries.FLAG_NAME_PATTERN, name):
        raise InputError(f"a flag is KEY=VALUE, such as xla_tpu_scoped_vmem_limit_kib=65536, not {text!r}")
    return name, value


def _own_machines(snapshot: Snapshot) -> list[Machine]:
    return [machine for machine in snapshot.listing.machines if machine.fleet == snapshot.document.desired.fleet]


def _find_scope(snapshot: Snapshot, where: str, job: str | None) -> tuple[Layer, str]:
    open_jobs = [known.name for known in snapshot.document.jobs if not known.is_over]
    if job is not None and job not in open_jobs:
        raise InputError(f"no job {job!r} is running or waiting; {did_you_mean(job, open_jobs)}")
    return machine_flags.parse_scope(where, snapshot.document.desired, snapshot.listing.machines)


def _change_flags(
    routes: Routes, change_flag: Callable[[tuple[Flag, ...], Flag], tuple[Flag, ...]], changes: list[Flag]
) -> Document:
    def change(document: Document | None) -> Document:
        if document is None:
            raise RunFailed(f"fleet {routes.fleet.name} was deleted by another command")
        changed = replace(document, flags=reduce(change_flag, changes, document.flags))
        machine_flags.check_tf_pods(changed)
        return changed

    return routes.fleet.store(routes.fleet.provider()).change(change)


def _apply_flags(routes: Routes, snapshot: Snapshot, document: Document) -> None:
    failed = update_pods(routes, document, snapshot.listing.machines)
    _print_outdated_jobs(document, _own_machines(snapshot))
    if failed:
        raise RunFailed("; ".join(failed))


def _print_outdated_jobs(document: Document, machines: Iterable[Machine]) -> None:
    """Print which jobs still run with older flags."""
    by_name = {machine.name: machine for machine in machines}
    members = 0
    for job in document.jobs:
        outdated = [
            assignment for assignment in job.assignments
            if assignment.phase == "running" and assignment.machine in by_name
            and machine_flags.machine_exports(document, by_name[assignment.machine], job.name) != assignment.flags
        ]  # fmt: skip
        if is_member(job):
            members += len(outdated)
        elif outdated:
            echo(
                f"job {job.name} keeps its old flags until it restarts: `tpuswarm stop {job.name}`, then start it again"
            )
    count = f"{members} member{'s' * (members > 1)}"
    if members and has_keeper(document):
        echo(f"{count} restart with the new flags, one every {FLAG_RESTART_INTERVAL_S:g} s")
    elif members:
        echo(f"{count} of the swarm keep old flags, since no keeper runs. `tpuswarm keep` restarts them one by one.")


def update_pods(routes: Routes, document: Document, machines: Iterable[Machine]) -> list[str]:
    """Write the flags of pods with a TensorFlow runtime to their metadata and restart the runtime.

    Returns the errors; a later command repeats this for the pods that failed.
    """
    by_name = {machine.name: machine for machine in machines}
    failed = []
    for name, metadata in machine_flags.outdated_pods(document, by_name.values()).items():
        try:
            routes.set_metadata(by_name[name], {**metadata, ENV_VARS_NEW: "TRUE"})
            _restart_runtime(routes, name)
            routes.set_metadata(by_name[name], {ENV_VARS_NEW: "FALSE"})
        except TpuswarmError as error:
            failed.append(str(error))
    return failed


def _restart_runtime(routes: Routes, machine: str) -> None:
    hosts, _ = routes.hosts(machine)

    async def restart() -> list[tuple[int, bytes, bytes] | TpuswarmError]:
        async with Connections(routes.key) as connections:
            return await fan_out(
                hosts,
                lambda host: run_shell(connections, host, machine_flags.RESTART_RUNTIME),
                time_out_s=RESTART_TIMEOUT_S,
            )

    failed = []
    for host, result in zip(hosts, asyncio.run(restart()), strict=True):
        if isinstance(result, TpuswarmError):
            failed.append(str(result))
        elif result[0] != 0:
            last_line = result[2].decode(errors="replace").strip().rpartition("\n")[2]
            failed.append(f"{host.label}: exit {result[0]}: {last_line or 'no output'}")
    if failed:
        raise RunFailed(
            f"{machine}: tpu-runtime restarted on {len(hosts) - len(failed)} of {len(hosts)} workers, not on "
            f"{'; '.join(failed)}. The flags are in its metadata; repeat the command."
        )
    echo(f"{machine}: tpu-runtime restarted on {len(hosts)} worker{'s' * (len(hosts) > 1)}")


def _print_known_flags(as_json: bool) -> None:
    from rich.padding import Padding
    from rich.text import Text

    meanings = libraries.xla_flag_help()
    if as_json:
        print(json.dumps({name: meaning._asdict() for name, meaning in meanings.items()}))
        return
    console = make_console()
    for name, meaning in sorted(meanings.items()):  # not a table: names must not be folded
        console.print(Text.assemble((name, "bold"), f"  {meaning.kind}, {meaning.default or 'empty'} by default"))
        console.print(Padding(Text(meaning.text), (0, 0, 0, 4), expand=False))
    echo("XLA's help is cut off here, so more flags exist. libtpu lists none of its flags, but refuses unknown ones.")
