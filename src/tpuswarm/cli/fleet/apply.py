"""Preview a change of a fleet, ask for confirmation, and work on it until it is done."""

import asyncio
import os
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpuswarm import recipes
from tpuswarm.catalog.prices import describe_old_prices
from tpuswarm.cli.console import confirm, make_console, print_checks
from tpuswarm.cli.fleet.progress import FleetProgress, describe_machines
from tpuswarm.cli.machine.flags import update_pods
from tpuswarm.cli.machine.setup import set_up_machines, set_up_routers, start_head_keeper
from tpuswarm.cloud.errors import Denied
from tpuswarm.cloud.google.accounts import Grantee, account_address
from tpuswarm.cloud.protocol import FLEET_LABEL, Listing, Provider
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.fleet.apply.init import (
    InitStep,
    NetworkPlan,
    list_listening_steps,
    list_network_steps,
    run_listening_step,
    run_network_step,
)
from tpuswarm.fleet.apply.preview import Preview, make_preview
from tpuswarm.fleet.decide.choose_actions import make_plan
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import FleetState, Observed
from tpuswarm.fleet.decide.jobs import busy_machines
from tpuswarm.fleet.decide.traffic import Traffic
from tpuswarm.fleet.hosts.routers import RouterUpdater
from tpuswarm.fleet.hosts.routes import Routes, Snapshot
from tpuswarm.fleet.hosts.setup import SavedSetup, wait_for_ssh
from tpuswarm.fleet.keeper.head_keeper import HeadKeeper
from tpuswarm.fleet.keeper.job_runner import JobRunner, JobThread
from tpuswarm.fleet.keeper.keeper import MACHINE_VARIABLE, Keeper, Tick, rotate_log
from tpuswarm.fleet.spec import desired_from_file
from tpuswarm.fleet.spec.file import HEAD, SwarmFile
from tpuswarm.fleet.store import fleets
from tpuswarm.fleet.store.document import Document, DocumentStore
from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.fleet.store.machine_flags import check_tf_pods, is_tf_pod, outdated_pods
from tpuswarm.remote.own_key import make_key
from tpuswarm.remote.setup.table import Setup, gather_secrets
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.cloud.google.project import Project


class Confirmed(NamedTuple):
    """A change that was shown, confirmed and stored."""

    cloud: Provider
    store: DocumentStore
    desired: Desired


def preview_and_confirm(
    fleet: Fleet,
    file: SwarmFile,
    adjust: Callable[[Desired], Desired],
    paid: bool,
    yes: bool,
    keep: bool,
    print_more: Callable[[], None] = lambda: None,
    adopt: str | None = None,
    network: NetworkPlan | None = None,
) -> Confirmed:
    """Check the desired fleet, preview the steps, ask, and store it. Creates no machine yet.

    `adjust` applies the command's options, `print_more` adds to the preview; a missing `network` is made. Raises
    InputError if a check fails.
    """
    if file.setup:
        gather_secrets(SavedSetup(fleet).secrets_file, file.setup.secrets, os.environ)
    cloud = fleet.provider()
    store = fleet.store(cloud)
    document, listing, note = fleets.inspect_fleet(fleet, store, cloud, file, adopt)
    if note:
        echo(f"note: {note}", err=True)
    before = document.desired if document else None
    desired = adjust(fleets.merge_desired(file, fleet.mark, before, paid, make_key()))
    desired = desired_from_file.without_stale_pauses(desired, listing)
    if keep:
        desired = desired_from_file.with_keeper_home(desired, fleet.bucket)
    desired_from_file.require_same_types(before, desired)
    if not any(machine.fleet == desired.fleet for machine in listing.machines):
        require_checks(cloud, file, desired.paid, network)
    network_steps = _missing_network_steps(cloud, network) if network else []
    listening_steps = _missing_listening_steps(cloud, file)
    print_network_steps([*network_steps, *listening_steps])
    if document:
        check_tf_pods(replace(document, desired=desired))
    steps = preview_change(desired, listing, cloud.project, document)
    print_preview(steps, desired, file.provider, keep or desired.kept_on is not None)
    pods = outdated_pods(replace(document, desired=desired), listing.machines) if document else {}
    for name in pods:
        echo(f"{name} gets new flags: its tpu-runtime restarts, which ends programs on its TPU")
    print_more()
    if steps.steps or pods or network_steps or listening_steps:
        confirm(yes)
    if network:
        _make_network(cloud, network, network_steps)
    for step in listening_steps:
        with waiting(step.says):
            run_listening_step(step, _project_of(cloud), file)
    if document:
        Routes(fleet, cloud, store).note_new_key(document)
    fleets.store_desired(fleet, store, file, desired, before)
    if before is None:
        label_bucket(cloud, fleet, desired)
    return Confirmed(cloud, store, desired)


