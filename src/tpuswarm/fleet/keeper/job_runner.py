"""Run the fleet's jobs: ask their hosts, decide, save the decision, then act on it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tpuswarm.cloud.errors import Changed, CloudError
from tpuswarm.cloud.protocol import Listing, Machine, Worker
from tpuswarm.errors import TpuswarmError
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.flag_restarts import restart_for_flags
from tpuswarm.fleet.decide.fleet_state import WorkStatus
from tpuswarm.fleet.decide.jobs import (
    Assignment,
    EndRun,
    Job,
    JobUpdate,
    RunAction,
    RunReport,
    StartRun,
    StrayRun,
    all_assignments,
    find_strays,
    may_run,
    scale_job,
    update_job,
)
from tpuswarm.fleet.hosts.routes import Routes, Snapshot
from tpuswarm.fleet.hosts.setup import BootState, Preparer
from tpuswarm.fleet.hosts.targets import Target
from tpuswarm.fleet.keeper.maintenance import MaintenanceNotices, TargetHosts
from tpuswarm.fleet.store.document import Document, DocumentStore, with_events
from tpuswarm.fleet.store.machine_flags import WHOLE_POD_EXPORT, has_tf_pod, machine_exports
from tpuswarm.fleet.training import is_head, is_member, share_token
from tpuswarm.remote.connect import Connections, fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import in_environment
from tpuswarm.remote.supervisor import Supervisor
from tpuswarm.train.process.computer import boot_time

BUSY_INTERVAL_S, IDLE_INTERVAL_S = 0.5, 2.0
MAX_HOSTS_PER_S = 25
"""Each answer starts a Python process beside somebody's training, so large fleets are asked less often."""
SWEEP_INTERVAL_S = 30.0
RETRY_S = 5.0
HOST_TIMEOUT_S = 30.0
MAX_LISTING_AGE_S = 30.0
"""Ignore an older listing: another keeper may lead now."""
BUSY_REPORT_INTERVAL_S = 30.0
NO_KEEPER = "no keeper runs; start one with `tpuswarm keep`"

RouteKey = tuple[str, tuple[Worker, ...]]
"""A route is valid for a host's alias and its machine's addresses."""
HostStates = Sequence[tuple[Target, object]]
"""Each target's states of jobs, or the error of a host that did not answer."""


