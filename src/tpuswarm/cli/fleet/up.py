"""`tpuswarm up`, `down`, `pause`, `resume`, `keep`: change a fleet after a preview and a confirmation."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm.catalog import find
from tpuswarm.cli.console import FleetOption, Target, Yes, confirm
from tpuswarm.cli.fleet import apply
from tpuswarm.cli.help import TYPED_WORDS
from tpuswarm.cli.machine import jobs
from tpuswarm.cli.machine.files import SizeConfirmation, send_folder, store_folder
from tpuswarm.cli.machine.job_logs import show_job_logs
from tpuswarm.cloud.google.firewall import network_tag
from tpuswarm.cloud.protocol import Listing
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.fleet.apply.init import NetworkPlan
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.names import resolve_name
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.fleet.hosts.setup import wait_for_ssh
from tpuswarm.fleet.spec import desired_from_file
from tpuswarm.fleet.spec.file import DEFAULT_FILE
from tpuswarm.fleet.store import fleets
from tpuswarm.fleet.store.document import Document, DocumentStore
from tpuswarm.remote.paths import command_line
from tpuswarm.remote.setup.table import Setup
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.directory import is_run
from tpuswarm.train.run.listing import find_run

MachineName = Annotated[
    str, typer.Argument(metavar="NAME", help="A machine: its name, its number, or a unique prefix.")
]
COMMAND_PACKAGES = ("tpuswarm[tpu]",)
"""What `up -- CMD` installs: it requires JAX with libtpu."""
DOWN_REASON = "requested by `tpuswarm down`"


def up(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Default: swarm.toml.")] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- CMD]", help="With --type: send this folder, and run CMD in it until it exits 0."),
    ] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Without a file: a TPU of this type.")] = None,
    zone: Annotated[list[str] | None, typer.Option(help="Without a file: zones in order.")] = None,
    name: Annotated[str | None, typer.Option(help="Without a file: its name.")] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Without a file: a spot TPU: cheaper, may be preempted.")
    ] = False,
    provider: Annotated[str, typer.Option(help="Without a file: google or rehearsal.")] = "google",
    project: Annotated[str | None, typer.Option(help="Without a file: the project. Default: gcloud's.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Without a file: the network. Default: default; of a pod its own, which is made.")
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="Without a file: the runtime version.")] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Without a file: metadata of the machine.")
    ] = None,
    scale: Annotated[list[str] | None, typer.Option(help="POOL=N: set the number of machines in a pool.")] = None,
    down_when: Annotated[str | None, typer.Option(help='Without a file: "done", "idle 30m" or a date.')] = None,
    paid: Annotated[
        bool, typer.Option("--paid", help="Also create TPUs that no grant covers, and pay for them.")
    ] = False,
    adopt: Annotated[
        str | None, typer.Option(help="Take over the machines of a fleet whose document is lost, by its id.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Then start a keeper: on the head, or else on this computer.")
    ] = False,
    yes: Yes = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps, do nothing. Needs no credentials.")
    ] = False,
) -> None:
    """Create the machines of swarm.toml, or one TPU, and wait until ready. Run it again to create missing ones."""
    file, command = _split_words(context, file, words or [])
    if command and type_ is None:
        raise InputError("-- CMD needs --type. To start a job on a fleet: `tpuswarm exec POOL --detach -- CMD`")
    if file is not None and not file.exists():
        _refuse_type(file)
    if type_ is None:
        if zone or name or spot or down_when or project or network or runtime or metadata:
            raise InputError(
                "--zone, --name, --spot, --project, --network, --runtime, --metadata and --down-when need --type; a "
                "fleet's file has them"
            )
        spec, warnings = desired_from_file.read_checked_file(file or DEFAULT_FILE)
        for warning in warnings:
            echo(f"warning: {warning}", err=True)
    elif file is not None:
        raise InputError("give a file or --type, not both")
    else:
        options = desired_from_file.TpuOptions(
            type_, zone or (), name, spot, provider, project, network, runtime, metadata or (), down_when,
            Setup(pip=COMMAND_PACKAGES) if command else None,
        )  # fmt: skip
        spec = desired_from_file.file_from_options(options)

    def adjust(desired: Desired) -> Desired:
        return desired_from_file.with_machine_name(desired_from_file.with_counts(desired, scale or []), name)

    def print_command() -> None:
        if command:
            packages = ", ".join(COMMAND_PACKAGES)
            echo(f"then: send this folder there, install Python and {packages}, and run")
            echo(f"     {command_line(command)}")

    own_network = spec.pool[0].network if type_ and not network else "default"

    def plan_network(project: str) -> NetworkPlan | None:
        return None if own_network == "default" else NetworkPlan(spec.name, project, own_network)

    if dry_run:
        apply.print_dry_run(spec, adjust, paid, keep, print_command, plan_network(spec.project or "PROJECT"))
        return
    fleet = fleets.fleet_of_file(spec)
    confirmation = SizeConfirmation(yes)
    if command:
        store_folder(fleet, confirmation)
    confirmed = apply.preview_and_confirm(
        fleet, spec, adjust, paid, yes, keep, print_command, adopt, plan_network(fleet.project)
    )
    desired = confirmed.desired
    if command:
        _send_folder_again(confirmed, fleet, confirmation)
        jobs.store_main_job(fleet, desired.pools[0].name, command)
    is_on_head = False
    try:
        apply.create_fleet(fleet, confirmed, spec.setup, keep, None if type_ else file or DEFAULT_FILE)
        is_on_head = desired.kept_on is not None
        if command:
            jobs.wait_until_started(fleet, jobs.MAIN_JOB, keep)
            _report_early_failure(fleet)
    finally:  # even after an error machines may exist and cost money
        if is_on_head:
            echo(f"the keeper runs on {desired.keeper_machine}; you may switch this computer off")
        elif keep:
            echo(f"the keeper runs in the background; its log is {fleet.log}")
        elif (
            any(pool.how == "spot" for pool in desired.pools) or desired.down_when or desired.budget.total
        ) and not _is_kept(fleet, confirmed.store):
            echo("no keeper runs from now on. Start one: `tpuswarm keep`, or `tpuswarm up --keep` in the background")


def _is_kept(fleet: fleets.Fleet, store: DocumentStore) -> bool:
    try:
        return jobs.has_keeper(jobs.read_document(fleet, store))
    except TpuswarmError:  # do not hide the first error
        return False


def _send_folder_again(confirmed: apply.Confirmed, fleet: fleets.Fleet, confirmation: SizeConfirmation) -> None:
    """Send the folder to a machine that exists from an earlier command; a new one gets it before the job starts."""
    listing = confirmed.cloud.machines(confirmed.desired.zones)
    if any(machine.state == "ready" for machine in confirmed.desired.own(listing.machines)):
        routes = Routes(fleet, confirmed.cloud, confirmed.store)
        asyncio.run(wait_for_ssh(routes))
        send_folder(routes, confirmed.desired.pools[0].name, confirmation)


def _report_early_failure(fleet: fleets.Fleet) -> None:
    """Watch the first minute of `up -- CMD`. Raise RunFailed if the command fails in it, after its last lines."""
    job = jobs.wait_for_first_minute(fleet)
    if failed := [part for part in job.assignments if part.phase == "failed"]:
        show_job_logs(fleet, job, follow=False)
        raise RunFailed(
            f"`{job.line}` failed: {failed[0].why}. The machine stays: give the same command again after a correction, "
            f"or `tpuswarm down {fleet.full_name}`"
        )


def _split_words(context: typer.Context, file: Path | None, words: list[str]) -> tuple[Path | None, list[str]]:
    """Return FILE and CMD, which `--` separates."""
    typed = context.meta[TYPED_WORDS]
    command = typed[typed.index("--") + 1 :] if "--" in typed else []
    given = [*([str(file)] if file else []), *words]
    before = given[: len(given) - len(command)]
    if len(before) > 1:
        raise InputError(f"unexpected argument {before[1]!r}. Give one FILE, and a command after --.")
    return Path(before[0]) if before else None, command


def _refuse_type(file: Path) -> None:
    """Raise InputError if the word in the file's place is a type of TPU."""
    try:
        type_ = find(str(file)).name
    except InputError:
        return
    raise InputError(f"{file} is a type of TPU, not a file: `tpuswarm up --type {type_}`")