def _missing_network_steps(cloud: Provider, network: NetworkPlan) -> list[InitStep]:
    project = _project_of(cloud)
    steps = list_network_steps(network, project.has_network(network.network), project.rules())
    return [step for step in steps if not step.there]


def _missing_listening_steps(cloud: Provider, file: SwarmFile) -> list[InitStep]:
    if file.head is None or not file.head.listen:
        return []
    steps = list_listening_steps(file, cloud.project, _project_of(cloud).rules())
    return [step for step in steps if not step.there]


def print_network_steps(steps: Iterable[InitStep]) -> None:
    for step in steps:
        echo(f"first: {step.says}")
        print(textwrap.indent(step.line, "     "))


def _make_network(cloud: Provider, network: NetworkPlan, steps: Iterable[InitStep]) -> None:
    for step in steps:
        with waiting(step.says):
            run_network_step(step, _project_of(cloud), network)


def remove_network_and_account(cloud: Provider, fleet: Fleet, network: NetworkPlan) -> None:
    """Delete the fleet's own network with its rules, and its service account, if tpuswarm has made them."""
    project, account = _project_of(cloud), account_address(fleet.name, cloud.project)
    with waiting(f"deleting network {network.network}"):
        removed = project.remove_network(network.network, network.description)
    with waiting(f"deleting service account {account}"):
        removed += project.remove_account(Grantee(account, cloud.project, fleet.bucket))
    none = f"there is neither a network {network.network} nor a service account {account} of the fleet's own"
    echo(f"deleted {', '.join(removed)}" if removed else none)
    if fleet.bucket:
        echo(
            f"bucket gs://{fleet.bucket} stays, with all runs in it: "
            f"`gcloud storage rm --recursive gs://{fleet.bucket}` deletes it"
        )


def _project_of(cloud: Provider) -> "Project":
    from tpuswarm.cloud.google.project import Project
    from tpuswarm.cloud.google.provider import GoogleProvider

    assert isinstance(cloud, GoogleProvider)
    return Project(cloud.access)


def create_fleet(fleet: Fleet, confirmed: Confirmed, table: Setup | None, keep: bool, file: Path | None) -> None:
    """Create the machines, set them up, and start their keeper.

    The keeper starts first, in the background here, and survives later errors; then it moves to the head.
    Raises RunFailed at the end if a pod did not get its flags. `file`: the swarm.toml that the keeper reads.
    """
    cloud, store, desired = confirmed
    SavedSetup(fleet).save(table)
    if keep:
        fleets.start_background_keeper(fleet, store, file)
    run_keeper(fleet, cloud, store, is_up)
    routes = Routes(fleet, cloud, store)
    failed: list[str] = []
    with waiting("waiting until the machines accept SSH"):
        asyncio.run(wait_for_ssh(routes))
    if any(is_tf_pod(pool.spec) for pool in desired.pools):
        snapshot = routes.snapshot()
        failed = update_pods(routes, snapshot.document, snapshot.listing.machines)
    if table is not None:
        set_up_machines(routes, table)
    if any(pool.forwards for pool in desired.pools):
        set_up_routers(routes)
    if desired.kept_on is not None:
        start_head_keeper(routes, store)
    elif keep:
        with waiting("waiting for the keeper in the background"):
            fleets.wait_for_keeper(fleet, store)
    if failed:
        raise RunFailed("; ".join(failed))


def print_dry_run(
    file: SwarmFile,
    adjust: Callable[[Desired], Desired],
    paid: bool,
    keep: bool,
    print_more: Callable[[], None] = lambda: None,
    network: NetworkPlan | None = None,
) -> None:
    """Print the preview of a new fleet."""
    steps = list_network_steps(network, False, ()) if network else []
    print_network_steps([*steps, *list_listening_steps(file, file.project or "PROJECT", ())])
    desired = desired_from_file.desired_from_file(file, f"{file.name}-{desired_from_file.ID_PLACEHOLDER}", paid, None)
    desired = adjust(desired)
    if keep:
        desired = desired_from_file.with_keeper_home(desired, file.storage.bucket if file.storage else None)
    print_preview(preview_change(desired, None, file.project or "PROJECT"), desired, file.provider, keep)
    print_more()
    echo("nothing was done; a dry run does not check what exists already")


