"""What the commands that change a fleet have in common: show it, ask, and watch until it is done."""

import os
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpuswarm.cli.console import confirm, make_console, print_checks
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.cloud.protocol import Listing, Provider
    from tpuswarm.fleet.apply.preview import Preview
    from tpuswarm.fleet.decide.desired import Desired
    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.fleet.keeper.keeper import Tick
    from tpuswarm.fleet.spec.file import SwarmFile
    from tpuswarm.fleet.store.document import Document, DocumentStore
    from tpuswarm.fleet.store.fleets import Fleet, Store
    from tpuswarm.remote.setup.table import Setup


class Agreed(NamedTuple):
    """What was shown, agreed to and stored."""

    cloud: "Provider"
    store: "DocumentStore"
    wanted: "Desired"


def agree(
    fleet: "Fleet",
    read: "SwarmFile",
    make: "Callable[[Desired], Desired]",
    paid: bool,
    yes: bool,
    keep: bool,
    also: Callable[[], None] = lambda: None,
    adopt: str | None = None,
) -> Agreed:
    """Look at what there is, check, show, ask, and store what is wanted from now on; nothing is created yet.

    make: changes what the file wants, as options of the command say; also: says what else it will do; paid, adopt: see
    `up`. Raises InputError where something speaks against it.
    """
    from tpuswarm.cloud.keys import make_key, public_key
    from tpuswarm.fleet.hosts.setup import SavedSetup
    from tpuswarm.fleet.spec import desired_from_file
    from tpuswarm.fleet.store import fleets
    from tpuswarm.fleet.store.machine_flags import outdated_pods

    if read.setup:
        SavedSetup(fleet).secrets.gather(read.setup.secrets, os.environ)
    cloud = fleet.provider()
    store = fleet.store(cloud)
    document, listing, note = fleets.inspect_fleet(fleet, store, cloud, read, adopt)
    if note:
        say(f"note: {note}", err=True)
    before = document.desired if document else None
    make_key()
    wanted = make(fleets.merge_desired(read, fleet.mark, before, paid, public_key()))
    if keep:
        wanted = desired_from_file.with_keeper_home(wanted, fleet.bucket)
    desired_from_file.require_same_types(before, wanted)
    if not any(each.fleet == wanted.fleet for each in listing.machines):
        preflight(cloud, read, wanted.paid)
    shown = previewed(wanted, listing, cloud.project, document)
    print_preview(shown, wanted, read.provider, keep or wanted.kept_on is not None)
    pods = outdated_pods(replace(document, desired=wanted), listing.machines) if document else {}
    for name in pods:
        say(f"{name} gets other flags, and its tpu-runtime begins anew: what runs on it ends")
    also()
    if shown.steps or pods:
        confirm(yes)
    fleets.store_desired(fleet, store, read, wanted, before)
    if before is None:
        label_bucket(cloud, fleet, wanted)
    return Agreed(cloud, store, wanted)


def bring_up(fleet: "Fleet", agreed: Agreed, table: "Setup | None", keep: bool, file: Path | None) -> "Routes":
    """Make what was agreed to: machines, what they need, the fleet's routers, and who keeps them; the way to them.

    What is kept has its keeper first, in the background of this computer: whatever then goes wrong here, that one goes
    on, and puts a keeper on the head. file: swarm.toml, for it; None: the fleet has none. Raises RunFailed at the end
    where a pod could not be given its flags.
    """
    from tpuswarm.cli.machine.flags import tell_pods
    from tpuswarm.cli.machine.setup import route_now, seat_now, set_up_now
    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.fleet.hosts.setup import SavedSetup
    from tpuswarm.fleet.store import fleets
    from tpuswarm.fleet.store.machine_flags import is_tf_pod
    from tpuswarm.train.process.waiting import waiting

    cloud, store, wanted = agreed
    SavedSetup(fleet).save(table)
    if keep:
        fleets.start_background_keeper(fleet, store, file)
    work(fleet, cloud, store, is_up)
    routes = Routes(fleet, cloud, store)
    failed: list[str] = []
    if any(is_tf_pod(each.spec) for each in wanted.pools):
        seen = routes.snapshot()
        failed = tell_pods(routes, seen.document, seen.listing.machines)
    if table is not None:
        set_up_now(routes, table)
    if any(each.routes for each in wanted.pools):
        route_now(routes)
    if wanted.kept_on is not None:
        seat_now(routes, store)
    elif keep:
        with waiting("waiting until the keeper in the background leads"):
            fleets.wait_for_keeper(fleet, store)
    if failed:  # all else is done
        raise RunFailed("; ".join(failed))
    return routes


