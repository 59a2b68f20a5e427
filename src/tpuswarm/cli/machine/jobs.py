"""`tpuswarm jobs`, and what `exec --detach`, `logs` and `stop` do with jobs: programs that go on without us."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpuswarm.cli.console import Json, Target, make_console
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.cloud.protocol import Listing
    from tpuswarm.fleet.decide.jobs import Job
    from tpuswarm.fleet.store.document import Document
    from tpuswarm.fleet.store.fleets import Fleet, Store

NAME = r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?"
MAIN = "main"
"""What the job of `up -- CMD` is called."""
ASKED_S = 10.0
"""Seconds in which a host has to let us in that is only asked how a job stands."""
IDLE_S = 20.0
"""Seconds in which a keeper should have done something about a job."""
LOOK = 1.0
"""Seconds between two looks at a job that is followed or ended."""
RESTARTS = ("preempted", "always", "never")


def jobs(target: Target = None, as_json: Json = False) -> None:
    """List the jobs of all machines: where each runs, since when, how often it failed or was lost, and why."""
    from pydantic import TypeAdapter

    from tpuswarm.config.formatting import format_age
    from tpuswarm.fleet.decide.jobs import Job
    from tpuswarm.fleet.store import fleets

    fleet, _ = fleets.find_fleet(target)
    document = notice(fleet)
    if as_json:
        jobs = TypeAdapter(tuple[Job, ...]).dump_python(document.jobs, mode="json", by_alias=True)
        print(json.dumps({"jobs": jobs, "keeper": is_kept(document)}))
        return
    if not document.jobs:
        say("there are no jobs: `tpuswarm exec WHERE --detach -- CMD` starts one")
        return
    from tpuswarm.train.look.live import Column, table

    columns = [
        Column("job"),
        Column("machine"),
        Column("state"),
        Column("run", right=True, rank=3),
        Column("failed", right=True, rank=1),
        Column("lost", right=True, rank=2),
        Column("age"),
        Column("why", wraps=20),
    ]
    rows = []
    for job in document.jobs:
        for seat in job.assignments:
            state = "ending" if job.stop and seat.phase in ("waiting", "running") else seat.phase
            where = "–" if seat.machine is None else seat.machine + (f"/{job.worker}" if job.worker is not None else "")
            since = format_age(time.time() - job.at)
            rows.append((job.name, where, state, f"{seat.run}", f"{seat.failed}", f"{seat.lost}", since, seat.why))
    console = make_console()
    console.print(table(columns, rows, console.width))
    if not is_kept(document) and any(not job.is_over for job in document.jobs):
        say("nobody keeps the fleet: what ends is not started again until `tpuswarm keep`, or `tpuswarm up --keep`")


def read(fleet: "Fleet", store: "Store | None" = None) -> "Document":
    """A fleet's document, by the store of whoever looks again and again. Raises InputError where there is none."""
    document = (store or fleet.store(fleet.provider())).load()
    if document is None:
        raise InputError(f"there is no fleet {fleet.name} in project {fleet.project}: `tpuswarm up` makes it")
    return document


def is_kept(document: "Document") -> bool:
    """Whether a keeper leads, as far as can be told from here: it renews its lease, and its process lives."""
    from tpuswarm.fleet.keeper.keeper import LEASE_S
    from tpuswarm.fleet.store.document import is_holder_alive

    lease = document.lease
    return lease is not None and time.time() - lease.at < LEASE_S and is_holder_alive(lease) is not False


def notice(fleet: "Fleet") -> "Document":
    """A fleet's document. Where nobody keeps the fleet, its hosts are asked first which jobs have ended."""
    import asyncio

    document = read(fleet)
    if is_kept(document) or all(job.is_over for job in document.jobs):
        return document
    from tpuswarm.cloud.errors import CloudError
    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.fleet.keeper.job_runner import JobRunner
    from tpuswarm.remote.connect import Connections
    from tpuswarm.train.process.waiting import waiting

    cloud = fleet.provider()
    runner = JobRunner(Routes(fleet, cloud, fleet.store(cloud)), fleet.store(cloud))

    async def go() -> "Document | None":
        async with Connections(runner.key, ASKED_S) as connections:
            return (await runner.run_once(connections, cloud.machines(document.zones), time.time(), may_start=False))[0]

    try:
        with waiting("asking the machines how their jobs stand"):
            return asyncio.run(go()) or document
    except (CloudError, RunFailed) as error:
        say(f"how jobs stand now cannot be told: {error}", err=True)
        return document


