"""Decide which runs to start and end for each job, from its hosts' reports.

A job has one assignment per machine. An assignment outlives its machine: if the machine is taken away, another machine
of the pool takes over, and the job runs again on all workers. Each start gets a higher run number, and a host refuses
lower ones, so no run starts twice on a worker.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from tpuswarm.cloud.protocol import Machine
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.remote.paths import SERVICE_PREFIX

Restart = Literal["preempted", "always", "never"]
Phase = Literal["waiting", "running", "done", "failed", "stopped"]
FIRST_BACKOFF_S, BACKOFF_FACTOR, MAX_BACKOFF_S = 2.0, 2.0, 300.0
MAX_SAME_ERRORS, MIN_SAME_ERRORS_S = 3, 120.0
"""A job that fails so often in the same way is not run again, unless a shorter outage may explain it."""
SHORT_RUN_S = 300.0
"""A run that fails later has made progress, so that a restart makes sense."""
NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
MISSING_GRACE_S = 15.0
"""A machine must be missing this long before it counts as gone: a single listing may be incomplete."""


@dataclass(frozen=True)
class Assignment:
    """One machine's share of a job, on all workers or on one. Times are Unix seconds."""

    pool: str
    machine: str | None = None
    created: float = 0.0
    """The machine's creation: a later machine of the same name is another one."""
    phase: Phase = "waiting"
    run: int = 0
    """The number of the last run; 0: none yet."""
    failed: int = 0
    lost: int = 0
    """Runs that ended with their machine, or hung."""
    code: int | None = None
    error: str = ""
    """The last line of a run that failed; empty once a later run has lasted for SHORT_RUN_S."""
    same_errors: int = 0
    """How many short runs have failed in succession with this error."""
    same_since: float = 0.0
    """When the first of them failed."""
    not_before: float = 0.0
    missed_at: float = 0.0
    """When the machine was first missing from a listing; 0: it is listed."""
    why: str = "not started yet"
    flags: str = ""
    """The last run's flags, as `shell_exports` returns them."""
    renewing: bool = False
    """Whether the run is being ended to restart with other flags."""
    renewed_at: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.phase in ("waiting", "running")


@dataclass(frozen=True)
class Job:
    name: str
    where: str
    """NAME, NAME/2, POOL or all."""
    line: str
    restart: Restart
    assignments: Annotated[tuple[Assignment, ...], Field(alias="seats")]
    folder: str = ""
    """The synced folder to run in, relative to the home."""
    machine: str | None = None
    """The only machine; None: every machine that `where` names."""
    worker: int | None = None
    """The only worker; None: all workers."""
    failures: int = 0
    """How many failures each assignment may have."""
    alive_s: float | None = None
    """Restart the job if it prints nothing for this long."""
    at: float = 0.0
    """When it was requested, Unix seconds."""
    stop: bool = False
    min_run_s: float = 0.0
    """If the first run fails sooner, the command is wrong, and the job has failed."""

    @property
    def is_over(self) -> bool:
        return not any(assignment.is_open for assignment in self.assignments)


class RunReport(NamedTuple):
    """The state of a job on a worker, as its supervisor reports it."""

    run: int
    state: Literal["running", "ended", "asked", "lost", "stalled"]
    """`asked`: it ended at our request."""
    code: int | None = None
    why: str = ""
    error: str = ""
    """The last line of a run that failed."""
    ran_s: float = math.inf


END_PRIORITY = {"lost": 0, "stalled": 1, "ended": 2, "asked": 3}
"""Which worker's end explains the others: if a worker is lost, the others fail and are then ended."""
RunReports = Mapping[tuple[str, int], RunReport | None]
"""By machine and worker; None if the worker does not know the job; silent workers are absent."""


class StartRun(NamedTuple):
    """Start a run on these workers, after ending an earlier one."""

    machine: str
    run: int
    workers: tuple[int, ...]
    flags: str = ""
    """Shell commands to run first."""


class EndRun(NamedTuple):
    """End a run, and any earlier one, on these workers."""

    machine: str
    run: int
    workers: tuple[int, ...]


RunAction = StartRun | EndRun


class StrayRun(NamedTuple):
    """A run on a worker that its job no longer uses."""

    job: str
    machine: str
    worker: int
    run: int