def dry_run(
    read: "SwarmFile",
    make: "Callable[[Desired], Desired]",
    paid: bool,
    keep: bool,
    also: Callable[[], None] = lambda: None,
) -> None:
    """Show what `agree` would where nothing is there yet."""
    from tpuswarm.fleet.spec import desired_from_file

    wanted = make(
        desired_from_file.desired_from_file(read, f"{read.name}-{desired_from_file.ID_PLACEHOLDER}", paid, None)
    )
    if keep:
        wanted = desired_from_file.with_keeper_home(wanted, read.storage.bucket if read.storage else None)
    print_preview(previewed(wanted, None, read.project or "PROJECT"), wanted, read.provider, keep)
    also()
    say("nothing was done; a dry run does not look at what exists already")


def preflight(cloud: "Provider", read: "SwarmFile", paid: bool) -> None:
    """Raises InputError, after saying how to mend it, if something is wrong before the first machine."""
    from tpuswarm.cloud.google.project import Project
    from tpuswarm.cloud.google.provider import Google
    from tpuswarm.fleet.apply.preflight import run_checks
    from tpuswarm.fleet.apply.project_facts import collect_facts
    from tpuswarm.train.process.waiting import waiting

    assert isinstance(cloud, Google)
    with waiting("checking project, quota, zones, firewall and bucket"):
        facts = collect_facts(cloud, Project(cloud.access), read)
        found = run_checks(read, facts, time.time(), paid, head_bytes(read))
    for each in found:
        if not each.known:
            say(f"note: {each.id} {each.sentence}", err=True)
    if wrong := [each for each in found if not each.ok]:
        print_checks(wrong)
        raise InputError(
            f"{len(wrong)} of {len(found)} checks say no: mend them, or let `tpuswarm init` do it; nothing was created"
        )


def head_bytes(read: "SwarmFile") -> float | None:
    """Memory that the head needs for what is trained; None: nothing is, or there is no head."""
    if read.train is None or read.head is None:
        return None
    from tpuswarm import recipes
    from tpuswarm.plan.head import elements_of, memory_bytes
    from tpuswarm.train.user_code import build_recipe

    target, preset = recipes.find(read.train.recipe)
    recipe = build_recipe(target, {**preset, **read.train.options})
    rule = read.train.outer or recipe.defaults.get("outer", "nesterov")
    members = read.train.members or sum(each.count for each in read.pool)
    form: Any = read.train.quantize or "plain"
    return memory_bytes(members, elements_of(recipe), form, "average" if rule == "average" else "nesterov")


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
        say(f"note: the bucket does not carry the fleet's id: {error}", err=True)


def previewed(
    wanted: "Desired", listing: "Listing | None", project: str, document: "Document | None" = None
) -> "Preview":
    """What is about to be done about these machines; None: nothing is known of any. `document`: the fleet's so far."""
    from tpuswarm.cloud.protocol import Listing
    from tpuswarm.fleet.apply.preview import make_preview
    from tpuswarm.fleet.decide.jobs import busy_machines
    from tpuswarm.fleet.decide.plan import make_plan
    from tpuswarm.fleet.decide.state import FleetState, Observed
    from tpuswarm.fleet.decide.traffic import Traffic

    now = time.time()
    known = listing or Listing((), frozenset())
    observed = Observed(
        known,
        FleetState(revision=wanted.revision),
        traffic=document.traffic if document else Traffic(),
        busy=busy_machines(document.jobs if document else ()),
    )
    return make_preview(wanted, known, make_plan(wanted, observed, now), project, now)


def print_preview(shown: "Preview", wanted: "Desired", provider: str, kept: bool, ending: bool = False) -> None:
    """Numbered steps, what they cost, and the gcloud lines that do the same."""
    for number, step in enumerate(shown.steps, 1):
        say(f"{number}. {step.says}{f'; {step.costs}' if step.costs else ''}", hang=3)
        print(textwrap.indent(step.line, "     "))
    for wait in shown.waits:
        say(f"not now: {wait.subject} – {wait.why}")
    if not shown.steps:
        say("there is nothing to do")
    if ending:
        return
    total = shown.free + shown.paid
    money = f"{shown.rate.hour} an hour, {shown.rate.day} a day" if shown.paid else "nothing"
    rehearsed = ", at Google's prices: a rehearsal costs nothing" if provider == "rehearsal" and shown.paid else ""
    say(f"together: {total:,} machine{'s' * (total != 1)}, {shown.free:,} under grants; {money}{rehearsed}")
    if kept:
        say(f"kept by {_home(wanted)}")
    limited = wanted.budget.total is not None or wanted.down_when or any(each.expires for each in wanted.grants)
    if limited and not kept:
        say("budget, grants and down_when hold only while a keeper lives: `tpuswarm up --keep`, or `tpuswarm keep`")


