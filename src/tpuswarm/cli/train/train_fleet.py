"""`tpuswarm train swarm.toml`: create a fleet's machines, and train one model on all."""

import sys
import time
from pathlib import Path

import typer

from tpuswarm.catalog import find
from tpuswarm.cli.console import make_console
from tpuswarm.cli.fleet import apply
from tpuswarm.cli.fleet.fleet_training import find_fleet_training
from tpuswarm.cli.fleet.progress import format_event
from tpuswarm.cli.machine import jobs
from tpuswarm.cli.machine.files import SizeConfirmation, send_folder, store_folder
from tpuswarm.cli.machine.setup import update_head_keeper
from tpuswarm.cli.train.batches import check_batches, read_begun, resolve_batches, with_default_batch
from tpuswarm.cli.train.fleet_data import local_paths, place_data, require_stored_data, with_data
from tpuswarm.cli.train.next_command import print_next
from tpuswarm.cli.train.train_options import check_options, make_recipe
from tpuswarm.cloud.protocol import Provider
from tpuswarm.config.train_table import Train
from tpuswarm.errors import InputError
from tpuswarm.fleet import training
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.hosts.routes import open_routes
from tpuswarm.fleet.spec import desired_from_file
from tpuswarm.fleet.spec.file import DEFAULT_FILE, HEAD, SwarmFile
from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.store.fleets import Fleet, find_fleet, fleet_of_file
from tpuswarm.remote.setup.table import Setup
from tpuswarm.swarm.views.logs import RUN, Logs
from tpuswarm.swarm.views.status import FILE, FINISHED, parse_status
from tpuswarm.train.process.stop import end_quietly
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.storage.folders import copy_folder
from tpuswarm.train.storage.record import read_file
from tpuswarm.train.storage.sync import delete_file

POLL_INTERVAL_S = 5.0
FLEET_OPTIONS = {"recipe", "yes", "paid", "detach", "dry", "accept_code"}
"""Options that the command takes for a fleet; all others belong in [train]."""


def train_on_fleet(
    context: typer.Context, path: Path, yes: bool, paid: bool, detach: bool, dry: bool, accept_code: bool
) -> None:
    """Create and set up the machines, start the jobs, and follow the run until Ctrl-C, which ends nothing."""
    _refuse_other_options(context)
    file, warnings = desired_from_file.read_checked_file(path)
    for warning in warnings:
        echo(f"warning: {warning}", err=True)
    if file.train is None:
        raise InputError(f"{path} has no [train]. Add one, or create the machines alone with `tpuswarm up`.")
    train, url = file.train, training.run_url(file)
    training.train_jobs(file)  # checks the file first, in a moment
    recipe = _make_recipe(context, path, file)
    if not dry:
        use_rehearsed_buckets(path)
        if finished := describe_finished(url, train):
            echo(finished)
            return
        require_stored_data(train.data)
    data, uploads = place_data(train, url)
    if dry:
        file = with_default_batch(file, recipe)
        check_batches(file)
    else:
        file = resolve_batches(file, url, recipe)
    file = with_data(file, data)
    train_jobs = training.train_jobs(file, accept_code)

    def print_jobs() -> None:
        for upload in uploads:
            echo(f"then: {upload.says}")
        for job in train_jobs:
            echo(f"then: {job.says}")
        echo(f"run: {url}")

    if dry:
        apply.print_dry_run(file, lambda desired: desired, paid, keep=True, print_more=print_jobs)
        return
    fleet = fleet_of_file(file)
    confirmed = apply.preview_and_confirm(
        fleet, file, lambda desired: desired, paid, yes, keep=True, print_more=print_jobs
    )
    assert file.train is not None
    needs_folder, confirmation = ".py" in train.recipe or bool(local_paths(file.train)), SizeConfirmation(yes)
    for upload in uploads:  # what can fail without a machine comes before the first
        upload.run()
    if needs_folder:
        store_folder(fleet, confirmation)
    apply.create_fleet(fleet, confirmed, file.setup or Setup(), keep=True, file=path)
    if needs_folder:
        routes = open_routes(fleet)
        send_folder(routes, "all", confirmation)
        update_head_keeper(routes)
    _start_jobs(fleet, url, train_jobs)
    if not detach:
        try:
            _follow(path, url)
            print_next(copy_folder(url), recipe)
            return
        except KeyboardInterrupt:
            end_quietly()  # the next lines say what goes on
    echo(f"the training continues. Follow it: `tpuswarm status {url}`, `tpuswarm logs -f {url}`, or this command again")
    echo(f"end it and delete all machines: {_down_command(path)}")