def find_job(name: str, target: str | None = None) -> "tuple[Fleet, Document, Job] | None":
    """The job of that name, in the fleet of this folder or the only one; None: there is none, or no fleet."""
    from tpuswarm.fleet.store import fleets

    try:
        fleet, _ = fleets.find_fleet(target)
    except InputError:
        return None
    if not (fleet.folder / "fleet.json").exists():
        return None  # this computer has not made it: a name is not worth asking a cloud
    document = fleet.store(fleet.provider()).load()
    if document is None or all(each.name != name for each in document.jobs):
        return None
    document = notice(fleet)
    return fleet, document, next(each for each in document.jobs if each.name == name)


def detach(
    where: str,
    words: list[str],
    name: str | None,
    restart: str | None,
    failures: int,
    alive_for: str | None,
    target: str | None,
) -> None:
    """Store a job, and see it begin; whoever keeps the fleet goes on from there."""
    from tpuswarm.config.units import check_number, parse_seconds
    from tpuswarm.fleet.store import fleets

    if restart not in (None, *RESTARTS):
        raise InputError(f"--restart is one of {', '.join(RESTARTS)}, not {restart!r}")
    if name is not None and not re.fullmatch(NAME, name):
        raise InputError(f"--name takes small letters, digits and -, at most 30, a letter first, not {name!r}")
    check_number(failures, "--failures", least=0)
    alive_s = None if alive_for is None else parse_seconds(alive_for, "--alive-for")
    if alive_s is not None:
        check_number(alive_s, "--alive-for", least=1)
    fleet, _ = fleets.find_fleet(target)
    from tpuswarm.fleet.hosts.routes import open_routes

    routes = open_routes(fleet)
    routes.snapshot()  # this computer's key is let in
    if name is not None and any(each.name == name and not each.is_over for each in read(fleet).jobs):
        notice(fleet)  # it may have ended, and be over
    cloud = fleet.provider()
    job = store_job(fleet, where, words, name, restart, failures, alive_s, cloud.machines)
    say(f"job {job.name} is stored: `{job.line}`", err=True)
    see_begin(fleet, job.name)


def store_job(
    fleet: "Fleet", where: str, words: list[str], name: str | None, restart: str | None, failures: int,
    alive_s: float | None, machines: "Callable[[Iterable[str]], Listing] | None",
) -> "Job":  # fmt: skip
    """Store what is to run from now on. Raises InputError for a name that is taken or a place that there is not."""
    from tpuswarm.fleet.decide.jobs import Job, create_assignments
    from tpuswarm.fleet.decide.names import ALL
    from tpuswarm.fleet.hosts.targets import find_targets
    from tpuswarm.fleet.store.document import Document, with_job
    from tpuswarm.remote.attended import line_of
    from tpuswarm.remote.places import there

    store = fleet.store(fleet.provider())
    made: list[Job] = []

    def add(found: Document | None) -> Document:
        if found is None:
            raise InputError(f"there is no fleet {fleet.name} in project {fleet.project}: `tpuswarm up` makes it")
        desired = found.desired
        machine = worker = None
        if where != ALL and where not in [each.name for each in desired.pools]:
            assert machines is not None
            targets = find_targets(where, desired, machines(found.zones)).targets
            machine = targets[0].machine
            worker = targets[0].worker if "/" in where else None
        taken = {each.name: each for each in found.jobs}
        called = name or next(f"job-{number}" for number in range(1, 10_000) if f"job-{number}" not in taken)
        if called in taken and not taken[called].is_over:
            raise InputError(f"job {called} is not over: `tpuswarm stop {called}` ends it; or give another --name")
        seats = create_assignments(where, machine, desired)
        # Numbers of runs only grow: hosts remember them.
        last = max((each.run for each in taken[called].assignments), default=0) if called in taken else found.last_run
        seats = tuple(replace(each, run=last) for each in seats)
        job = Job(
            called, where, line_of(words), restart or "preempted", seats, there(Path.cwd()),  # type: ignore[arg-type]
            machine.name if machine else None, worker, failures, alive_s, time.time(),
        )  # fmt: skip
        made[:] = [job]
        return with_job(found, job)

    store.change(add)
    return made[0]


