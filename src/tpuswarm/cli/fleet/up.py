"""`tpuswarm up`, `down`, `pause`, `resume`, `keep`: each shows what it is about to do, and asks."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import FleetOption, Target, Yes, confirm
from tpuswarm.cli.fleet import apply
from tpuswarm.cli.help import TYPED_WORDS
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.fleet.decide.desired import Desired

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the steps, do nothing. Needs no credentials.")]
FleetOrMachine = Annotated[
    str | None, typer.Argument(metavar="[FILE|NAME]", help="swarm.toml, a fleet, or a machine of it.")
]
Name = Annotated[str, typer.Argument(help="A machine: its name, its number, or a unique prefix.")]
BY_HAND = "requested by `tpuswarm down`"


def up(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Default: swarm.toml.")] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- CMD]", help="With --type: a job to run on it until it exits 0."),
    ] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Without a file: a TPU of this type.")] = None,
    zone: Annotated[list[str] | None, typer.Option("--zone", help="Without a file: zones in order.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Without a file: its name.")] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Without a file: a spot TPU: cheaper, may be preempted.")
    ] = False,
    provider: Annotated[str, typer.Option("--provider", help="Without a file: google or rehearsal.")] = "google",
    scale: Annotated[
        list[str] | None, typer.Option("--scale", help="POOL=N: set the number of machines in a pool.")
    ] = None,
    down_when: Annotated[
        str | None, typer.Option("--down-when", help='Without a file: "done", "idle 30m" or a date.')
    ] = None,
    paid: Annotated[
        bool, typer.Option("--paid", help="Also create TPUs that no grant covers, and pay for them.")
    ] = False,
    adopt: Annotated[
        str | None, typer.Option("--adopt", help="Take over the machines of a fleet, by its id: its document is lost.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Then start a keeper: on the head, or else on this computer.")
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Create what swarm.toml asks for, or one TPU, and wait until ready. Run it again to create what is missing."""
    from tpuswarm.cli.machine import jobs
    from tpuswarm.fleet.spec import desired_from_file
    from tpuswarm.fleet.spec.file import DEFAULT_FILE

    file, command = _command(context, file, words or [])
    if command and type_ is None:
        raise InputError("-- CMD goes with --type; on a fleet, `tpuswarm exec POOL --detach -- CMD` starts a job")
    read, warnings = desired_from_file.file_or_options(file, type_, zone or [], name, spot, provider, down_when)
    for warning in warnings:
        say(f"warning: {warning}", err=True)

    def as_asked(wanted: "Desired") -> "Desired":
        return desired_from_file.with_machine_name(desired_from_file.with_counts(wanted, scale or []), name)

    if dry_run:
        apply.dry_run(read, as_asked, paid, keep)
        return
    from tpuswarm.fleet.store import fleets

    fleet = fleets.fleet_of_file(read)
    agreed = apply.agree(fleet, read, as_asked, paid, yes, keep, adopt=adopt)
    wanted = agreed.wanted
    if command:
        jobs.store_main(fleet, wanted.pools[0].name, command)
    at_home = False
    try:
        apply.bring_up(fleet, agreed, read.setup, keep, None if type_ else file or DEFAULT_FILE)
        at_home = wanted.kept_on is not None
        if command:
            jobs.see_begin(fleet, jobs.MAIN, kept=keep)
    finally:  # whatever went wrong: machines may be there, and cost money
        if at_home:
            say(f"{wanted.keeper_machine} keeps it: this computer may go")
        elif keep:
            say(f"it is kept in the background; what it does is in {fleet.log}")
        elif any(each.how == "spot" for each in wanted.pools) or wanted.down_when or wanted.budget.total:
            say("nobody keeps it from now on: run `tpuswarm keep`, or `tpuswarm up --keep` for the background")


def _command(context: typer.Context, file: Path | None, words: list[str]) -> tuple[Path | None, list[str]]:
    """FILE and CMD, told apart by the `--` between them."""
    typed = context.meta[TYPED_WORDS]
    after = typed[typed.index("--") + 1 :] if "--" in typed else []
    given = [*([str(file)] if file else []), *words]
    before = given[: len(given) - len(after)]
    if len(before) > 1:
        raise InputError(f"{before[1]!r} is too much: give one FILE, and a command after --")
    return Path(before[0]) if before else None, after