class JobRunner:
    """Runs the jobs of one fleet. `store` must not be shared with another thread."""

    def __init__(self, routes: Routes, store: DocumentStore):
        self._routes, self._store = routes, store
        self._hosts: dict[RouteKey, Host] = {}
        self._preparer = Preparer(routes)
        self._failures: dict[tuple[str, str, str], tuple[float, str]] = {}
        """By job, machine and host: when to retry, and what went wrong."""
        self._strays: frozenset[StrayRun] = frozenset()
        self._swept_at = -SWEEP_INTERVAL_S
        self._maintenance = MaintenanceNotices()
        self._document: Document | None = None
        self.interval_s = IDLE_INTERVAL_S

    @property
    def key(self) -> Path:
        return self._routes.key

    async def run_once(
        self,
        connections: Connections,
        listing: Listing,
        now: float,
        may_start: bool = True,
        seen: Document | None = None,
    ) -> tuple[Document | None, bool]:
        """Run one round; return the document, and whether something is in progress.

        Without `may_start`, only note what has ended and end what the user stopped. seen: the document as the keeper
        has just read it; it is read again only if its jobs or its desired state have changed.
        """
        if self._document is None or seen is None or _inputs(seen) != _inputs(self._document):
            self._document = await asyncio.to_thread(self._store.load)
        document = self._document
        if document is None or not document.jobs or document.desired.down is not None:
            return document, False
        if not self._routes.accepts_own_key(document):
            await asyncio.to_thread(self._routes.snapshot)
            self._document = None
            return document, True
        own = document.desired.own(listing.machines)
        open_jobs = [job for job in document.jobs if may_run(job)]
        sweep = time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S
        targets = list(_ready_targets(own) if sweep else _job_targets(open_jobs, own))
        hosts = await asyncio.to_thread(self._find_hosts, Snapshot(document, listing), targets)
        self.interval_s = max(IDLE_INTERVAL_S, len(hosts) / MAX_HOSTS_PER_S)
        states = await self._ask_hosts(connections, hosts)
        if sweep:
            await asyncio.to_thread(self._routes.refresh_ssh_config, Snapshot(document, listing))
            await self._end_strays(connections, document.jobs, states, hosts)
        notices = await self._maintenance.read(connections, document, hosts, now) if sweep and may_start else []
        updates = self._decide(document, open_jobs, own, listing, states, now, may_start)
        jobs = tuple(self._explain(update, old.name) for update, old in zip(updates, document.jobs, strict=True))
        if not may_start:  # whoever runs the jobs explains what waits
            jobs = tuple(_keep_waiting(old, new) for old, new in zip(document.jobs, jobs, strict=True))
        tpus = {machine.name: machine.created for machine in own if machine.kind == "tpu"}
        unusable = self._preparer.unusable(tpus) if may_start else document.work.unusable
        work = _work_status(document, jobs, unusable, now)
        if jobs != document.jobs or work != document.work or notices:
            events = [event for old, new in zip(document.jobs, jobs, strict=True) for event in _events(old, new, now)]
            document = with_events(replace(document, jobs=jobs, work=work), [*notices, *events])
            try:
                await asyncio.to_thread(self._store.save, document)
            except Changed:
                self._document = await asyncio.to_thread(self._store.load)
                return self._document, True  # decide again in the next round
            self._document = document
            self._maintenance.add_stored(notices)
        actions = [
            (job, action)
            for job, update in zip(jobs, updates, strict=True)
            for action in update.actions
            if may_start or isinstance(action, EndRun)
        ]
        await self._act(connections, jobs, actions, hosts)
        waiting = any(assignment.phase == "waiting" for _, assignment in all_assignments(jobs))
        return document, bool(actions) or waiting

    async def _ask_hosts(self, connections: Connections, hosts: TargetHosts) -> HostStates:
        states = await fan_out(
            [host for _, host in hosts],
            lambda host: Supervisor(connections, host).show(),
            time_out_s=HOST_TIMEOUT_S,
        )
        return [(target, state) for (target, _), state in zip(hosts, states, strict=True)]

    def _decide(
        self, document: Document, open_jobs: Sequence[Job], own: Sequence[Machine], listing: Listing,
        states: HostStates, now: float, may_start: bool,
    ) -> list[JobUpdate]:  # fmt: skip
        if may_start:
            answering = {target.machine.name for target, state in states if isinstance(state, dict)}
            unprepared = self._preparer.update(_waiting_machines(open_jobs, states), answering)
        else:
            unprepared = dict.fromkeys((machine.name for machine in own), NO_KEEPER)
        ready = [machine for machine in own if machine.state == "ready"]
        flags = {
            job.name: {machine.name: machine_exports(document, machine, job.name) for machine in ready}
            for job in open_jobs
        }
        member_flags = {job.name: flags[job.name] for job in open_jobs if is_member(job)}
        updates = []
        for job in restart_for_flags(document.jobs, member_flags, now) if may_start else document.jobs:
            job = scale_job(job, document.desired) if may_start else job
            reports = _reports(job.name, states)
            updates.append(
                update_job(job, own, listing.unreachable, reports, now, unprepared, flags[job.name])
                if may_run(job)
                else JobUpdate(job, ())
            )
        return updates

    async def _act(
        self,
        connections: Connections,
        jobs: Sequence[Job],
        actions: Sequence[tuple[Job, RunAction]],
        hosts: TargetHosts,
    ) -> None:
        by_worker = {(target.machine.name, target.worker): host for target, host in hosts}

        async def act(job: Job, action: RunAction, target: Target, host: Host) -> None:
            key, supervisor = (job.name, action.machine, host.label), Supervisor(connections, host)
            if time.monotonic() < self._failures.get(key, (0.0, ""))[0]:
                return
            try:
                async with asyncio.timeout(HOST_TIMEOUT_S):
                    if isinstance(action, StartRun):
                        leads_pod = job.worker == 0 and has_tf_pod(target.machine)
                        exports = action.flags + target.exports + WHOLE_POD_EXPORT * leads_pod
                        spec = {
                            "line": in_environment(job.line, job.folder, exports),
                            "alive_s": job.alive_s,
                            "again": _may_restart_itself(job, target),
                        }
                        await share_token(connections, job, host, jobs, by_worker)
                        await supervisor.start(job.name, action.run, spec)
                    else:
                        await supervisor.end(job.name, action.run)
                self._failures.pop(key, None)
            except TpuswarmError as error:
                self._failures[key] = (time.monotonic() + RETRY_S, str(error))
            except TimeoutError:
                why = f"{host.label} did not answer within {HOST_TIMEOUT_S:g} s"
                self._failures[key] = (time.monotonic() + RETRY_S, why)

        for head_first in (True, False):  # members need the head's token
            async with asyncio.TaskGroup() as group:
                for job, action in actions:
                    for target, host in hosts if is_head(job) == head_first else ():
                        if target.machine.name == action.machine and target.worker in action.workers:
                            group.create_task(act(job, action, target, host))

    def _explain(self, update: JobUpdate, name: str) -> Job:
        """Return the job, with failed actions and files that stay changed on a machine as reasons."""
        assignments = list(update.job.assignments)
        for action in update.actions:
            for index, assignment in enumerate(assignments):
                if assignment.machine == action.machine:
                    errors = [why for key, (_, why) in self._failures.items() if key[:2] == (name, action.machine)]
                    kept = self._preparer.kept_changes.get(action.machine) if isinstance(action, StartRun) else None
                    if errors:
                        assignments[index] = replace(assignment, why=f"{errors[0]}; trying again")
                    elif kept:
                        assignments[index] = replace(assignment, why=f"{assignment.why}; {kept}")
        return replace(update.job, assignments=tuple(assignments))

    async def _end_strays(
        self, connections: Connections, jobs: Iterable[Job], states: HostStates, hosts: TargetHosts
    ) -> None:
        """End the runs that were stray in the last sweep too: the jobs were read anew since then."""
        self._swept_at = time.monotonic()
        names = {name for _, state in states if isinstance(state, dict) for name in state}
        strays = find_strays(jobs, {name: _reports(name, states) for name in names})
        by_worker = {(target.machine.name, target.worker): host for target, host in hosts}
        for stray in strays & self._strays:
            host = by_worker[stray.machine, stray.worker]
            await fan_out([host], lambda at, stray=stray: Supervisor(connections, at).end(stray.job, stray.run))  # type: ignore[misc]
        self._strays = strays

    def _find_hosts(self, snapshot: Snapshot, targets: Sequence[Target]) -> list[tuple[Target, Host]]:
        """Return the targets' hosts, except those without published host keys."""
        found: list[tuple[Target, Host]] = []
        routes: dict[RouteKey, Host] = {}
        for target in targets:
            key = target.alias, target.machine.workers
            try:
                routes[key] = self._hosts.get(key) or self._routes.route_to(snapshot, [target])[0]
            except TpuswarmError:
                continue
            found.append((target, routes[key]))
        self._hosts = routes
        return found


