"""What to do next about a kept job: a function of what is wanted, what its hosts report, and the time.

A job has a seat for each machine that it is to run on. A seat outlives its machine: where that is taken away, another
one of the pool takes the seat, and the job runs again there, on every worker. Runs of a seat are numbered; a host
starts only a run that is higher than all it has seen, so no run is on a worker twice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tpuswarm.cloud.protocol import Machine
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.names import ALL

Restart = Literal["preempted", "always", "never"]
Phase = Literal["waiting", "running", "done", "failed", "stopped"]
FIRST, GROWTH, LONGEST = 2.0, 2.0, 300.0
"""Seconds before a job that failed is tried again: the first time, the factor, at most."""


@dataclass(frozen=True)
class Seat:
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
    why: str = "not started yet"


@dataclass(frozen=True)
class Job:
    """A command that is to run until it has ended well."""

    name: str
    where: str
    """As it was asked: NAME, NAME/2, POOL or all."""
    line: str
    """Of a shell."""
    restart: Restart
    seats: tuple[Seat, ...]
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


class Report(NamedTuple):
    """How a job stands on a worker, as its supervisor says."""

    run: int
    state: Literal["running", "ended", "asked", "lost", "stalled"]
    """`asked`: it ended as we have asked it to."""
    code: int | None = None
    why: str = ""


BLAME = {"lost": 0, "stalled": 1, "ended": 2, "asked": 3}
"""What counts of ends on several workers, most first: where a worker is lost the others fail, and then are ended."""
Reports = Mapping[tuple[str, int], Report | None]
"""By machine and worker; a worker that answers and knows nothing of the job has None, one that is silent is absent."""


class Start(NamedTuple):
    """Start a run of a seat on these workers of its machine."""

    seat: int
    run: int
    workers: tuple[int, ...]


class End(NamedTuple):
    """End a run of a seat on these workers of its machine."""

    seat: int
    run: int
    workers: tuple[int, ...]


class Next(NamedTuple):
    """What is to be stored, and then done."""

    job: Job
    acts: tuple[Start | End, ...]


def seats_for(where: str, machine: Machine | None, desired: Desired) -> tuple[Seat, ...]:
    """The seats of a new job: one for a machine that was named, else one for each that the pools are to have."""
    if machine is not None:
        return (Seat(machine.pool or "", machine.name, machine.created),)
    return tuple(Seat(each.name) for each in desired.pools if where in (ALL, each.name) for _ in range(each.count))


def scaled(job: Job, desired: Desired) -> Job:
    """With as many seats as its pools are to have machines now, unless it is for one machine."""
    seats = list(job.seats)
    for pool in desired.pools:
        if job.where not in (ALL, pool.name) or job.machine is not None:
            continue
        mine = [each for each in seats if each.pool == pool.name]
        seats += [Seat(pool.name)] * (pool.count - len(mine))
        empty = [each for each in mine if each.phase == "waiting" and each.machine is None]
        for each in empty[: max(0, len(mine) - pool.count)]:
            seats.remove(each)
    return job if len(seats) == len(job.seats) else replace(job, seats=tuple(seats))


def next_of(
    job: Job,
    machines: Iterable[Machine],
    away: Collection[str],
    reports: Reports,
    now: float,
    unprepared: Mapping[str, str] | None = None,
) -> Next:
    """The job as it is to be stored, and what is to be done after that.

    `machines`: the fleet's own, as listed; `away`: zones that do not answer; `unprepared`: on which nothing may
    begin yet, and why. What is done is safe to do again.
    """
    there = {each.name: each for each in machines}
    taken = {seat.machine for seat in job.seats if seat.machine}
    seats: list[Seat] = []
    acts: list[Start | End] = []
    for number, seat in enumerate(job.seats):
        seat = _seated(job, seat, there, away, taken)
        machine = there.get(seat.machine or "")
        if seat.phase == "waiting" and not job.stop and (why := (unprepared or {}).get(seat.machine or "")):
            seat = replace(seat, why=why)
        elif machine is not None and machine.state == "ready":
            workers = tuple(range(len(machine.workers))) if job.worker is None else (job.worker,)
            seat, more = _run(job, seat, number, workers, {w: reports[machine.name, w] for w in workers
                              if (machine.name, w) in reports}, now)  # fmt: skip
            acts += more
        elif job.stop and seat.phase in ("waiting", "running"):
            seat = replace(seat, phase="stopped", why="its end was asked for")
        seats.append(seat)
    return Next(replace(job, seats=tuple(seats)), tuple(acts))


def _seated(job: Job, seat: Seat, there: Mapping[str, Machine], away: Collection[str], taken: set[str]) -> Seat:
    """The seat with the machine that it has from now on."""
    if seat.phase not in ("waiting", "running"):
        return seat
    machine = there.get(seat.machine or "")
    if seat.machine is not None and (
        machine is None or machine.state in ("dead", "deleting") or (seat.run and machine.created != seat.created)
    ):
        if machine is None and away:
            return replace(seat, why=f"{seat.machine} may be in a zone that does not answer")
        if seat.phase == "running" and job.restart == "never":
            return replace(seat, phase="failed", lost=seat.lost + 1, why=f"{seat.machine} was taken away")
        lost = seat.lost + (seat.phase == "running")
        taken.discard(seat.machine)
        seat = replace(seat, machine=None, phase="waiting", lost=lost, why=f"{seat.machine} was taken away")
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
    if machine is not None and machine.state != "ready":
        return replace(seat, why=f"{machine.name} is {machine.said.lower()}")
    return seat if seat.run or machine is None else replace(seat, created=machine.created)


def _run(
    job: Job, seat: Seat, number: int, workers: tuple[int, ...], reports: Mapping[int, Report | None], now: float
) -> tuple[Seat, list[Start | End]]:
    """What comes next on a machine that is ready."""
    current = {w: each for w, each in reports.items() if each is not None and each.run == seat.run and seat.run}
    running = tuple(w for w, each in current.items() if each.state == "running")
    # A worker that has not heard of the run is told of its end too: its start may still be on the way to it.
    unended = tuple(w for w in workers if w in reports and (w not in current or w in running))
    end: list[Start | End] = [End(number, seat.run, unended)] if unended and seat.run else []
    if job.stop and seat.phase in ("waiting", "running"):
        if seat.phase == "running" and (unended or len(reports) < len(workers)):
            return replace(seat, why="its end was asked for"), end
        return replace(seat, phase="stopped", why="its end was asked for"), []
    if seat.phase == "waiting":
        if now < seat.not_before:
            return seat, []
        if silent := [w for w in workers if w not in reports]:
            return replace(seat, why=f"{seat.machine}/{silent[0]} does not answer yet"), []
        highest = max((each.run for each in reports.values() if each is not None), default=0)
        run = max(seat.run, highest) + 1
        seat = replace(seat, phase="running", run=run, code=None, why=f"run {run} on {seat.machine}")
        return seat, [Start(number, run, workers)]
    if seat.phase != "running":
        return seat, [End(number, seat.run, running)] if running else []
    if bad := [(w, each) for w, each in sorted(current.items()) if each.state != "running" and each.code != 0]:
        return _ended(job, seat, number, workers, reports, bad, end, now)
    if missing := tuple(w for w in workers if w in reports and w not in current):
        return seat, [Start(number, seat.run, missing)]  # whoever began it has died meanwhile
    if len(current) == len(workers) and not running:
        return replace(seat, phase="done", code=0, why="exit 0 on every worker"), []
    return seat, []


def _ended(
    job: Job, seat: Seat, number: int, workers: Sequence[int], reports: Mapping[int, Report | None],
    bad: Sequence[tuple[int, Report]], end: list[Start | End], now: float,
) -> tuple[Seat, list[Start | End]]:  # fmt: skip
    """A run has ended on some worker, and not well: it ends on all, and then it is known why."""
    worker, first = min(bad, key=lambda each: BLAME[each[1].state])
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
    pause = min(LONGEST, FIRST * GROWTH ** min(failed - 1, 20))
    return replace(seat, phase="waiting", not_before=now + pause), []
