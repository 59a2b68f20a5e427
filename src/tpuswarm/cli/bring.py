"""What the commands that change a fleet have in common: show it, ask, and watch until it is done."""

import sys
import textwrap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from tpuswarm.cli.runs import make_console
from tpuswarm.errors import InputError, RunFailed

if TYPE_CHECKING:
    from tpuswarm.cloud.protocol import Listing, Provider
    from tpuswarm.fleet.core.desired import Desired
    from tpuswarm.fleet.file import SwarmFile
    from tpuswarm.fleet.keeping.fleets import Fleet, Held
    from tpuswarm.fleet.keeping.keeper import Tick
    from tpuswarm.fleet.preview import Preview


def preflight(cloud: "Provider", read: "SwarmFile", paid: bool) -> None:
    """Raises InputError, after saying how to mend it, if something is wrong before the first machine."""
    from tpuswarm.cli.init import print_checks, waiting
    from tpuswarm.cloud.google.project import Project
    from tpuswarm.cloud.google.provider import Google
    from tpuswarm.fleet.facts import collect
    from tpuswarm.fleet.preflight import checks

    assert isinstance(cloud, Google)
    with waiting(make_console(), "checking project, quota, zones, firewall and bucket"):
        found = checks(read, collect(cloud, Project(cloud.access), read), time.time(), paid)
    if wrong := [each for each in found if not each.ok]:
        print_checks(wrong)
        raise InputError(
            f"{len(wrong)} of {len(found)} checks say no: mend them, or let `tpuswarm init` do it; nothing was created"
        )


def label_bucket(cloud: "Provider", fleet: "Fleet", wanted: "Desired") -> None:
    """Write the fleet's id on its bucket, where nobody has written one; who may not is told, and goes on."""
    from tpuswarm.cloud.errors import Denied
    from tpuswarm.cloud.google.project import Project
    from tpuswarm.cloud.google.provider import Google
    from tpuswarm.cloud.protocol import FLEET_LABEL

    if fleet.bucket is None:
        return
    assert isinstance(cloud, Google)
    try:
        Project(cloud.access).label_bucket(fleet.bucket, {FLEET_LABEL: wanted.fleet})
    except Denied as error:
        print(f"note: the bucket does not carry the fleet's id: {error}", file=sys.stderr)


def previewed(wanted: "Desired", listing: "Listing | None", project: str) -> "Preview":
    """What is about to be done about these machines; None: nothing is known of any."""
    from tpuswarm.cloud.protocol import Listing
    from tpuswarm.fleet.core.memory import Memory, Observed
    from tpuswarm.fleet.core.plan import plan
    from tpuswarm.fleet.preview import preview

    now = time.time()
    known = listing or Listing((), frozenset())
    return preview(wanted, known, plan(wanted, Observed(known, Memory(revision=wanted.revision)), now), project, now)


def print_preview(shown: "Preview", wanted: "Desired", provider: str, kept: bool, ending: bool = False) -> None:
    """Numbered steps, what they cost, and the gcloud lines that do the same."""
    from rich.markup import escape

    console = make_console()
    for number, step in enumerate(shown.steps, 1):
        free = step.costs.startswith("nothing")
        price = f"; [{'green' if free else 'red'}]{escape(step.costs)}[/]" if step.costs else ""
        console.print(f"{number}. {escape(step.says)}{price}", soft_wrap=True)
        print(textwrap.indent(step.line, "     "))
    for wait in shown.waits:
        count = f"{wait.missing:,} of pool {wait.pool} " if wait.missing else f"pool {wait.pool} "
        console.print(f"[yellow]not now:[/] {escape(count)}– {escape(wait.why)}", soft_wrap=True)
    if not shown.steps:
        print("there is nothing to do")
    if ending:
        return
    total = shown.free + shown.paid
    money = f"{shown.rate.hour} an hour, {shown.rate.day} a day" if shown.paid else "nothing"
    rehearsed = ", at Google's prices: a rehearsal costs nothing" if provider == "rehearsal" and shown.paid else ""
    print(f"together: {total:,} machine{'s' * (total != 1)}, {shown.free:,} under grants; {money}{rehearsed}")
    limited = wanted.budget.total is not None or wanted.down_when or any(each.expires for each in wanted.grants)
    if limited and not kept:
        print("budget, grants and down_when hold only while a keeper lives: `tpuswarm up --keep`, or `tpuswarm keep`")


def confirm(yes: bool) -> None:
    """Ask a person; raises InputError where there is none."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError("nobody can be asked here: give --yes")
    if not typer.confirm("Proceed?"):
        raise typer.Abort


def work(fleet: "Fleet", cloud: "Provider", store: "Held", until: Callable[["Tick"], bool]) -> "Tick":
    """Be the keeper, or watch the one there is, until then; on Ctrl-C say what there is."""
    from tpuswarm.cli.watching import Watching
    from tpuswarm.fleet.keeping.jobs import Carrier, Carrying
    from tpuswarm.fleet.keeping.keeper import Keeper
    from tpuswarm.fleet.reach import Reach

    keeper = Keeper(cloud, store, fleet.history)
    watching = Watching(make_console())
    keeper.told = watching.say
    carrying = Carrying(lambda: Carrier(Reach(fleet, cloud, fleet.store(cloud)), fleet.store(cloud)), watching.say)

    def show(tick: "Tick") -> None:
        watching.show(tick)
        if tick.leads:
            carrying.look(tick.observed.listing, bool(tick.document.jobs))

    try:
        with watching:
            return keeper.run(show, until, time.sleep)
    except KeyboardInterrupt:
        for line in watching.what_exists():
            print(line, file=sys.stderr)
        print("the same command goes on from here", file=sys.stderr)
        raise
    finally:
        carrying.stop()
        keeper.release()


def is_up(tick: "Tick") -> bool:
    """Whether all is there; RunFailed where the rest needs a person."""
    if tick.converged:
        return True
    settled = not tick.plan.actions and not tick.observed.memory.asked and tick.leads
    moving = any(
        each.fleet == tick.document.desired.fleet and each.state not in ("ready", "stopped", "dead")
        for each in tick.observed.machines
    )
    hopeless = tick.plan.waits and all(each.until is None for each in tick.plan.waits)
    if settled and not moving and hopeless and tick.document.desired.down is None:
        said = "; ".join(f"{each.missing} of pool {each.pool}: {each.why}" for each in tick.plan.waits)
        raise RunFailed(f"not all of it can be had: {said}")
    return False


def target_of(target: str | None) -> "tuple[Fleet, str | None]":
    """The fleet, and the machine of it, that a word means."""
    from tpuswarm.fleet.keeping import fleets

    if target is None or target.endswith(".toml") or "/" in target:
        return fleets.find(target)[0], None
    if target in {each.name for each in fleets.known()}:
        return fleets.find(target)[0], None
    return fleets.find(None)[0], target