def describe_finished(url: str, train: Train) -> str:
    """Return a sentence about a run that has finished and needs no machines; empty if it goes on."""
    written, begun = read_file(Bucket(url).read_if_there, FILE), read_begun(url)
    if written is None or begun is None:
        return ""
    status = parse_status(written)
    is_longer = (train.tokens or 0) > status.horizon or (train.steps or 0) > begun["steps"] or train.epochs is not None
    if status.phase != FINISHED or is_longer:
        return ""
    return (
        f"{url} has finished: {status.tokens.applied:,} of {status.horizon:,} tokens counted, so no machine is needed. "
        "Train further with more steps or tokens under [train], or another run with another `run`."
    )


def _refuse_other_options(context: typer.Context) -> None:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if wrong := [*(name for name in given if name not in FLEET_OPTIONS), *context.args]:
        name = wrong[0].removeprefix("--").replace("_", "-")
        raise InputError(f"--{name} has to reach all machines: write it under [train] in the file")


def _make_recipe(context: typer.Context, path: Path, file: SwarmFile) -> Recipe:
    table = file.train
    assert table is not None
    check_options(path, table.model_dump(exclude_unset=True))
    given = {name: value for name in ("data", "seed") if (value := getattr(table, name)) is not None}
    recipe = make_recipe(table.recipe, given, dict(table.options), context)
    recipe.require_data()
    return recipe


def _start_jobs(fleet: Fleet, url: str, train_jobs: tuple[training.TrainJob, ...]) -> None:
    """Store the jobs that do not run as the file says, and wait until the head has started."""
    cloud = fleet.provider()
    for train_job in train_jobs:
        document = jobs.read_document(fleet)
        current = next((job for job in document.jobs if job.name == train_job.name), None)
        if current is not None and not current.is_over:
            if training.is_same_command(train_job.line, current.line):
                jobs.restart_failed(fleet, train_job.name)
                continue
            echo(f"restarting job {train_job.name}: the file has changed")
            end_train_jobs(fleet, [train_job.name])
            document = jobs.read_document(fleet)
        where = train_job.where
        if train_job.name == HEAD:
            delete_file(url, FILE)  # the status of an earlier head would send members away
            where = _head_worker(document, cloud, where)
        jobs.store_job(fleet, where, [train_job.line], train_job.name, "always", 0, None, cloud.machines)
    jobs.print_assignments(jobs.run_jobs_until(fleet, HEAD, jobs.has_started))


def _head_worker(document: Document, cloud: Provider, where: str) -> str:
    """Return where the head runs: in a pool of several workers, on the first machine's first worker."""
    desired = document.desired
    pool = next(pool for pool in desired.pools if pool.name == where)
    if pool.count * _count_hosts(pool.type) == 1:
        return where
    machines = cloud.machines(document.zones).machines
    names = [machine.name for machine in machines if machine.fleet == desired.fleet and machine.pool == where]
    return f"{min(names, key=by_number)}/0"


def _count_hosts(type_: str) -> int:
    try:
        return find(type_).hosts
    except InputError:
        return 1  # a VM without a TPU


def find_open_jobs(url: str) -> tuple[Fleet, list[str]] | None:
    """Return this folder's fleet and its open jobs, if a run is its training."""
    try:
        fleet, file = find_fleet(None)
        if file is None or file.train is None or training.run_url(file) != url:
            return None
    except InputError:
        return None
    document = fleet.store(fleet.provider()).load()
    train_jobs = [job for job in document.jobs if training.TOKEN_FILE in job.line] if document else []
    return fleet, [job.name for job in train_jobs if not job.is_over]


def end_train_jobs(fleet: Fleet, names: list[str]) -> None:
    """Stop jobs, so that no head comes back for a run that was stopped."""
    for job in jobs.stop_jobs(fleet, names):
        jobs.print_assignments(job, err=True)


def _follow(path: Path, url: str) -> None:
    """Show the run until it has finished: on a terminal like `status --watch`, elsewhere line by line."""
    fleet_training, console = find_fleet_training(url, path), make_console()
    assert fleet_training is not None
    if console.is_terminal:
        fleet_training.watch(console)
    else:
        logs: Logs | None = None
        printed = set(fleet_training.read_fleet()[2])
        is_finished = False
        while not is_finished:
            state = fleet_training.read()
            for event in state.events:
                if event not in printed:
                    echo(format_event(event))
            printed |= set(state.events)
            if state.run:
                logs = logs or Logs(copy_folder(url))
                for line in logs.new():
                    if line.source == RUN:
                        echo(str(line))
                is_finished = state.run.state == "finished"
            if not is_finished:
                state.require_jobs()
            sys.stdout.flush()
            if not is_finished:
                time.sleep(POLL_INTERVAL_S)
    echo(f"{url} has finished. {_down_command(path)} deletes the machines, which still cost money.")


def _down_command(file: Path) -> str:
    return f"`tpuswarm down{'' if file == DEFAULT_FILE else f' {file}'}`"
