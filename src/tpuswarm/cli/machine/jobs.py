"""`tpuswarm jobs`, and the job part of `exec --detach`, `up -- CMD` and `stop`."""

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from tpuswarm.cli.console import FleetOption, Json, Target, make_console
from tpuswarm.cloud.errors import CloudError
from tpuswarm.config.formatting import format_age
from tpuswarm.config.units import check_number, parse_seconds
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.decide.jobs import Job, create_assignments, reopen_failed
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.hosts.targets import find_targets
from tpuswarm.fleet.keeper import job_runner
from tpuswarm.fleet.keeper.keeper import LEASE_S
from tpuswarm.fleet.store.document import Document, DocumentStore, is_holder_alive, with_job
from tpuswarm.fleet.store.fleets import Fleet, find_fleet
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.paths import command_line, remote_folder
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.cloud.protocol import Listing

JOB_NAME = r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?"
MAIN_JOB = "main"
"""The job of `up -- CMD`."""
FIRST_MINUTE_S = 60.0
"""If the command of `up -- CMD` fails within this time, it is wrong and is not run again."""
STATUS_TIMEOUT_S = 10.0
"""How long to wait for a host that is only asked for the state of a job."""
KEEPER_IDLE_S = 20.0
"""After this time without a change, this command runs jobs although a keeper holds the lease."""
RESTARTS = ("preempted", "always", "never")
RESTART_HINT = "Start a keeper: `tpuswarm keep`, or `tpuswarm up --keep` in the background"


def jobs(target: Target = None, fleet_name: FleetOption = None, as_json: Json = False) -> None:
    """List the jobs of all machines: where and how long each runs, how often it failed or was lost, and why."""
    from tpuswarm.train.look.widgets import Column, make_table

    fleet, _ = find_fleet(fleet_name or target)
    document = refresh_jobs(fleet)
    if as_json:
        objects = TypeAdapter(tuple[Job, ...]).dump_python(document.jobs, mode="json", by_alias=True)
        print(json.dumps({"jobs": objects, "keeper": has_keeper(document)}))
        return
    if not document.jobs:
        echo("no jobs; start one: `tpuswarm exec WHERE --detach -- CMD`")
        return
    columns = [
        Column("job"), Column("machine"), Column("state"), Column("run", right=True, rank=4),
        Column("failed", right=True, rank=2), Column("lost", right=True, rank=3), Column("age", rank=1),
        Column("why", wraps=20),
    ]  # fmt: skip
    rows = []
    for job in document.jobs:
        for assignment in job.assignments:
            state = "ending" if job.stop and assignment.is_open else assignment.phase
            where = assignment.machine or "–"
            if assignment.machine and job.worker is not None:
                where += f"/{job.worker}"
            counts = (f"{assignment.run}", f"{assignment.failed}", f"{assignment.lost}")
            job_age = format_age(time.time() - job.at)
            rows.append((job.name, where, state, *counts, job_age, assignment.why))
    console = make_console()
    console.print(make_table(columns, rows, console.width))
    if not has_keeper(document) and any(not job.is_over for job in document.jobs):
        echo(f"no keeper runs, so no job is restarted. {RESTART_HINT}")


def read_document(fleet: Fleet, store: DocumentStore | None = None) -> Document:
    """Return a fleet's document. Raises InputError if the fleet does not exist."""
    document = (store or fleet.store(fleet.provider())).load()
    if document is None:
        raise InputError(f"there is no fleet {fleet.name} in project {fleet.project}. Create it: `tpuswarm up`")
    return document


def has_keeper(document: Document) -> bool:
    """Return whether a keeper renews its lease and, if it runs on this computer, its process lives."""
    lease = document.lease
    return lease is not None and time.time() - lease.at < LEASE_S and is_holder_alive(lease) is not False


def _job_runner(fleet: Fleet, cloud: Any) -> job_runner.JobRunner:
    return job_runner.JobRunner(Routes(fleet, cloud, fleet.store(cloud)), fleet.store(cloud))


def refresh_jobs(fleet: Fleet) -> Document:
    """Return a fleet's document. Without a keeper, ask the hosts first which jobs have ended."""
    document = read_document(fleet)
    if has_keeper(document) or all(job.is_over for job in document.jobs):
        return document
    cloud = fleet.provider()
    runner = _job_runner(fleet, cloud)

    async def check_once() -> Document | None:
        async with Connections(runner.key, STATUS_TIMEOUT_S) as connections:
            return (await runner.run_once(connections, cloud.machines(document.zones), time.time(), may_start=False))[0]

    try:
        with waiting("asking the machines for the state of their jobs"):
            return asyncio.run(check_once()) or document
    except (CloudError, RunFailed) as error:
        echo(f"warning: the state of the jobs may be old: {error}", err=True)
        return document