class JobThread:
    def __init__(self, make_runner: Callable[[], JobRunner], log: Callable[[str], None]):
        self._make_runner, self._log = make_runner, log
        self._seen: tuple[Listing, Document, float] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def update(self, listing: Listing, document: Document) -> None:
        """Take the listing and document of a leading keeper, and start the thread if there are jobs."""
        self._seen = (listing, document, boot_time())
        if document.jobs and (self._thread is None or not self._thread.is_alive()) and not self._stop.is_set():
            self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="jobs", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread; runs on hosts continue."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(HOST_TIMEOUT_S)

    async def _run(self) -> None:
        runner = self._make_runner()
        async with Connections(runner.key) as connections:
            logged = ""
            while not self._stop.is_set():
                in_progress = False
                if self._seen is not None and boot_time() - self._seen[2] < MAX_LISTING_AGE_S:
                    listing, document, _ = self._seen
                    try:
                        _, in_progress = await runner.run_once(connections, listing, time.time(), seen=document)
                        logged = ""
                    except Exception as error:  # noqa: BLE001  # the machines cost money: keep their jobs running
                        expected = isinstance(error, CloudError | TpuswarmError)
                        text = str(error) if expected else f"{type(error).__name__}: {error}"
                        if text != logged:
                            logged = text
                            self._log(f"jobs: {text}; trying again")
                for _ in range(round((BUSY_INTERVAL_S if in_progress else runner.interval_s) / 0.1)):
                    if self._stop.is_set():
                        return
                    await asyncio.sleep(0.1)


