"""`tpuswarm up`, `down`, `pause`, `resume`, `keep`: each shows what it is about to do, and asks."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli import bring
from tpuswarm.cli.help import WORDS
from tpuswarm.errors import InputError

Yes = Annotated[bool, typer.Option("--yes", help="Ask nothing.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the steps, and do none. Needs no credentials.")]
Target = Annotated[str | None, typer.Argument(metavar="[FILE|NAME]", help="swarm.toml, a fleet, or a machine of it.")]
Name = Annotated[str, typer.Argument(help="A machine: its name, its number, or a beginning that only it has.")]
Fleets = Annotated[str | None, typer.Option("--fleet", help="Of this fleet or file. Default: swarm.toml here.")]


def up(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Default: swarm.toml.")] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- CMD]", help="With --type: a job on it, run again until it exits 0."),
    ] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Without a file: a TPU of this type.")] = None,
    zone: Annotated[list[str] | None, typer.Option("--zone", help="Without a file: zones in order.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Without a file: what it is called.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Without a file: cheaper, may be taken away.")] = False,
    provider: Annotated[str, typer.Option("--provider", help="Without a file: google or rehearsal.")] = "google",
    scale: Annotated[list[str] | None, typer.Option("--scale", help="POOL=N: that many from now on.")] = None,
    down_when: Annotated[
        str | None, typer.Option("--down-when", help='Without a file: "done", "idle 30m" or a date.')
    ] = None,
    paid: Annotated[bool, typer.Option("--paid", help="TPUs that no grant covers may be paid for.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Then keep it so, in the background of this computer.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Create what swarm.toml asks for, or one TPU; see it become ready. Again: what lacks."""
    from tpuswarm.cli import jobs
    from tpuswarm.fleet import asked
    from tpuswarm.fleet.file import DEFAULT

    file, command = _command(context, file, words or [])
    if command and type_ is None:
        raise InputError("-- CMD goes with --type; on a fleet, `tpuswarm exec POOL --detach -- CMD` starts a job")
    read, warnings = asked.asked(file, type_, zone or [], name, spot, provider, down_when)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if dry_run:
        wanted = asked.desired_of(read, f"{read.name}-{asked.UNNAMED}", paid, None)
        wanted = asked.named(asked.scaled(wanted, scale or []), name)
        bring.print_preview(bring.previewed(wanted, None, read.project or "PROJECT"), wanted, read.provider, keep)
        print("nothing was done; what is there already shows without --dry-run")
        return
    from tpuswarm.cli.setup import set_up_now
    from tpuswarm.cloud.keys import make_key, public_key
    from tpuswarm.fleet.keeping import fleets
    from tpuswarm.fleet.reach import Reach
    from tpuswarm.fleet.setting_up import Kept

    fleet = fleets.of_file(read)
    if read.setup:
        Kept(fleet).secrets.gather(read.setup.secrets, os.environ)
    cloud = fleet.provider()
    store = fleet.store(cloud)
    document, listing, note = fleets.look_at(fleet, store, cloud, read)
    if note:
        print(f"note: {note}", file=sys.stderr)
    before = document.desired if document else None
    make_key()
    wanted = asked.named(asked.scaled(fleets.merged(read, before, paid, public_key()), scale or []), name)
    asked.same_types(before, wanted)
    if not any(each.fleet == wanted.fleet for each in listing.machines):
        bring.preflight(cloud, read, wanted.paid)
    shown = bring.previewed(wanted, listing, cloud.project)
    bring.print_preview(shown, wanted, read.provider, keep)
    if shown.changes:
        bring.confirm(yes)
    fleets.store_wanted(fleet, store, read, wanted)
    if before is None:
        bring.label_bucket(cloud, fleet, wanted)
    if command:
        jobs.store_main(fleet, wanted.pools[0].name, command)
    if keep:
        fleets.detach(fleet, None if type_ else file or DEFAULT)
    bring.work(fleet, cloud, store, bring.is_up)
    if read.setup:
        set_up_now(Reach(fleet, cloud, store), read.setup)
    if command:
        jobs.see_begin(fleet, jobs.MAIN, kept=keep)
    if keep:
        print(f"it is kept in the background; what it does is in {fleet.log}")
    elif any(each.how == "spot" for each in wanted.pools) or wanted.down_when or wanted.budget.total:
        print("nobody keeps it from here on: `tpuswarm keep` does, `tpuswarm up --keep` in the background")


