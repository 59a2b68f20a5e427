"""What to do next about a kept job: a function of what is wanted, what its hosts report, and the time.

A job has a seat for each machine that it is to run on. A seat outlives its machine: where that is taken away, another
one of the pool takes the seat, and the job runs again there, on every worker. Runs of a seat are numbered; a host
starts only a run that is higher than all it has seen, so no run is on a worker twice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tpuswarm.cloud.protocol import Machine
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.remote.places import SERVICE

Restart = Literal["preempted", "always", "never"]
Phase = Literal["waiting", "running", "done", "failed", "stopped"]
FIRST_BACKOFF_S, BACKOFF_FACTOR, MAX_BACKOFF_S = 2.0, 2.0, 300.0
"""Seconds before a job that failed is tried again: the first time, the factor, at most."""
FLAG_RESTART_INTERVAL_S = 60.0
"""Seconds between the ends of two runs that begin again with other flags."""
MISSING_GRACE_S = 15.0
"""Seconds for which a machine is in no list before it is gone: one list may leave it out, and its processes live."""


@dataclass(frozen=True)
class Assignment:
    """A place of a job: one machine at a time, on all of its workers, or on one."""

    pool: str
    machine: str | None = None
    created: float = 0.0
    """When that machine was created: a later one of its name is another one."""
    phase: Phase = "waiting"
    run: int = 0
    """The number of the last run; 0: none yet."""
    failed: int = 0
    """Runs that ended with a code other than 0."""
    lost: int = 0
    """Runs that ended with their machine, or stood still."""
    code: int | None = None
    not_before: float = 0.0
    """Of the next run, Unix seconds."""
    missed_at: float = 0.0
    """Since when its machine is in no list, Unix seconds; 0: it is in the last one."""
    why: str = "not started yet"
    flags: str = ""
    """What its last run began with, as `flags.exports` has it."""
    renewing: bool = False
    """Whether that run ends so that another one begins with other flags."""
    renewed_at: float = 0.0
    """When one last ended for that, Unix seconds."""


@dataclass(frozen=True)
class Job:
    """A command that is to run until it has ended well."""

    name: str
    where: str
    """As it was asked: NAME, NAME/2, POOL or all."""
    line: str
    """Of a shell."""
    restart: Restart
    seats: tuple[Assignment, ...]
    folder: str = ""
    """Where on its hosts, from the home: the synced folder in which it was asked for."""
    machine: str | None = None
    """The machine that was named; None: all of a pool, or of the fleet."""
    worker: int | None = None
    """The only worker that it runs on; None: every one."""
    failures: int = 0
    """How many of its own failures each seat is forgiven."""
    alive_s: float | None = None
    """It is ended and started again where it prints nothing for so long."""
    at: float = 0.0
    """When it was asked for, Unix seconds."""
    stop: bool = False
    """Whether its end was asked for."""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs or will run."""
        return all(each.phase in ("done", "failed", "stopped") for each in self.seats)


class RunReport(NamedTuple):
    """How a job stands on a worker, as its supervisor says."""

    run: int
    state: Literal["running", "ended", "asked", "lost", "stalled"]
    """`asked`: it ended as we have asked it to."""
    code: int | None = None
    why: str = ""


END_PRIORITY = {"lost": 0, "stalled": 1, "ended": 2, "asked": 3}
"""What counts of ends on several workers, most first: where a worker is lost the others fail, and then are ended."""
RunReports = Mapping[tuple[str, int], RunReport | None]
"""By machine and worker; a worker that answers and knows nothing of the job has None, one that is silent is absent."""


class StartRun(NamedTuple):
    """Start a run on these workers of a machine, and end an earlier one that is still there."""

    machine: str
    run: int
    workers: tuple[int, ...]
    flags: str = ""
    """Before its line, for a shell."""


class EndRun(NamedTuple):
    """End a run, and an earlier one that is still there, on these workers of a machine."""

    machine: str
    run: int
    workers: tuple[int, ...]


class StrayRun(NamedTuple):
    """A run that goes on where no seat of its job is any more."""

    job: str
    machine: str
    worker: int
    run: int


