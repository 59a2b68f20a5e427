"""`tpuswarm train swarm.toml`: its machines, what they need, and one model on all of them; again: it goes on."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.fleet.spec.file import SwarmFile
    from tpuswarm.fleet.store.fleets import Fleet
    from tpuswarm.fleet.training import TrainJob

LOOK = 5.0
"""Seconds between two looks at the run."""
ITS_OWN = {"recipe", "yes", "paid", "detach", "dry", "accept_code"}
"""Options that such a command takes; all others stand in [train]."""


def train(
    context: typer.Context, path: Path, yes: bool, paid: bool, detach: bool, dry: bool, accept_code: bool
) -> None:
    """All of it: preview, machines, set-up, jobs; then the run is followed until Ctrl-C, which ends nothing."""
    from tpuswarm.cli.fleet import apply
    from tpuswarm.cli.train.auto_batch import with_batch
    from tpuswarm.fleet import training
    from tpuswarm.fleet.spec import desired_from_file
    from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
    from tpuswarm.fleet.store import fleets

    _only_its_own(context)
    read, warnings = desired_from_file.file_or_options(path, None, [], None, False, "google")
    for warning in warnings:
        say(f"warning: {warning}", err=True)
    if read.train is None:
        raise InputError(f"{path} has no [train], so it does not say what is trained; `tpuswarm up` only rents")
    url, jobs = training.run_url(read), training.train_jobs(read, accept_code)
    _check_recipe(context, path, read)
    if not dry:
        use_rehearsed_buckets(path)
        read = with_batch(read, url)
        jobs = training.train_jobs(read, accept_code)

    def say_jobs() -> None:
        for each in jobs:
            say(f"then: {each.says}")
        say(f"the run is {url}")

    if dry:
        apply.dry_run(read, lambda wanted: wanted, paid, keep=True, also=say_jobs)
        return
    fleet = fleets.fleet_of_file(read)
    _bring_up(fleet, path, read, yes, paid, say_jobs)
    _start_jobs(fleet, url, jobs)
    if detach:
        _say_back(url)
        return
    try:
        _follow(path, url)
    except KeyboardInterrupt:
        _say_back(url)


def _only_its_own(context: typer.Context) -> None:
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if wrong := [*(name for name in given if name not in ITS_OWN), *context.args]:
        name = wrong[0].removeprefix("--").replace("_", "-")
        raise InputError(f"--{name} stands in [train] of a file with machines: all of them have to know it")


def _check_recipe(context: typer.Context, path: Path, read: "SwarmFile") -> None:
    """A wrong recipe is found here, before anything is rented."""
    from tpuswarm.cli.train.recipe import make_recipe
    from tpuswarm.cli.train.train_options import check_options

    assert read.train is not None
    table = read.train
    check_options(path, table.model_dump(exclude_unset=True))
    given = {name: value for name in ("data", "seed") if (value := getattr(table, name)) is not None}
    make_recipe(table.recipe, given, dict(table.options), context)


def _bring_up(
    fleet: "Fleet", path: Path, read: "SwarmFile", yes: bool, paid: bool, say_jobs: Callable[[], None]
) -> None:
    """As `up --keep` does, and where the recipe or its data lie here, with this folder."""
    from tpuswarm.cli.fleet import apply
    from tpuswarm.cli.machine.files import sync
    from tpuswarm.remote.setup.table import Setup

    agreed = apply.agree(fleet, read, lambda wanted: wanted, paid, yes, keep=True, also=say_jobs)
    apply.bring_up(fleet, agreed, read.setup or Setup(), keep=True, file=path)
    assert read.train is not None
    local = read.train.data is not None and Path(read.train.data).exists()
    if ".py" in read.train.recipe or local:
        sync("all", str(path), yes, False)


def _start_jobs(fleet: "Fleet", url: str, jobs: "tuple[TrainJob, ...]") -> None:
    """Store those that do not run, and those that are not what the file says any more, and see the head begin."""
    from tpuswarm.cli.machine.jobs import carry, read, store_job
    from tpuswarm.fleet.decide.desired import Desired
    from tpuswarm.fleet.decide.names import by_number
    from tpuswarm.fleet.spec.file import HEAD
    from tpuswarm.fleet.training import is_same_command
    from tpuswarm.swarm.views.status import FILE
    from tpuswarm.train.storage.sync import delete_file

    cloud = fleet.provider()
    for each in jobs:
        document = read(fleet)
        there = next((job for job in document.jobs if job.name == each.name), None)
        if there is not None and not there.is_over:
            if is_same_command(each.line, there.line):
                continue
            say(f"job {each.name} is not what the file says now: it is ended, and begins anew")
            end_jobs(fleet, [each.name])
            document = read(fleet)
        if each.name == HEAD:  # what an earlier head has said last would send members away
            delete_file(url, FILE)
        where = each.where
        desired: Desired = document.desired
        pool = next(one for one in desired.pools if one.name == where)
        if each.name == HEAD and pool.count * _hosts(pool.type) > 1:
            ours = [one for one in cloud.machines(document.zones).machines if one.fleet == desired.fleet]
            names = sorted((one.name for one in ours if one.pool == where), key=by_number)
            where = f"{names[0]}/0"
        store_job(fleet, where, [each.line], each.name, "always", 0, None, cloud.machines)
    job = carry(fleet, HEAD, lambda one: all(seat.phase != "waiting" for seat in one.assignments))
    for seat in job.assignments:
        say(f"head: {seat.phase}, {seat.why}")


def _hosts(type_: str) -> int:
    from tpuswarm.catalog import find

    try:
        return find(type_).hosts
    except InputError:
        return 1  # a plain VM


def open_jobs(url: str) -> "tuple[Fleet, list[str]] | None":
    """The fleet of this folder and its jobs that are not over, where a run is its training; None: it is not."""
    from tpuswarm.fleet import training
    from tpuswarm.fleet.store import fleets

    try:
        fleet, read = fleets.find_fleet(None)
        if read is None or read.train is None or training.run_url(read) != url:
            return None
    except InputError:
        return None
    document = fleet.store(fleet.provider()).load()
    jobs = document.jobs if document else ()
    return fleet, [each.name for each in jobs if training.TOKEN_FILE in each.line and not each.is_over]


def end_jobs(fleet: "Fleet", names: list[str]) -> None:
    """End jobs everywhere: a run that was stopped is trained by nobody, and its head does not come back."""
    from tpuswarm.cli.machine.jobs import carry
    from tpuswarm.fleet.store.document import Document

    def ask(found: Document | None) -> Document:
        assert found is not None
        return replace(found, jobs=tuple(replace(each, stop=each.stop or each.name in names) for each in found.jobs))

    fleet.store(fleet.provider()).change(ask)
    for name in names:
        for seat in carry(fleet, name, lambda each: each.is_over).assignments:
            say(f"{name} on {seat.machine or seat.pool}: {seat.phase}, {seat.why}", err=True)


def _follow(path: Path, url: str) -> None:
    """Show what happens until the run is finished: on a terminal as `status --watch` does, else a line each."""
    from tpuswarm.cli.console import make_console
    from tpuswarm.cli.fleet.progress import event_line
    from tpuswarm.cli.fleet.training_view import training_here
    from tpuswarm.swarm.views.logs import RUN, Logs
    from tpuswarm.train.storage.folders import folder_of

    training, console = training_here(url, path), make_console()
    assert training is not None
    if console.is_terminal:
        training.watch(console)
        say(f"{url} is finished; `tpuswarm down` ends what costs money")
        return
    logs: Logs | None = None
    told = set(training.read()[2])
    while True:
        seen = training.see()
        for event in seen.events:
            if event not in told:
                say(event_line(event))
        told |= set(seen.events)
        if seen.look:
            logs = logs or Logs(folder_of(url))
            for line in logs.new():
                if line.source == RUN:
                    say(str(line))
        sys.stdout.flush()
        if seen.look and seen.look.state == "finished":
            say(f"{url} is finished; `tpuswarm down` ends what costs money")
            return
        time.sleep(LOOK)


def _say_back(url: str) -> None:
    say(f"the training goes on without this terminal: `tpuswarm status {url}`, `tpuswarm logs -f {url}`")
    say("the same command comes back to it; `tpuswarm down` ends it and all machines")
