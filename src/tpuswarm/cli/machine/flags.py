"""`tpuswarm flags`: how XLA and libtpu are set on machines, by whom, and since when it counts."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import FleetOption, Json, make_console
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.cloud.protocol import Machine
    from tpuswarm.fleet.decide.flags import Flag, Layer
    from tpuswarm.fleet.hosts.routes import Routes, Snapshot
    from tpuswarm.fleet.store.document import Document

app = typer.Typer(help="Set flags of XLA and libtpu for what is started on machines.", rich_markup_mode=None)
Where = Annotated[str, typer.Argument(metavar="WHERE", help="A generation (v5e), POOL, NAME or all.")]
ForJob = Annotated[str | None, typer.Option("--job", help="For this job alone, not for all that is started there.")]
TOLD_S = 60.0
"""Seconds for a pod's service to begin anew."""


@app.command()
def show(
    where: Annotated[str | None, typer.Argument(metavar="[WHERE]", help="What holds on NAME; what POOL sets.")] = None,
    job: ForJob = None,
    known: Annotated[bool, typer.Option("--known", help="What XLA says of its flags, on this computer.")] = False,
    as_json: Json = False,
    fleet: FleetOption = None,
) -> None:
    """Show all that is set, or of a machine what holds there: the value, for what it is set, and who has set it."""
    if known:
        _show_known(as_json)
        return
    from tpuswarm.fleet.store import machine_flags

    _, seen = _look(fleet)
    document = seen.document
    found = [*document.desired.flags, *document.flags]
    if where is not None:
        layer, place = machine_flags.parse_scope(where, document.desired, seen.listing.machines)
        if layer == "machine":
            machine = next(each for each in _ours(seen) if each.name == place)
            found = list(machine_flags.machine_flags(document, machine, job).values())
        else:
            found = [each for each in found if (each.layer, each.where) == (layer, place)]
    if job is not None:
        found = [each for each in found if each.job in (None, job)]
    rows = [(each, "swarm.toml" if each in document.desired.flags else "flags set") for each in found]
    if as_json:
        print(json.dumps({"flags": [{**asdict(each), "by": by} for each, by in rows]}))
        return
    if not rows:
        say("no flags are set" + (f" for {where}" if where else "") + ": `tpuswarm flags set WHERE KEY=VALUE` sets one")
        return
    from tpuswarm.train.look.live import Column, table

    columns = (
        Column("flag", wraps=30), Column("value", wraps=20), Column("for"), Column("by", rank=2),
        Column("in", rank=1),
    )  # fmt: skip
    console = make_console()
    cells = [(each.name, each.value, each.text, by, each.variable) for each, by in rows]
    console.print(table(columns, sorted(cells), console.width))


@app.command("set", context_settings={"ignore_unknown_options": True})  # a flag may be pasted with its dashes
def set_(
    where: Where,
    values: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="One or more.")],
    job: ForJob = None,
    fleet: FleetOption = None,
) -> None:
    """Set flags for what is started from now on; members of a swarm begin again with them, one after the other."""
    from tpuswarm.fleet.decide.flags import Flag, set_flag
    from tpuswarm.plan import flags as asked

    given = dict(_pair(each) for each in values)
    checked = asked.check(given)
    routes, seen = _look(fleet)
    layer, place = _place(seen, where, job)
    new = [Flag(name, value, checked.variables[name], layer, place, job) for name, value in given.items()]

    def add(found: "tuple[Flag, ...]") -> "tuple[Flag, ...]":
        for each in new:
            found = set_flag(found, each)
        return found

    document = _store(routes, add)
    for name in checked.unchecked:
        say(f"warning: {name}: {asked.UNCHECKED}", err=True)
    for each in new:
        said = asked.meanings().get(each.name) if each.variable == "XLA_FLAGS" else None
        note = f" ({said.text.partition('. ')[0].rstrip('.')}; default {said.default or 'empty'})" if said else ""
        say(f"{each.name}={each.value} for {each.text}{note}")
    _see_to(routes, seen, document)