class JobUpdate(NamedTuple):
    """What is to be stored, and then done."""

    job: Job
    acts: tuple[StartRun | EndRun, ...]


def end_job(job: Job) -> Job:
    """The job of a fleet that came down: what was not over has stopped."""
    why = "the fleet came down"
    seats = (
        replace(each, phase="stopped", why=why) if each.phase in ("waiting", "running") else each for each in job.seats
    )
    return replace(job, seats=tuple(seats))


def create_assignments(where: str, machine: Machine | None, desired: Desired) -> tuple[Assignment, ...]:
    """The seats of a new job: one for a machine that was named, else one for each that the pools are to have."""
    if machine is not None:
        return (Assignment(machine.pool or "", machine.name, machine.created),)
    return tuple(
        Assignment(each.name) for each in desired.pools if where in (ALL, each.name) for _ in range(each.count)
    )


def busy_machines(jobs: Iterable[Job]) -> frozenset[str]:
    """The machines on which something runs, as far as is known."""
    return frozenset(
        each.machine for job in jobs for each in job.seats if each.phase == "running" and each.machine is not None
    )


def scale_job(job: Job, desired: Desired) -> Job:
    """With as many seats as its pools are to have machines now, unless it is for one machine, or over."""
    if job.over:
        return job
    seats = list(job.seats)
    for pool in desired.pools:
        if job.where not in (ALL, pool.name) or job.machine is not None:
            continue
        mine = [each for each in seats if each.pool == pool.name]
        seats += [Assignment(pool.name)] * (pool.count - len(mine))
        empty = [each for each in mine if each.phase == "waiting" and each.machine is None]
        for each in empty[: max(0, len(mine) - pool.count)]:
            seats.remove(each)
    return job if len(seats) == len(job.seats) else replace(job, seats=tuple(seats))