class JobUpdate(NamedTuple):
    """The job to store, and then the actions to take."""

    job: Job
    actions: tuple[RunAction, ...]


def all_assignments(jobs: Iterable[Job]) -> list[tuple[Job, Assignment]]:
    return [(job, assignment) for job in jobs for assignment in job.assignments]


def end_job(job: Job) -> Job:
    """Mark everything that may run again as stopped after the fleet came down."""
    why = "the fleet came down"
    assignments = (
        replace(it, phase="stopped", why=why) if it.is_open or has_same_errors(it) else it for it in job.assignments
    )
    return replace(job, assignments=tuple(assignments))


def create_assignments(where: str, machine: Machine | None, desired: Desired) -> tuple[Assignment, ...]:
    """Return one assignment for the named machine, or one for each machine that the pools should have."""
    if machine is not None:
        return (Assignment(machine.pool or "", machine.name, machine.created),)
    return tuple(
        Assignment(pool.name) for pool in desired.pools if where in (ALL, pool.name) for _ in range(pool.count)
    )


def busy_machines(jobs: Iterable[Job]) -> frozenset[str]:
    running = (assignment for _, assignment in all_assignments(jobs) if assignment.phase == "running")
    return frozenset(assignment.machine for assignment in running if assignment.machine is not None)


def has_same_errors(assignment: Assignment) -> bool:
    """Whether it has failed, and the last MAX_SAME_ERRORS runs with the same error."""
    return assignment.phase == "failed" and assignment.same_errors >= MAX_SAME_ERRORS


def may_run(job: Job) -> bool:
    """Whether a job is open, or may run again on a new machine."""
    return not job.is_over or (job.restart == "always" and any(map(has_same_errors, job.assignments)))


def reopen_failed(job: Job) -> Job:
    """Let a job run again where it failed."""
    return replace(job, assignments=tuple(_reopen(it) if it.phase == "failed" else it for it in job.assignments))


def _reopen(assignment: Assignment) -> Assignment:
    return replace(assignment, phase="waiting", same_errors=0, not_before=0.0, why="not started again yet")


def scale_job(job: Job, desired: Desired) -> Job:
    """Adapt an open job to the sizes of its pools, unless it is for one machine."""
    if job.is_over:
        return job
    assignments = list(job.assignments)
    for pool in desired.pools:
        if job.where not in (ALL, pool.name) or job.machine is not None:
            continue
        existing = [other for other in assignments if other.pool == pool.name]
        assignments += [Assignment(pool.name)] * (pool.count - len(existing))
        empty = [other for other in existing if other.phase == "waiting" and other.machine is None]
        for surplus in empty[: max(0, len(existing) - pool.count)]:
            assignments.remove(surplus)
    return job if len(assignments) == len(job.assignments) else replace(job, assignments=tuple(assignments))