@app.command(context_settings={"ignore_unknown_options": True})
def unset(
    where: Where,
    names: Annotated[list[str], typer.Argument(metavar="KEY", help="One or more.")],
    job: ForJob = None,
    fleet: FleetOption = None,
) -> None:
    """Take back what `flags set` has set; what swarm.toml names is taken out of the file."""
    from tpuswarm.config.nearest import did_you_mean
    from tpuswarm.fleet.decide.flags import Flag, unset_flag

    routes, seen = _look(fleet)
    layer, place = _place(seen, where, job)
    there = {each.place: each for each in seen.document.flags}
    of_file = {each.place for each in seen.document.desired.flags}
    old = [Flag(name.removeprefix("--"), "", "XLA_FLAGS", layer, place, job) for name in names]
    for each in old:
        if each.place in there:
            continue
        if each.place in of_file:
            raise InputError(f"{each.name} for {each.text} stands in swarm.toml: take it out, and `tpuswarm up`")
        known = [one.name for one in there.values() if one.text == each.text]
        raise InputError(f"{each.name} is not set for {each.text}; {did_you_mean(each.name, known)}")

    def take(found: "tuple[Flag, ...]") -> "tuple[Flag, ...]":
        for each in old:
            found = unset_flag(found, each)
        return found

    document = _store(routes, take)
    for each in old:
        say(f"{each.name} for {each.text} is taken back")
    _see_to(routes, seen, document)


def _pair(text: str) -> tuple[str, str]:
    from tpuswarm.plan.flags import NAME

    name, equals, value = text.removeprefix("--").partition("=")
    if not equals or not re.fullmatch(NAME, name):
        raise InputError(f"KEY=VALUE, such as xla_tpu_scoped_vmem_limit_kib=65536, not {text!r}")
    return name, value


def _look(fleet: str | None) -> "tuple[Routes, Snapshot]":
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.store import fleets

    routes = open_routes(fleets.find_fleet(fleet)[0])
    return routes, routes.snapshot()


def _ours(seen: "Snapshot") -> "list[Machine]":
    return [each for each in seen.listing.machines if each.fleet == seen.document.desired.fleet]


def _place(seen: "Snapshot", where: str, job: str | None) -> "tuple[Layer, str]":
    from tpuswarm.config.nearest import did_you_mean
    from tpuswarm.fleet.store.machine_flags import parse_scope

    jobs = [each.name for each in seen.document.jobs if not each.is_over]
    if job is not None and job not in jobs:
        raise InputError(f"there is no job {job!r} that is not over; {did_you_mean(job, jobs)}")
    return parse_scope(where, seen.document.desired, seen.listing.machines)


def _store(routes: "Routes", make: "Callable[[tuple[Flag, ...]], tuple[Flag, ...]]") -> "Document":
    from tpuswarm.fleet.store import machine_flags
    from tpuswarm.fleet.store.document import Document

    def change(found: Document | None) -> Document:
        if found is None:
            raise RunFailed(f"fleet {routes.fleet.name} is gone: somebody has deleted it")
        changed = replace(found, flags=make(found.flags))
        machine_flags.check_tf_pods(changed)
        return changed

    return routes.fleet.store(routes.fleet.provider()).change(change)


def _see_to(routes: "Routes", seen: "Snapshot", document: "Document") -> None:
    """That what was stored counts, or that a person knows where not."""
    failed = tell_pods(routes, document, seen.listing.machines)
    _say_running(document, _ours(seen))
    if failed:
        raise RunFailed("; ".join(failed))