def down(
    target: Annotated[
        str | None, typer.Argument(metavar="[FILE|NAME]", help="swarm.toml, a fleet, or one of its machines.")
    ] = None,
    fleet_name: FleetOption = None,
    orphans: Annotated[str | None, typer.Option(help="Delete the machines of a lost fleet, by its id.")] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Also delete the fleet's own network and service account; its bucket stays.")
    ] = False,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps, do nothing.")] = False,
) -> None:
    """Delete a fleet, or one of its machines, and check by listing that nothing is left that costs money."""
    fleet, machine = apply.find_fleet_or_machine(target, fleet_name)
    cloud = fleet.provider()
    store = fleet.store(cloud)
    document: Document | None
    if orphans is None:
        document, listing, note = fleets.inspect_fleet(fleet, store, cloud, None)
        if note:
            echo(f"note: {note}", err=True)
    else:
        store, document, listing = fleets.find_orphans(fleet, store, cloud, orphans)
    if all_ and (machine or orphans):
        raise InputError("--all is for a whole fleet")
    network = NetworkPlan(fleet.name, cloud.project, network_tag(fleet.name))
    if document is None:
        echo(f"there is no fleet {fleet.name} in project {cloud.project}")
        if all_ and not dry_run:
            confirm(yes)
            apply.remove_network_and_account(cloud, fleet, network)
        return
    before = document.desired
    if machine:
        desired = desired_from_file.without_machine(before, listing, machine)
    else:
        desired = replace(before, down=DOWN_REASON)
    desired = replace(desired, revision=desired.revision + 1)
    steps = apply.preview_change(desired, listing, cloud.project, document)
    if before.down is not None and machine is None and not steps.steps:
        echo(f"{before.fleet} is deleted already: {before.down}")
    else:
        apply.print_preview(steps, desired, fleet.provider_name, has_keeper=True, is_ending=True)
    if all_:
        stays = f"; bucket gs://{fleet.bucket} stays" if fleet.bucket else ""
        echo(
            f"then: delete network {network.network}, its firewall rules and the fleet's service account, if tpuswarm "
            f"has made them{stays}"
        )
    if dry_run:
        echo("nothing was done")
        return
    if steps.steps or all_:
        confirm(yes)
    fleets.change_desired(store, desired, before)
    apply.run_keeper(fleet, cloud, store, lambda tick: tick.converged if machine else tick.done)
    if machine:
        echo("deleted; its pool now has one machine fewer")
        return
    if all_:
        apply.remove_network_and_account(cloud, fleet, network)
    bucket = f"; its bucket gs://{fleet.bucket} stays" if fleet.bucket and not all_ else ""
    echo(f"project {cloud.project} lists nothing with the id {before.fleet} any more{bucket}")
    if orphans is None:
        fleet.forget()
        fleets.end_background_keeper(fleet)
        file = f" {target}" if target and target.endswith(".toml") else ""
        echo(f"create it again: {f'`tpuswarm init{file}`, then ' if all_ else ''}`tpuswarm up{file}`")