def _home(wanted: "Desired") -> str:
    from tpuswarm.fleet.spec.file import HEAD

    if wanted.keeper_machine:
        return f"{wanted.keeper_machine}: tpuswarm goes there, with the secrets of [setup] and the synced folder"
    if any(each.name == HEAD for each in wanted.pools):
        return "this computer, in the background: a keeper on the head needs a bucket under [storage]"
    return "this computer, in the background"


def work(
    fleet: "Fleet",
    cloud: "Provider",
    store: "Store",
    until: Callable[["Tick"], bool],
    stays: bool = False,
    patient: bool = False,
) -> "Tick":
    """Be the keeper, or watch the one there is, until then; on Ctrl-C say what there is.

    stays: as a keeper that outlives what it makes now: leave it to one on the fleet's head, where it is to live there,
    and lead routers to what comes later; patient: see Keeper.run.
    """
    from tpuswarm.cli.fleet.progress import Watching
    from tpuswarm.fleet.hosts.routers import RouterUpdater
    from tpuswarm.fleet.hosts.routes import Routes, Snapshot
    from tpuswarm.fleet.keeper.head_keeper import HeadKeeper
    from tpuswarm.fleet.keeper.job_runner import JobRunner, JobThread
    from tpuswarm.fleet.keeper.keeper import MACHINE_VARIABLE, Keeper, rotate_log

    keeper = Keeper(cloud, store, fleet.history)
    watching = Watching(make_console())
    keeper.log_line = watching.say

    def make_routes() -> Routes:
        return Routes(fleet, cloud, fleet.store(cloud))

    routes = make_routes()
    job_thread = JobThread(lambda: JobRunner(make_routes(), fleet.store(cloud)), watching.say)
    head_keeper = HeadKeeper(keeper, make_routes, watching.say)
    router_updater = RouterUpdater(make_routes, watching.say)

    def show(tick: "Tick") -> None:
        watching.show(tick)
        rotate_log(fleet.log)
        routes.refresh_ssh_config(Snapshot(tick.document, tick.observed.listing))
        if tick.leads and stays:
            head_keeper.update(tick, os.environ.get(MACHINE_VARIABLE))
            router_updater.update(tick.document.desired, tick.observed.listing)
        if tick.leads:
            job_thread.update(tick.observed.listing, tick.document)

    try:
        with watching:
            return keeper.run(show, until, time.sleep, patient)
    except KeyboardInterrupt:
        for line in watching.what_exists():
            say(line, err=True)
        say("the same command goes on from here", err=True)
        raise
    finally:
        job_thread.stop()
        with suppress(TpuswarmError):  # else it ends by itself after a minute; what ended this command is to be seen
            keeper.release()


def is_up(tick: "Tick") -> bool:
    """Whether all is there; RunFailed where the rest needs a person."""
    if tick.converged:
        return True
    settled = not tick.plan.actions and not tick.observed.state.requests
    moving = any(
        each.fleet == tick.document.desired.fleet and each.state not in ("ready", "stopped", "dead")
        for each in tick.observed.machines
    )
    hopeless = tick.plan.waits and all(each.until is None for each in tick.plan.waits)
    if settled and not moving and hopeless and tick.document.desired.down is None:
        said = "; ".join(f"{each.subject}: {each.why}" for each in tick.plan.waits)
        raise RunFailed(f"not all of it can be had: {said}")
    return False


def target_of(target: str | None) -> "tuple[Fleet, str | None]":
    """The fleet, and the machine of it, that a word means."""
    from tpuswarm.fleet.store import fleets

    if target is None or target.endswith(".toml") or "/" in target:
        return fleets.find_fleet(target)[0], None
    if target in {each.name for each in fleets.known_fleets()}:
        return fleets.find_fleet(target)[0], None
    return fleets.find_fleet(None)[0], target