def down(
    target: FleetOrMachine = None,
    orphans: Annotated[
        str | None, typer.Option("--orphans", help="Delete the machines of a lost fleet, by its id.")
    ] = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps, do nothing.")] = False,
) -> None:
    """Delete a fleet, or one of its machines, and check by listing that nothing is left that costs money."""
    from tpuswarm.fleet.spec import desired_from_file
    from tpuswarm.fleet.store import fleets

    fleet, machine = apply.target_of(target)
    cloud = fleet.provider()
    store: fleets.Store = fleet.store(cloud)
    if orphans is None:
        document, listing, note = fleets.inspect_fleet(fleet, store, cloud, None)
    else:
        found, listing = fleets.find_orphans(fleet, store, cloud, orphans)
        document, store, note = found, fleets.MemoryStore(found), ""
    if note:
        say(f"note: {note}", err=True)
    if document is None:
        say(f"there is no fleet {fleet.name} in project {cloud.project}")
        return
    desired = document.desired
    wanted = desired_from_file.without_machine(desired, listing, machine) if machine else replace(desired, down=BY_HAND)
    wanted = replace(wanted, revision=wanted.revision + 1)
    shown = apply.previewed(wanted, listing, cloud.project, document)
    if desired.down is not None and machine is None and not shown.steps:
        say(f"{desired.fleet} is down already: {desired.down}")
    else:
        apply.print_preview(shown, wanted, fleet.provider_name, kept=True, ending=True)
    if dry_run:
        say("nothing was done")
        return
    if shown.steps:
        confirm(yes)
    fleets.change_desired(store, wanted, desired)
    apply.work(fleet, cloud, store, lambda tick: tick.converged if machine else tick.done)
    if machine:
        say("it is gone, and its pool has one machine fewer")
        return
    stays = f"; the bucket gs://{fleet.bucket} stays, with what is in it" if fleet.bucket else ""
    say(f"nothing that carries the id {desired.fleet} is left in project {cloud.project}, as its lists show{stays}")
    if orphans is None:
        fleet.forget()
        say(f"`tpuswarm up{f' {target}' if target and target.endswith('.toml') else ''}` brings it back")


def pause(name: Name, fleet: FleetOption = None, yes: Yes = False) -> None:
    """Stop a machine, so that only its disk costs money. Pods cannot be stopped, spot machines cannot be resumed."""
    _turn(name, fleet, yes, pausing=True)


def resume(name: Name, fleet: FleetOption = None, yes: Yes = False) -> None:
    """Start a paused machine."""
    _turn(name, fleet, yes, pausing=False)


def keep(target: Target = None) -> None:
    """Run the keeper in the foreground until Ctrl-C: create what is missing, delete what is dead."""
    from tpuswarm.fleet.store import fleets

    fleet, _ = fleets.find_fleet(target)
    cloud = fleet.provider()
    alone = not sys.stdin.isatty()
    apply.work(fleet, cloud, fleet.store(cloud), lambda tick: tick.done, stays=True, patient=alone)


def _turn(text: str, where: str | None, yes: bool, pausing: bool) -> None:
    from tpuswarm.catalog import find
    from tpuswarm.fleet.decide.names import resolve_name
    from tpuswarm.fleet.store import fleets

    fleet, _ = fleets.find_fleet(where)
    cloud = fleet.provider()
    store = fleet.store(cloud)
    document, listing, _ = fleets.inspect_fleet(fleet, store, cloud, None)
    if document is None:
        raise InputError(f"there is no fleet {fleet.name} in project {cloud.project}")
    wanted = document.desired
    ours = {each.name: each for each in listing.machines if each.fleet == wanted.fleet}
    name = resolve_name(text, {**ours, **wanted.paused})
    machine = ours.get(name)
    paused = dict(wanted.paused)
    if not pausing:
        if paused.pop(name, None) is None:
            raise InputError(f"{name} is not paused")
    elif machine is None:
        raise InputError(f"{name} is not there at the moment")
    elif machine.spot:
        raise InputError(f"{name} is spot, and could not be started again: `tpuswarm down {name}` deletes it")
    elif machine.kind == "tpu" and (hosts := find(machine.type).hosts) > 1:
        raise InputError(
            f"{name} is a pod of {hosts} hosts, which cannot be stopped: `tpuswarm down {name}` deletes it"
        )
    else:
        paused[name] = machine.pool or ""
    wanted = replace(wanted, paused=paused, revision=wanted.revision + 1)
    shown = apply.previewed(wanted, listing, cloud.project, document)
    apply.print_preview(shown, wanted, fleet.provider_name, kept=True, ending=True)
    if shown.steps:
        confirm(yes)
    fleets.change_desired(store, wanted, document.desired)
    apply.work(fleet, cloud, store, lambda tick: tick.converged)