def _inputs(document: Document) -> tuple[object, ...]:
    """Return the parts of a document that decide about jobs."""
    return document.jobs, document.desired, document.flags, document.work


def _may_restart_itself(job: Job, target: Target) -> bool:
    """Whether a host may restart a run after a reboot without a keeper; workers of a slice must start together."""
    return job.restart != "never" and (job.worker is not None or len(target.machine.workers) == 1)


def _ready_targets(machines: Iterable[Machine]) -> Iterable[Target]:
    for machine in machines:
        if machine.state == "ready" and machine.workers and all(worker.internal for worker in machine.workers):
            for number in range(len(machine.workers)):
                yield Target(machine, number)


def _may_use(assignment: Assignment, machine: Machine) -> bool:
    if assignment.machine is None:
        return assignment.pool == machine.pool
    return assignment.machine == machine.name


def _job_targets(jobs: Iterable[Job], machines: Iterable[Machine]) -> Iterable[Target]:
    open_assignments = [pair for pair in all_assignments(jobs) if pair[1].is_open]
    for target in _ready_targets(machines):
        if any(
            job.worker in (None, target.worker) and _may_use(assignment, target.machine)
            for job, assignment in open_assignments
        ):
            yield target


def _keep_waiting(old: Job, new: Job) -> Job:
    pairs = zip(old.assignments, new.assignments, strict=True)
    return replace(new, assignments=tuple(before if before.phase == "waiting" else after for before, after in pairs))


def _reports(job: str, states: HostStates) -> dict[tuple[str, int], RunReport | None]:
    """Return the reports of answering hosts about a job."""
    return {
        (target.machine.name, target.worker): _report(found.get(job))
        for target, found in states
        if isinstance(found, dict)
    }


def _report(state: object) -> RunReport | None:
    if not isinstance(state, dict) or "state" not in state:
        return None
    ran_s = state.get("ended", time.time()) - state["began"]
    return RunReport(
        state["run"], state["state"], state.get("code"), state.get("why", ""), state.get("error", ""), ran_s
    )


def _waiting_machines(jobs: Iterable[Job], states: HostStates) -> dict[str, BootState]:
    """Return the machines on which something is to start, and how often anything has started there."""
    waiting = [assignment for _, assignment in all_assignments(jobs) if assignment.phase == "waiting"]
    found: dict[str, BootState] = {}
    for target, state in states:
        machine = target.machine
        if any(_may_use(assignment, machine) for assignment in waiting):
            runs = found[machine.name].runs if machine.name in found else None
            if isinstance(state, dict):
                runs = max(runs or 0, sum(job.get("run", 0) for job in state.values()))
            found[machine.name] = BootState(machine.created, runs)
    return found


def _work_status(
    document: Document, jobs: Sequence[Job], unusable: Mapping[str, tuple[float, str]], now: float
) -> WorkStatus:
    phases = {assignment.phase for _, assignment in all_assignments(jobs)}
    busy_at = document.work.busy_at
    if "running" in phases and (busy_at is None or now - busy_at > BUSY_REPORT_INTERVAL_S):
        busy_at = now
    return replace(document.work, done=phases <= {"done"}, busy_at=busy_at, unusable=unusable)


def _events(old: Job, new: Job, now: float) -> Iterable[Event]:
    for index, after in enumerate(new.assignments):
        before = old.assignments[index] if index < len(old.assignments) else None
        if before is None or (before.phase, before.run) != (after.phase, after.run):
            machine = after.machine or (before.machine if before else None) or ""
            yield Event(now, after.pool, machine, "job", f"{new.name}: {after.phase}, {after.why}")