def find_job(name: str, fleet_name: str | None = None) -> tuple[Fleet, Job] | None:
    """Return the job of that name in a fleet, by default this folder's or the only one, and the fleet."""
    try:
        fleet, _ = find_fleet(fleet_name)
    except InputError:
        if fleet_name is not None:
            raise
        return None
    if not (fleet.folder / "fleet.json").exists():
        return None  # not created from this computer: do not call a cloud for a mere name
    document = fleet.store(fleet.provider()).load()
    if document is None or all(job.name != name for job in document.jobs):
        return None
    return fleet, next(job for job in refresh_jobs(fleet).jobs if job.name == name)


def start_job(
    where: str,
    words: list[str],
    name: str | None,
    restart: str | None,
    failures: int,
    alive_for: str | None,
    target: str | None,
) -> None:
    """Store a job for the keeper, and wait until it runs."""
    if restart not in (None, *RESTARTS):
        raise InputError(f"--restart is one of {', '.join(RESTARTS)}, not {restart!r}")
    if name is not None and not re.fullmatch(JOB_NAME, name):
        raise InputError(
            f"--name is at most 30 lower-case letters, digits and dashes, and starts with a letter, not {name!r}"
        )
    check_number(failures, "--failures", least=0)
    alive_s = None if alive_for is None else parse_seconds(alive_for, "--alive-for")
    if alive_s is not None:
        check_number(alive_s, "--alive-for", least=1)
    fleet, _ = find_fleet(target)
    open_routes(fleet).snapshot()  # registers this computer's key with the machines
    if name is not None and any(job.name == name and not job.is_over for job in read_document(fleet).jobs):
        refresh_jobs(fleet)  # it may have ended
    job = store_job(fleet, where, words, name, restart, failures, alive_s, fleet.provider().machines)
    echo(f"stored job {job.name}: `{job.line}`", err=True)
    wait_until_started(fleet, job.name)


def store_job(
    fleet: Fleet, where: str, words: list[str], name: str | None, restart: str | None, failures: int,
    alive_s: float | None, list_machines: "Callable[[Iterable[str]], Listing] | None", min_run_s: float = 0.0,
) -> Job:  # fmt: skip
    """Store a job that runs from now on. Raises InputError if its name is taken or its machine does not exist."""
    stored: list[Job] = []

    def add(document: Document | None) -> Document:
        if document is None:
            raise InputError(f"there is no fleet {fleet.name} in project {fleet.project}. Create it: `tpuswarm up`")
        desired = document.desired
        machine = worker = None
        if where != ALL and where not in [pool.name for pool in desired.pools]:
            assert list_machines is not None
            target = find_targets(where, desired, list_machines(document.zones)).targets[0]
            machine = target.machine
            worker = target.worker if "/" in where else None
        taken = {job.name: job for job in document.jobs}
        job_name = name or next(f"job-{number}" for number in range(1, 10_000) if f"job-{number}" not in taken)
        if job_name in taken and not taken[job_name].is_over:
            raise InputError(
                f"job {job_name} has not ended. Stop it with `tpuswarm stop {job_name}`, or use another --name."
            )
        last_run = document.last_run  # hosts remember numbers of runs, so they only grow
        if job_name in taken:
            last_run = max((assignment.run for assignment in taken[job_name].assignments), default=0)
        new = create_assignments(where, machine, desired)
        assignments = tuple(replace(assignment, run=last_run) for assignment in new)
        job = Job(
            job_name, where, command_line(words), restart or "preempted", assignments, remote_folder(Path.cwd()),  # type: ignore[arg-type]
            machine.name if machine else None, worker, failures, alive_s, time.time(), min_run_s=min_run_s,
        )  # fmt: skip
        stored[:] = [job]
        return with_job(document, job)

    fleet.store(fleet.provider()).change(add)
    return stored[0]


def store_main_job(fleet: Fleet, pool: str, words: list[str]) -> None:
    """Store the command of `up -- CMD`, which runs until it exits 0. The same command continues."""
    current = next((job for job in read_document(fleet).jobs if job.name == MAIN_JOB), None)
    if current is None or current.is_over or current.line != command_line(words):
        store_job(fleet, pool, words, MAIN_JOB, "always", 0, None, None, FIRST_MINUTE_S)