def update_job(
    job: Job,
    machines: Iterable[Machine],
    away: Collection[str],
    reports: RunReports,
    now: float,
    unprepared: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> JobUpdate:
    """The job as it is to be stored, and what is to be done after that.

    `flags`: with which it would begin now, by machine.

    `machines`: the fleet's own, as listed; `away`: zones that do not answer; `unprepared`: on which nothing may
    begin yet, and why: of those that seats are on, so that a seat that comes to another machine waits for the next
    look; None: all are. What is done is safe to do again.
    """
    there = {each.name: each for each in machines}
    taken = {seat.machine for seat in job.seats if seat.machine}
    seats: list[Assignment] = []
    acts: list[StartRun | EndRun] = []
    for seat in job.seats:
        before = seat
        seat = _seated(job, seat, there, away, taken, now)
        moved = (seat.machine, seat.created) != (before.machine, before.created)
        machine = there.get(seat.machine or "")
        if seat.phase == "waiting" and not job.stop and (why := (unprepared or {}).get(seat.machine or "")):
            seat = replace(seat, why=why)
        elif seat.phase == "waiting" and not job.stop and unprepared is not None and moved and machine is not None:
            seat = replace(seat, why=f"{machine.name} is another machine: it is prepared first")
        elif machine is not None and machine.state == "ready":
            workers = tuple(range(len(machine.workers))) if job.worker is None else (job.worker,)
            known = {w: reports[machine.name, w] for w in workers if (machine.name, w) in reports}
            seat, more = _run(job, seat, workers, known, now, (flags or {}).get(machine.name, ""))
            acts += more
        elif job.stop and (seat.phase == "waiting" or (seat.phase == "running" and machine is None and not away)):
            seat = replace(seat, phase="stopped", why="it was asked to stop")
        seats.append(seat)
    return JobUpdate(replace(job, seats=tuple(seats)), tuple(acts))


def find_strays(jobs: Iterable[Job], reports: Mapping[str, RunReports]) -> frozenset[StrayRun]:
    """Runs that go on where no seat of their job is any more; `reports` by the names of jobs, known or not.

    A job may have been seated there since it was read: only what is one again after it was read anew is to be ended.
    """
    seats = {(job.name, seat.machine) for job in jobs for seat in job.seats if seat.phase in ("waiting", "running")}
    return frozenset(
        StrayRun(name, machine, worker, report.run)
        for name, found in reports.items()
        for (machine, worker), report in found.items()
        if report is not None and report.state == "running" and (name, machine) not in seats
        if not name.startswith(SERVICE)
    )


def restart_for_flags(jobs: Sequence[Job], flags: Mapping[str, Mapping[str, str]], now: float) -> tuple[Job, ...]:
    """With one seat whose run is to end, and to begin again with the flags that its machine has now: one at a time.

    flags: of the jobs that bear it, by name, with which each would begin now on which machine. The next one follows
    RENEWED_S after the last one ended: by then that may train again.
    """
    seats = [seat for job in jobs for seat in job.seats if job.name in flags]
    last = max((seat.renewed_at for seat in seats), default=0.0)
    if any(seat.renewing and seat.phase == "running" for seat in seats) or 0 <= now - last < FLAG_RESTART_INTERVAL_S:
        return tuple(jobs)
    for number, job in enumerate(jobs):
        for place, seat in enumerate(job.seats):
            old = job.name in flags and flags[job.name].get(seat.machine or "", seat.flags) != seat.flags
            if old and seat.phase == "running" and not job.stop:
                changed = (*job.seats[:place], replace(seat, renewing=True), *job.seats[place + 1 :])
                return (*jobs[:number], replace(job, seats=changed), *jobs[number + 1 :])
    return tuple(jobs)


def _seated(
    job: Job, seat: Assignment, there: Mapping[str, Machine], away: Collection[str], taken: set[str], now: float
) -> Assignment:
    """The seat with the machine that it has from now on.

    It leaves a machine on which nothing of it can live: a dead one, one that was made again, or one that is gone. What
    is being deleted still runs.
    """
    if seat.phase not in ("waiting", "running"):
        return seat
    machine = there.get(seat.machine or "")
    if seat.machine is not None and (
        machine is None or machine.state == "dead" or (seat.run and machine.created != seat.created)
    ):
        if machine is None and away:
            return replace(seat, why=f"{seat.machine} may be in a zone that does not answer")
        since = seat.missed_at or now
        if machine is None and seat.phase == "running" and 0 <= now - since < MISSING_GRACE_S:
            return replace(seat, missed_at=since, why=f"{seat.machine} is not listed")
        if seat.phase == "running" and job.restart == "never":
            return replace(seat, phase="failed", lost=seat.lost + 1, why=f"{seat.machine} was taken away")
        lost = seat.lost + (seat.phase == "running")
        taken.discard(seat.machine)
        why = f"{seat.machine} was taken away"
        seat = replace(seat, machine=None, phase="waiting", lost=lost, missed_at=0.0, why=why)
    if seat.machine is None:
        free = [
            each
            for each in there.values()
            if each.pool == seat.pool and each.state == "ready" and each.workers and each.name not in taken
        ]
        if not free:
            return replace(seat, why=f"{seat.why.partition(';')[0]}; no machine of pool {seat.pool} is free and ready")
        chosen = min(free, key=lambda each: each.name)
        taken.add(chosen.name)
        return replace(seat, machine=chosen.name, created=chosen.created)
    seat = replace(seat, missed_at=0.0) if seat.missed_at else seat
    if machine is not None and machine.state != "ready":
        return replace(seat, why=f"{machine.name} is {machine.said.lower()}")
    return seat if seat.run or machine is None else replace(seat, created=machine.created)


def _run(
    job: Job,
    seat: Assignment,
    workers: tuple[int, ...],
    reports: Mapping[int, RunReport | None],
    now: float,
    flags: str,
) -> tuple[Assignment, list[StartRun | EndRun]]:
    """What comes next on a machine that is ready."""
    name = seat.machine or ""
    current = {w: each for w, each in reports.items() if each is not None and each.run == seat.run and seat.run}
    running = tuple(w for w, each in current.items() if each.state == "running")
    # A worker that has not heard of the run is told of its end too: its start may still be on the way to it.
    # A run that was lost with a reboot may be begun again by its host, unless it is told too.
    again = tuple(w for w, each in current.items() if job.stop and each.state == "lost")
    unended = tuple(w for w in workers if w in reports and (w not in current or w in running or w in again))
    end: list[StartRun | EndRun] = [EndRun(name, seat.run, unended)] if unended and seat.run else []
    if (
        seat.phase == "running"
        and len(current) == len(workers)
        and all(each.state == "ended" and each.code == 0 for each in current.values())
    ):
        return replace(seat, phase="done", code=0, why="exit 0 on every worker"), []
    if job.stop and seat.phase in ("waiting", "running"):
        if seat.phase == "running" and (unended or len(reports) < len(workers)):
            return replace(seat, why="it was asked to stop"), end
        return replace(seat, phase="stopped", why="it was asked to stop"), []
    if seat.phase == "waiting":
        if now < seat.not_before:
            return seat, []
        if silent := [w for w in workers if w not in reports]:
            return replace(seat, why=f"{seat.machine}/{silent[0]} does not answer yet"), []
        highest = max((each.run for each in reports.values() if each is not None), default=0)
        run = max(seat.run, highest) + 1
        why = f"run {run} on {seat.machine}"
        seat = replace(seat, phase="running", run=run, code=None, why=why, flags=flags, renewing=False)
        return seat, [StartRun(name, run, workers, flags)]
    if seat.phase != "running":
        return seat, [EndRun(name, seat.run, running)] if running else []
    if seat.renewing:
        why = "it ends, to begin again with other flags"
        if unended or len(reports) < len(workers):
            return replace(seat, why=why), end
        return replace(seat, phase="waiting", renewed_at=now, why=why), []
    if bad := [(w, each) for w, each in sorted(current.items()) if each.state != "running" and each.code != 0]:
        return _ended(job, seat, workers, reports, bad, end, now)
    if missing := tuple(w for w in workers if w in reports and w not in current):
        return seat, [StartRun(name, seat.run, missing, seat.flags)]  # whoever began it has died meanwhile
    if stuck := next(
        (f"{name}/{w}: {each.why}" for w, each in sorted(current.items()) if each.why and not each.code), ""
    ):
        return replace(seat, why=stuck), []  # it cannot end there
    return seat, []


def _ended(
    job: Job, seat: Assignment, workers: Sequence[int], reports: Mapping[int, RunReport | None],
    bad: Sequence[tuple[int, RunReport]], end: list[StartRun | EndRun], now: float,
) -> tuple[Assignment, list[StartRun | EndRun]]:  # fmt: skip
    """A run has ended on some worker, and not well: it ends on all, and then it is known why."""
    worker, first = min(bad, key=lambda each: END_PRIORITY[each[1].state])
    where = f"{seat.machine}/{worker}"
    said = first.why or f"exit {first.code}"
    if end:
        return replace(seat, why=f"{where}: {said}; it is ended on the other workers"), end
    if silent := [w for w in workers if w not in reports]:
        # Where a worker is gone the others fail, and that is no fault of the program's.
        return replace(seat, why=f"{where}: {said}; {seat.machine}/{silent[0]} does not answer"), []
    if first.state != "ended":
        if job.restart == "never":
            return replace(seat, phase="failed", lost=seat.lost + 1, why=f"{where}: {said}"), []
        return replace(seat, phase="waiting", lost=seat.lost + 1, why=f"{where}: {said}"), []
    failed = seat.failed + 1
    seat = replace(seat, failed=failed, code=first.code, why=f"{where}: {said}")
    if job.restart == "never" or (job.restart == "preempted" and failed > job.failures):
        spent = f" ({failed} failures, {job.failures} are forgiven)" if job.failures else ""
        return replace(seat, phase="failed", why=seat.why + spent), []
    pause = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * BACKOFF_FACTOR ** min(failed - 1, 20))
    return replace(seat, phase="waiting", not_before=now + pause), []