def require_checks(cloud: Provider, file: SwarmFile, paid: bool, network: NetworkPlan | None = None) -> None:
    """Run the checks before the first machine. Raises InputError if one fails, after printing how to fix it.

    `network`: will be made before the machines.
    """
    from tpuswarm.cloud.google.provider import GoogleProvider
    from tpuswarm.fleet.apply.preflight import run_checks
    from tpuswarm.fleet.apply.project_facts import collect_facts, with_network

    assert isinstance(cloud, GoogleProvider)
    with waiting("checking project, quota, zones, firewall and bucket"):
        facts = collect_facts(cloud, _project_of(cloud), file)
        facts = with_network(facts, network.network, network.rules) if network else facts
        checks = run_checks(file, facts, time.time(), paid, head_memory_bytes(file))
    for check in checks:
        if not check.known:
            echo(f"note: {check.id} {check.sentence}", err=True)
    failed = [check for check in checks if not check.ok]
    if file.provider == "rehearsal":  # nobody else reaches the local cloud, and it has no firewall
        for check in failed:
            if check.id == "firewall":
                echo(f"note: on Google Cloud this would end here: {check.sentence}", err=True)
        failed = [check for check in failed if check.id != "firewall"]
    if failed:
        print_checks(failed)
        raise InputError(
            f"{len(failed)} of {len(checks)} checks failed; nothing was created. Fix them, or run `tpuswarm init`."
        )


def head_memory_bytes(file: SwarmFile) -> float | None:
    """Return the memory that the head needs for the training; None without a training or a head."""
    if file.train is None or file.head is None:
        return None
    from tpuswarm.plan.head import count_shared_elements, head_memory_bytes
    from tpuswarm.train.user_code import build_recipe

    target, preset = recipes.find(file.train.recipe)
    recipe = build_recipe(target, {**preset, **file.train.options})
    rule = file.train.outer or recipe.defaults.get("outer", "nesterov")
    members = file.train.members or sum(pool.count for pool in file.pool)
    form: Any = file.train.quantize or "plain"
    return head_memory_bytes(
        members, count_shared_elements(recipe), form, "average" if rule == "average" else "nesterov"
    )


def label_bucket(cloud: Provider, fleet: Fleet, desired: Desired) -> None:
    """Write the fleet's id on its bucket, if this is allowed and the bucket has none."""
    if fleet.bucket is None:
        return
    try:
        _project_of(cloud).label_bucket(fleet.bucket, {FLEET_LABEL: desired.fleet})
    except Denied as error:
        echo(f"note: could not write the fleet's id on the bucket: {error}", err=True)


def preview_change(
    desired: Desired, listing: Listing | None, project: str, document: Document | None = None
) -> Preview:
    """Return the next steps toward the desired fleet. Without a listing, assume that no machine exists."""
    now = time.time()
    known = listing or Listing((), frozenset())
    observed = Observed(
        known,
        FleetState(revision=desired.revision, unused_zones=document.unused_zones if document else known.unreachable),
        traffic=document.traffic if document else Traffic(),
        busy=busy_machines(document.jobs if document else ()),
    )
    flags = (*desired.flags, *(document.flags if document else ()))
    return make_preview(desired, known, make_plan(desired, observed, now), project, now, flags)