def _say_running(document: "Document", machines: "Iterable[Machine]") -> None:
    """What runs with other flags than it would begin with now."""
    from tpuswarm.cli.machine.jobs import is_kept
    from tpuswarm.fleet.decide.jobs import FLAG_RESTART_INTERVAL_S
    from tpuswarm.fleet.store.machine_flags import machine_exports
    from tpuswarm.fleet.training import is_member

    there = {each.name: each for each in machines}
    members = 0
    for job in document.jobs:
        old = [
            seat for seat in job.assignments
            if seat.phase == "running" and seat.machine in there
            and machine_exports(document, there[seat.machine], job.name) != seat.flags
        ]  # fmt: skip
        if is_member(job):
            members += len(old)
        elif old:
            say(f"job {job.name} goes on with the flags it began with: `tpuswarm stop {job.name}` and begin it again")
    if members and is_kept(document):
        say(f"{members} member{'s' * (members > 1)} restart with it, one every {FLAG_RESTART_INTERVAL_S:g} s")
    elif members:
        say(
            f"{members} member{'s' * (members > 1)} of the swarm go on as they began: nobody keeps the fleet; with "
            "`tpuswarm keep` they begin again, one after the other"
        )


def tell_pods(routes: "Routes", document: "Document", machines: "Iterable[Machine]") -> list[str]:
    """Give pods with a TensorFlow runtime what they read from their metadata, and let them read it.

    What went wrong on some: those are outdated until a later command has done it.
    """
    from tpuswarm.cloud.protocol import ENV_VARS_NEW
    from tpuswarm.fleet.store.machine_flags import outdated_pods

    there = {each.name: each for each in machines}
    failed = []
    for name, metadata in outdated_pods(document, there.values()).items():
        try:
            routes.set_metadata(there[name], {**metadata, ENV_VARS_NEW: "TRUE"})
            _restart(routes, name)
            routes.set_metadata(there[name], {ENV_VARS_NEW: "FALSE"})
        except TpuswarmError as error:
            failed.append(str(error))
    return failed


def _restart(routes: "Routes", machine: str) -> None:
    """Of the service on all workers of a pod; it is said where that was done, and where not."""
    import asyncio

    from tpuswarm.fleet.store.machine_flags import RESTART_RUNTIME
    from tpuswarm.remote.connect import Connections, ask
    from tpuswarm.remote.fan_out import fan_out

    hosts, _ = routes.hosts(machine)

    async def go() -> "list[tuple[int, bytes, bytes] | TpuswarmError]":
        async with Connections(routes.key) as connections:
            return await fan_out(hosts, lambda host: ask(connections, host, RESTART_RUNTIME), time_out_s=TOLD_S)

    failed = []
    for host, done in zip(hosts, asyncio.run(go()), strict=True):
        if isinstance(done, TpuswarmError):
            failed.append(str(done))
        elif done[0] != 0:
            last = done[2].decode(errors="replace").strip().rpartition("\n")[2]
            failed.append(f"{host.label}: exit {done[0]}: {last or 'it said nothing'}")
    if failed:
        raise RunFailed(
            f"{machine} has it in its metadata, and tpu-runtime was begun anew on {len(hosts) - len(failed)} of "
            f"{len(hosts)} workers, not on {'; '.join(failed)}: give the command again"
        )
    say(f"{machine}: tpu-runtime was begun anew on {len(hosts)} worker{'s' * (len(hosts) > 1)}")


def _show_known(as_json: bool) -> None:
    from tpuswarm.plan.flags import meanings

    found = meanings()
    if as_json:
        print(json.dumps({name: each._asdict() for name, each in found.items()}))
        return
    from rich.padding import Padding
    from rich.text import Text

    console = make_console()
    for name, each in sorted(found.items()):  # no table: a name that is folded cannot be copied
        about = f"  {each.kind}, {each.default or 'empty'} by default"
        console.print(Text.assemble((name, "bold"), about))
        console.print(Padding(Text(each.text), (0, 0, 0, 4), expand=False))
    say("of XLA's flags the first ones, as its help ends there; libtpu names none of its own, but knows a wrong one")