def update_job(
    job: Job,
    machines: Iterable[Machine],
    unreachable: Collection[str],
    reports: RunReports,
    now: float,
    unprepared: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> JobUpdate:
    """Return the job to store and the actions to take; actions are safe to repeat.

    `machines`: the fleet's listing; `unreachable`: zones that do not answer; `unprepared`: assigned machines on which
    nothing may start yet, and why (a newly assigned machine waits for the next update); None: all are prepared;
    `flags`: by machine, for a run that starts now.
    """
    by_name = {machine.name: machine for machine in machines}
    taken = {assignment.machine for assignment in job.assignments if assignment.machine}
    assignments: list[Assignment] = []
    actions: list[RunAction] = []
    for before in job.assignments:
        assignment = _assign(job, before, by_name, unreachable, taken, now)
        moved = (assignment.machine, assignment.created) != (before.machine, before.created)
        machine = by_name.get(assignment.machine or "")
        may_start = assignment.phase == "waiting" and not job.stop
        if may_start and (why := (unprepared or {}).get(assignment.machine or "")):
            assignment = replace(assignment, why=why)
        elif may_start and unprepared is not None and moved and machine is not None:
            assignment = replace(assignment, why=f"{machine.name} is another machine: it is prepared first")
        elif machine is not None and machine.state == "ready":
            workers = tuple(range(len(machine.workers))) if job.worker is None else (job.worker,)
            known = {w: reports[machine.name, w] for w in workers if (machine.name, w) in reports}
            machine_flags = (flags or {}).get(machine.name, "")
            assignment, more = _update_on_machine(job, assignment, workers, known, now, machine_flags)
            actions += more
        elif job.stop and (
            assignment.phase == "waiting" or (assignment.phase == "running" and machine is None and not unreachable)
        ):
            assignment = replace(assignment, phase="stopped", why="as `tpuswarm stop` asked")
        assignments.append(assignment)
    return JobUpdate(replace(job, assignments=tuple(assignments)), tuple(actions))


def find_strays(jobs: Iterable[Job], reports: Mapping[str, RunReports]) -> frozenset[StrayRun]:
    """Return runs on workers that their job no longer uses; `reports` by job name.

    The job may have been assigned since it was read: only end a run that is stray again after the next read.
    """
    assigned = {(job.name, assignment.machine) for job, assignment in all_assignments(jobs) if assignment.is_open}
    return frozenset(
        StrayRun(name, machine, worker, report.run)
        for name, found in reports.items()
        for (machine, worker), report in found.items()
        if report is not None and report.state == "running" and (name, machine) not in assigned
        if not name.startswith(SERVICE_PREFIX)
    )


def _assign(
    job: Job,
    assignment: Assignment,
    machines: Mapping[str, Machine],
    unreachable: Collection[str],
    taken: set[str],
    now: float,
) -> Assignment:
    """Return the assignment with its machine from now on.

    It leaves a machine that is dead, gone or created anew; on a machine that is being deleted, it still runs.
    """
    name = assignment.machine
    machine = machines.get(name or "")
    is_replaced = machine is None or machine.state == "dead" or machine.created != assignment.created
    if job.restart == "always" and has_same_errors(assignment) and not unreachable and is_replaced:
        assignment = _reopen(assignment)  # the error may have been the machine's
    if not assignment.is_open:
        return assignment
    if name is not None and (
        machine is None or machine.state == "dead" or (assignment.run and machine.created != assignment.created)
    ):
        running = assignment.phase == "running"
        if machine is None and unreachable:
            return replace(assignment, why=f"{name} may be in a zone that does not answer")
        since = assignment.missed_at or now
        if machine is None and running and 0 <= now - since < MISSING_GRACE_S:
            return replace(assignment, missed_at=since, why=f"{name} is not listed")
        why, lost = f"{name} was taken away", assignment.lost + running
        if running and job.restart == "never":
            return replace(assignment, phase="failed", lost=lost, why=why)
        taken.discard(name)
        assignment = replace(assignment, machine=None, phase="waiting", lost=lost, missed_at=0.0, why=why)
    if assignment.machine is None:
        free = [
            machine
            for machine in machines.values()
            if machine.pool == assignment.pool and machine.state == "ready" and machine.workers
            if machine.name not in taken
        ]
        if not free:
            before = assignment.why.partition(";")[0]
            return replace(assignment, why=f"{before}; no machine of pool {assignment.pool} is free and ready")
        chosen = min(free, key=lambda machine: machine.name)
        taken.add(chosen.name)
        return replace(assignment, machine=chosen.name, created=chosen.created)
    if assignment.missed_at:
        assignment = replace(assignment, missed_at=0.0)
    if machine is not None and machine.state != "ready":
        return replace(assignment, why=f"{machine.name} is {machine.state_word}")
    return assignment if assignment.run or machine is None else replace(assignment, created=machine.created)


def _update_on_machine(
    job: Job,
    assignment: Assignment,
    workers: tuple[int, ...],
    reports: Mapping[int, RunReport | None],
    now: float,
    flags: str,
) -> tuple[Assignment, list[RunAction]]:
    name, run = assignment.machine or "", assignment.run
    current = {w: report for w, report in reports.items() if report is not None and report.run == run and run}
    running = tuple(w for w, report in current.items() if report.state == "running")
    # A start may still be on the way to a worker that does not know the run. A host may restart a run that was lost in
    # a reboot, and a killed supervisor leaves its processes. All need the end, too.
    lost = tuple(w for w, report in current.items() if job.stop and report.state == "lost")
    unended = tuple(w for w in workers if w in reports and (w not in current or w in running or w in lost))
    end: list[RunAction] = [EndRun(name, run, unended)] if unended and run else []
    silent = [w for w in workers if w not in reports]
    succeeded = [w for w, report in current.items() if report.state == "ended" and report.code == 0]
    if assignment.phase == "running" and len(succeeded) == len(workers):
        return replace(assignment, phase="done", code=0, why="exit 0 on every worker"), []
    if job.stop and assignment.is_open:
        if lost or (assignment.phase == "running" and (unended or silent)):
            return replace(assignment, why="as `tpuswarm stop` asked"), end
        return replace(assignment, phase="stopped", why="as `tpuswarm stop` asked"), []
    if assignment.phase == "waiting":
        if now < assignment.not_before:
            return assignment, []
        if silent:
            return replace(assignment, why=f"{name}/{silent[0]} does not answer yet"), []
        run = max(run, *(report.run for report in reports.values() if report is not None), 0) + 1
        why = f"run {run} on {name}"
        if assignment.error:
            why += f"; the one before failed: {assignment.error}"
        started = replace(assignment, phase="running", run=run, code=None, why=why, flags=flags, renewing=False)
        return started, [StartRun(name, run, workers, flags)]
    if assignment.phase != "running":
        return assignment, [EndRun(name, run, running)] if running else []
    if assignment.renewing:
        why = "restarting with other flags"
        if unended or silent:
            return replace(assignment, why=why), end
        return replace(assignment, phase="waiting", renewed_at=now, why=why), []
    if ended := {w: report for w, report in current.items() if report.state != "running" and report.code != 0}:
        return _handle_end(job, assignment, ended, end, silent, now)
    if missing := tuple(w for w in workers if w in reports and w not in current):
        return assignment, [StartRun(name, run, missing, assignment.flags)]  # the previous keeper died while starting
    if assignment.error and not silent and all(report.ran_s >= SHORT_RUN_S for report in current.values()):
        assignment = replace(assignment, error="", same_errors=0, why=f"run {run} on {name}")
    stuck = [f"{name}/{w}: {report.why}" for w, report in sorted(current.items()) if report.why and not report.code]
    return (replace(assignment, why=stuck[0]) if stuck else assignment), []


def _handle_end(
    job: Job,
    assignment: Assignment,
    ended: Mapping[int, RunReport],
    end: list[RunAction],
    silent: Sequence[int],
    now: float,
) -> tuple[Assignment, list[RunAction]]:
    """Handle a run that did not end well on some worker: end it on all workers, then decide why and what next."""
    worker, report = min(sorted(ended.items()), key=lambda item: END_PRIORITY[item[1].state])
    why = f"{assignment.machine}/{worker}: {report.why or f'exit {report.code}'}"
    if end:
        return replace(assignment, why=f"{why}; ending the other workers"), end
    if silent:  # a silent worker may be the cause
        return replace(assignment, why=f"{why}; {assignment.machine}/{silent[0]} does not answer"), []
    if report.state != "ended":
        phase: Phase = "failed" if job.restart == "never" else "waiting"
        return replace(assignment, phase=phase, lost=assignment.lost + 1, why=why), []
    is_first = not assignment.failed and not assignment.lost
    failed, error = assignment.failed + 1, report.error or f"exit {report.code}"
    cause = f": {report.error}" if report.error else ""
    is_same = NUMBER.sub("", error) == NUMBER.sub("", assignment.error)
    same_errors = 0 if report.ran_s >= SHORT_RUN_S else assignment.same_errors * is_same + 1
    since = assignment.same_since if same_errors > 1 else now
    assignment = replace(
        assignment, failed=failed, code=report.code, error=error, same_errors=same_errors, same_since=since,
        why=why + cause,
    )  # fmt: skip
    if is_first and report.ran_s < job.min_run_s:
        why += f" after {report.ran_s:.0f} s, so it is not run again{cause}"
        return replace(assignment, phase="failed", why=why), []
    if job.restart == "never" or (job.restart == "preempted" and failed > job.failures):
        count = f" ({failed} failures, {job.failures} are forgiven)" if job.failures else ""
        return replace(assignment, phase="failed", why=why + count + cause), []
    if job.restart == "always" and same_errors >= MAX_SAME_ERRORS and now - since >= MIN_SAME_ERRORS_S:
        why = f"{assignment.machine}/{worker}: {same_errors} times the same error, so it is not run again: {error}"
        return replace(assignment, phase="failed", why=why), []
    backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * BACKOFF_FACTOR ** min(failed - 1, 20))
    return replace(assignment, phase="waiting", not_before=now + backoff_s), []