def print_preview(steps: Preview, desired: Desired, provider: str, has_keeper: bool, is_ending: bool = False) -> None:
    """Print numbered steps, their cost, and the gcloud commands that do the same."""
    for number, step in enumerate(steps.steps, 1):
        echo(f"{number}. {step.says}{f'; {step.costs}' if step.costs else ''}", hang=3)
        print(textwrap.indent(step.line, "     "))
    for wait in steps.waits:
        echo(f"not now: {wait.subject} – {wait.why}")
    if not steps.steps:
        echo("no machine needs a change")
    if is_ending:
        return
    total = steps.free + steps.paid
    money = f"{steps.rate.hour} an hour, {steps.rate.day} a day" if steps.paid else "nothing"
    rehearsed = ", at Google's prices (a rehearsal is free)" if provider == "rehearsal" and steps.paid else ""
    echo(f"total: {total:,} machine{'s' * (total != 1)}, {steps.free:,} under grants; {money}{rehearsed}")
    if steps.paid and (old := describe_old_prices(date.today())):
        echo(f"note: {old}")
    if has_keeper:
        echo(f"keeper: {_keeper_home(desired)}")
    has_limits = desired.budget.total is not None or desired.down_when or any(grant.expires for grant in desired.grants)
    if has_limits and not has_keeper:
        echo("budget, grants and down_when apply only while a keeper runs: `tpuswarm up --keep`, or `tpuswarm keep`")


def _keeper_home(desired: Desired) -> str:
    if desired.keeper_machine:
        return f"on {desired.keeper_machine}, which gets tpuswarm, the secrets of [setup] and the synced folder"
    if any(pool.name == HEAD for pool in desired.pools):
        return "on this computer, in the background; to run it on the head, add a bucket under [storage]"
    return "on this computer, in the background"


def run_keeper(
    fleet: Fleet,
    cloud: Provider,
    store: DocumentStore,
    is_done: Callable[[Tick], bool],
    is_permanent: bool = False,
    patient: bool = False,
) -> Tick:
    """Be the keeper, or watch another one, until the fleet is done. On Ctrl-C print which machines exist.

    A permanent keeper also moves itself to the fleet's head and updates the routers. For `patient` see Keeper.run.
    """
    keeper = Keeper(cloud, store, fleet.history)
    progress = FleetProgress(make_console())
    keeper.log_line = progress.print_note

    def make_routes() -> Routes:
        return Routes(fleet, cloud, fleet.store(cloud))

    jobs = JobThread(lambda: JobRunner(make_routes(), fleet.store(cloud)), progress.print_note)
    routes = make_routes()
    head_keeper = HeadKeeper(keeper, make_routes, progress.print_note)
    routers = RouterUpdater(make_routes, progress.print_note)

    def show(tick: Tick) -> None:
        progress.show(tick)
        rotate_log(fleet.log)
        routes.refresh_ssh_config(Snapshot(tick.document, tick.observed.listing))
        if tick.leads and is_permanent:
            head_keeper.update(tick, os.environ.get(MACHINE_VARIABLE))
            routers.update(tick.document.desired, tick.observed.listing)
        if tick.leads:
            jobs.update(tick.observed.listing, tick.document)

    try:
        with progress:
            return keeper.run(show, is_done, time.sleep, patient)
    except KeyboardInterrupt:
        for line in describe_machines(keeper.current, keeper.sent):
            echo(line, err=True)
        echo("the same command continues", err=True)
        raise
    finally:
        jobs.stop()
        with suppress(TpuswarmError):  # the lease expires by itself; do not hide the first error
            keeper.release()


def is_up(tick: Tick) -> bool:
    """Return whether all machines are ready. Raises RunFailed if the rest needs a person."""
    if tick.converged:
        return True
    desired = tick.document.desired
    waits, own = tick.plan.waits, desired.own(tick.observed.machines)
    is_settled = not tick.observed.state.requests and not (tick.leads and tick.plan.actions)
    is_moving = any(machine.state not in ("ready", "stopped", "dead") for machine in own)
    alive = sum(machine.state != "dead" for machine in own)
    is_all_said = alive + sum(wait.missing for wait in waits) >= sum(pool.count for pool in desired.pools)
    is_stuck = waits and is_all_said and all(wait.until is None for wait in waits)
    if is_settled and not is_moving and is_stuck and desired.down is None:
        reasons = "; ".join(f"{wait.subject}: {wait.why}" for wait in waits)
        raise RunFailed(f"some machines cannot be created: {reasons}")
    return False


def find_fleet_or_machine(target: str | None, fleet: str | None) -> tuple[Fleet, str | None]:
    """Return the fleet that a word names, or the machine of that name in `fleet`, by default the only one."""
    if fleet is not None:
        return fleets.find_fleet(fleet)[0], target
    is_fleet = target is None or target.endswith(".toml") or "/" in target
    if is_fleet or target in {fleet.name for fleet in fleets.known_fleets()}:
        return fleets.find_fleet(target)[0], None
    return fleets.find_fleet(None)[0], target