def wait_for_first_minute(fleet: Fleet) -> Job:
    """Wait until the job of `up -- CMD` has run for a minute, or has ended; return it."""
    deadline = math.inf

    def is_past(job: Job) -> bool:
        nonlocal deadline
        if has_started(job):
            deadline = min(deadline, time.monotonic() + FIRST_MINUTE_S)
        return job.is_over or time.monotonic() > deadline

    with survives_interrupt(MAIN_JOB):
        return run_jobs_until(fleet, MAIN_JOB, is_past)


def wait_until_started(fleet: Fleet, name: str, keep: bool = False) -> None:
    """Wait until a job runs, or has ended, on all its machines. `keep`: a keeper has just been started."""
    with survives_interrupt(name):
        run_jobs_until(fleet, name, has_started)
    document = read_document(fleet)
    job = next(job for job in document.jobs if job.name == name)
    print_assignments(job, err=True)
    if not has_keeper(document) and not keep and job.restart != "never":
        echo(f"no keeper runs, so it is not restarted. {RESTART_HINT}", err=True)
    echo(f"follow it: `tpuswarm logs {name} -f`; stop it: `tpuswarm stop {name}`", err=True)


def has_started(job: Job) -> bool:
    return all(assignment.phase != "waiting" for assignment in job.assignments)


def print_assignments(job: Job, err: bool = False) -> None:
    for assignment in job.assignments:
        place = assignment.machine or assignment.pool
        echo(f"{job.name} on {place}: {assignment.phase}, {assignment.why}", err=err)


@contextmanager
def survives_interrupt(name: str) -> Iterator[None]:
    """On Ctrl-C, say that the job still runs."""
    try:
        yield
    except KeyboardInterrupt:
        echo(f"job {name} still runs; stop it: `tpuswarm stop {name}`", err=True)
        raise


def run_jobs_until(fleet: Fleet, name: str, is_reached: Callable[[Job], bool]) -> Job:
    """Run a fleet's jobs, or watch its keeper run them, until a job reaches a state."""
    cloud = fleet.provider()
    store = fleet.store(cloud)
    runner = _job_runner(fleet, cloud)

    async def run() -> Job:
        before, changed_at = None, time.monotonic()
        async with Connections(runner.key) as connections:
            while True:
                document: Document | None = await asyncio.to_thread(read_document, fleet, store)
                assert document is not None
                if document.jobs != before:
                    before, changed_at = document.jobs, time.monotonic()
                # Leave the work to a keeper, unless it does nothing. Doing it twice is harmless.
                if not has_keeper(document) or time.monotonic() - changed_at > KEEPER_IDLE_S:
                    listing = await asyncio.to_thread(cloud.machines, document.zones)
                    document, _ = await runner.run_once(connections, listing, time.time())
                job = next((job for job in document.jobs if job.name == name), None) if document else None
                if job is None:
                    raise RunFailed(f"job {name} was deleted by another command")
                if is_reached(job):
                    return job
                if document and document.desired.down is not None:
                    raise RunFailed(f"fleet {fleet.name} is being deleted with its jobs ({document.desired.down})")
                open_parts = [part for part in job.assignments if part.is_open]
                show_progress("; ".join(f"{part.machine or part.pool}: {part.why}" for part in open_parts))
                await asyncio.sleep(job_runner.BUSY_INTERVAL_S)

    with waiting(f"waiting for job {name}") as show_progress:
        return asyncio.run(run())


def stop_job(fleet: Fleet, job: Job) -> None:
    """Stop a job on all its machines, and wait until it has ended."""
    if job.is_over:
        raise InputError(f"job {job.name} has ended: {', '.join(sorted({part.phase for part in job.assignments}))}")
    echo(f"stopping job {job.name}; it is killed after 20 s", err=True)
    for ended in stop_jobs(fleet, [job.name]):
        print_assignments(ended)


def restart_failed(fleet: Fleet, name: str) -> None:
    """Let a job run again on the machines where it failed."""

    def reopen(document: Document | None) -> Document:
        if document is None:
            raise RunFailed(f"fleet {fleet.name} was deleted")
        return replace(document, jobs=tuple(reopen_failed(it) if it.name == name else it for it in document.jobs))

    fleet.store(fleet.provider()).change(reopen)


def stop_jobs(fleet: Fleet, names: list[str]) -> list[Job]:
    """Stop jobs everywhere, wait for their ends, and return them."""

    def request_stop(document: Document | None) -> Document:
        if document is None:
            raise RunFailed(f"fleet {fleet.name} was deleted")
        return replace(document, jobs=tuple(replace(job, stop=job.stop or job.name in names) for job in document.jobs))

    fleet.store(fleet.provider()).change(request_stop)
    return [run_jobs_until(fleet, name, lambda job: job.is_over) for name in names]