def pause(name: MachineName, fleet: FleetOption = None, yes: Yes = False) -> None:
    """Stop a machine, so that only its disk costs money. Pods cannot be stopped, spot machines cannot be resumed."""
    _change_paused(name, fleet, yes, pausing=True)


def resume(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A machine: its name, its number, or a unique prefix; or a run.")],
    fleet: FleetOption = None,
    yes: Yes = False,
) -> None:
    """Start a paused machine, or train an interrupted run on."""
    run = name if "://" in name else str(find_run(name))
    if "/" in name or name == "last" or is_run(Path(run)):
        program: Any = context.find_root().command
        raise typer.Exit(program(["train", "--run", run], prog_name="tpuswarm", standalone_mode=False) or 0)
    if fleet is None and not DEFAULT_FILE.exists() and not fleets.known_fleets():
        raise InputError(
            f"there is no run and no machine {name}: `tpuswarm status` lists the runs in ./runs, and this computer has "
            "made no fleet"
        )
    _change_paused(name, fleet, yes, pausing=False)


def keep(target: Target = None) -> None:
    """Run the keeper in the foreground until Ctrl-C: create missing machines, delete dead ones."""
    fleet, _ = fleets.find_fleet(target)
    cloud = fleet.provider()
    has_user = sys.stdin.isatty()
    apply.run_keeper(fleet, cloud, fleet.store(cloud), lambda tick: tick.done, is_permanent=True, patient=not has_user)


def _change_paused(text: str, target: str | None, yes: bool, pausing: bool) -> None:
    fleet, _ = fleets.find_fleet(target)
    cloud = fleet.provider()
    store = fleet.store(cloud)
    document, listing, _ = fleets.inspect_fleet(fleet, store, cloud, None)
    if document is None:
        raise InputError(f"there is no fleet {fleet.name} in project {cloud.project}")
    desired = _with_paused(document, listing, text, pausing)
    steps = apply.preview_change(desired, listing, cloud.project, document)
    apply.print_preview(steps, desired, fleet.provider_name, has_keeper=True, is_ending=True)
    if steps.steps:
        confirm(yes)
    fleets.change_desired(store, desired, document.desired)
    apply.run_keeper(fleet, cloud, store, lambda tick: tick.converged)


def _with_paused(document: Document, listing: Listing, text: str, pausing: bool) -> Desired:
    """Return the desired fleet with a machine paused or resumed. Raises InputError if that is impossible."""
    desired = document.desired
    machines = {machine.name: machine for machine in listing.machines if machine.fleet == desired.fleet}
    name = resolve_name(text, {**machines, **desired.paused})
    machine = machines.get(name)
    paused = dict(desired.paused)
    if not pausing:
        if paused.pop(name, None) is None:
            raise InputError(f"{name} is not paused")
    elif machine is None:
        raise InputError(f"{name} does not exist now")
    elif machine.spot:
        raise InputError(f"{name} is spot, so it could not be resumed. Delete it: `tpuswarm down {name}`")
    elif machine.kind == "tpu" and (hosts := find(machine.type).hosts) > 1:
        raise InputError(f"{name} is a pod of {hosts} hosts, which cannot be paused. Delete it: `tpuswarm down {name}`")
    else:
        paused[name] = machine.pool or ""
    return replace(desired, paused=paused, revision=desired.revision + 1)