def store_main(fleet: "Fleet", pool: str, words: list[str]) -> None:
    """Store the command of `up -- CMD`: a job that is run again until it exits 0; the same one again goes on."""
    from tpuswarm.remote.attended import line_of

    there = next((each for each in read(fleet).jobs if each.name == MAIN), None)
    if there is not None and not there.is_over and there.line == line_of(words):
        return
    store_job(fleet, pool, words, MAIN, "always", 0, None, None)


def see_begin(fleet: "Fleet", name: str, kept: bool = False) -> None:
    """Wait until a job runs, or is over, on all machines; what no keeper does is done here.

    `kept`: a keeper has just been started, and will lead.
    """
    with leaving(name):
        carry(fleet, name, lambda job: all(each.phase != "waiting" for each in job.assignments))
    document = read(fleet)
    job = next(each for each in document.jobs if each.name == name)
    for seat in job.assignments:
        say(f"{seat.machine or seat.pool}: {seat.phase}, {seat.why}", err=True)
    if not is_kept(document) and not kept and job.restart != "never":
        say(
            "nobody keeps the fleet: it is not started again until `tpuswarm keep`, or `tpuswarm up --keep`",
            err=True,
        )
    say(f"`tpuswarm logs {name} -f` follows it, `tpuswarm stop {name}` ends it", err=True)


@contextmanager
def leaving(name: str) -> Iterator[None]:
    """Ctrl-C ends our looking on, not the job, and says so."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"job {name} stays: `tpuswarm stop {name}` ends it", err=True)
        raise


def carry(fleet: "Fleet", name: str, until: "Callable[[Job], bool]") -> "Job":
    """Carry jobs out until then, or watch a keeper do it."""
    import asyncio

    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.fleet.keeper.job_runner import BUSY_INTERVAL_S, JobRunner
    from tpuswarm.fleet.store.document import Document
    from tpuswarm.remote.connect import Connections
    from tpuswarm.train.process.waiting import waiting

    cloud = fleet.provider()
    store = fleet.store(cloud)
    runner = JobRunner(Routes(fleet, cloud, fleet.store(cloud)), fleet.store(cloud))

    async def go() -> "Job":
        before, since = None, time.monotonic()
        async with Connections(runner.key) as connections:
            while True:
                document: Document | None = await asyncio.to_thread(read, fleet, store)
                assert document is not None
                if document.jobs != before:
                    before, since = document.jobs, time.monotonic()
                # Beside a keeper nothing is done twice but work: it is watched, unless it does nothing.
                if not is_kept(document) or time.monotonic() - since > IDLE_S:
                    listing = await asyncio.to_thread(cloud.machines, document.zones)
                    document, _ = await runner.run_once(connections, listing, time.time())
                job = next((each for each in document.jobs if each.name == name), None) if document else None
                if job is None:
                    raise RunFailed(f"job {name} is gone: somebody has deleted it")
                if until(job):
                    return job
                if document and document.desired.down is not None:  # nobody carries jobs out any more
                    raise RunFailed(f"fleet {fleet.name} comes down ({document.desired.down}), and its jobs with it")
                far(
                    "; ".join(
                        f"{each.machine or each.pool}: {each.why}"
                        for each in job.assignments
                        if each.phase in ("waiting", "running")
                    )
                )
                await asyncio.sleep(BUSY_INTERVAL_S)

    with waiting(f"waiting for job {name}") as far:
        return asyncio.run(go())


def stop_job(fleet: "Fleet", job: "Job") -> None:
    """End a job everywhere, and wait until it has ended."""
    from tpuswarm.fleet.store.document import Document

    def ask(found: Document | None) -> Document:
        if found is None:
            raise RunFailed(f"fleet {fleet.name} is gone")
        jobs = tuple(replace(each, stop=True) if each.name == job.name else each for each in found.jobs)
        return replace(found, jobs=jobs)

    if job.is_over:
        raise InputError(f"job {job.name} is over: {', '.join(sorted({each.phase for each in job.assignments}))}")
    fleet.store(fleet.provider()).change(ask)
    say(f"asked job {job.name} to end; after 20 s it is killed", err=True)
    ended = carry(fleet, job.name, lambda each: each.is_over)
    for seat in ended.assignments:
        say(f"{job.name} on {seat.machine or seat.pool}: {seat.phase}, {seat.why}")