def _command(context: typer.Context, file: Path | None, words: list[str]) -> tuple[Path | None, list[str]]:
    """FILE and CMD, told apart by the `--` between them."""
    typed = context.meta[WORDS]
    after = typed[typed.index("--") + 1 :] if "--" in typed else []
    given = [*([str(file)] if file else []), *words]
    before = given[: len(given) - len(after)]
    if len(before) > 1:
        raise InputError(f"{before[1]!r} is too much: give one FILE, and a command after --")
    return Path(before[0]) if before else None, after


def down(
    target: Target = None,
    orphans: Annotated[
        str | None, typer.Option("--orphans", help="Instead what carries the id of a fleet that is lost.")
    ] = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps, and do none.")] = False,
) -> None:
    """Delete a fleet, or one machine of it, and see by listing that nothing is left that costs money."""
    from tpuswarm.fleet import asked
    from tpuswarm.fleet.keeping import fleets

    fleet, machine = bring.target_of(target)
    cloud = fleet.provider()
    store: fleets.Held = fleet.store(cloud)
    document, listing, _ = fleets.look_at(fleet, store, cloud, None)
    if orphans is not None:
        document = fleets.orphans(fleet, document, listing, orphans)
        store = fleets.Unstored(document)
    elif document is None:
        print(f"there is no fleet {fleet.name} in project {cloud.project}")
        return
    desired = document.desired
    wanted = asked.without(desired, listing, machine) if machine else replace(desired, down="its end was asked for")
    wanted = replace(wanted, revision=wanted.revision + 1)
    shown = bring.previewed(wanted, listing, cloud.project)
    bring.print_preview(shown, wanted, fleet.provider_name, kept=True, ending=True)
    if dry_run:
        print("nothing was done")
        return
    if shown.changes:
        bring.confirm(yes)
    fleets.change(store, wanted)
    bring.work(fleet, cloud, store, lambda tick: tick.converged if machine else tick.done)
    if machine:
        print("it is gone, and its pool has one machine fewer")
        return
    stays = f"; the bucket gs://{fleet.bucket} stays, with what is in it" if fleet.bucket else ""
    print(f"nothing that carries the id {desired.fleet} is left in project {cloud.project}, as its lists show{stays}")
    if orphans is None:
        fleet.forget()
        print(f"`tpuswarm up{f' {target}' if target and target.endswith('.toml') else ''}` brings it back")


def pause(name: Name, fleet: Fleets = None, yes: Yes = False) -> None:
    """Stop a machine, so that its disk alone costs money. A pod cannot stop, and spot cannot be started again."""
    _turn(name, fleet, yes, pausing=True)


def resume(name: Name, fleet: Fleets = None, yes: Yes = False) -> None:
    """Start a paused machine."""
    _turn(name, fleet, yes, pausing=False)


def keep(target: Target = None) -> None:
    """Keep a fleet as it is wanted, in the foreground: create what lacks, delete what is dead, until Ctrl-C."""
    from tpuswarm.fleet.keeping import fleets

    fleet, _ = fleets.find(target)
    cloud = fleet.provider()
    bring.work(fleet, cloud, fleet.store(cloud), lambda tick: tick.done)


def _turn(text: str, where: str | None, yes: bool, pausing: bool) -> None:
    from tpuswarm.catalog import find
    from tpuswarm.fleet.core.names import resolve
    from tpuswarm.fleet.keeping import fleets

    fleet, _ = fleets.find(where)
    cloud = fleet.provider()
    store = fleet.store(cloud)
    document, listing, _ = fleets.look_at(fleet, store, cloud, None)
    if document is None:
        raise InputError(f"there is no fleet {fleet.name} in project {cloud.project}")
    wanted = document.desired
    ours = {each.name: each for each in listing.machines if each.fleet == wanted.fleet}
    name = resolve(text, {**ours, **wanted.paused})
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
    shown = bring.previewed(wanted, listing, cloud.project)
    bring.print_preview(shown, wanted, fleet.provider_name, kept=True, ending=True)
    if shown.changes:
        bring.confirm(yes)
    fleets.change(store, wanted)
    bring.work(fleet, cloud, store, lambda tick: tick.converged)
