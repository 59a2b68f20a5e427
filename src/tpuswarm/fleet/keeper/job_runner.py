"""Carries out kept jobs: asks their hosts, decides, stores what is decided, and then does it."""

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
from tpuswarm.fleet.decide.jobs import (
    EndRun,
    Job,
    JobUpdate,
    RunReport,
    StartRun,
    StrayRun,
    find_strays,
    restart_for_flags,
    scale_job,
    update_job,
)
from tpuswarm.fleet.decide.state import WorkStatus
from tpuswarm.fleet.hosts.routes import Routes, Snapshot
from tpuswarm.fleet.hosts.setup import BootState, Preparer
from tpuswarm.fleet.hosts.targets import Target
from tpuswarm.fleet.store.document import Document, with_events
from tpuswarm.fleet.store.fleets import Store
from tpuswarm.fleet.store.machine_flags import machine_exports
from tpuswarm.fleet.training import is_head, is_member, share_token
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.places import as_set_up
from tpuswarm.remote.supervisor import Supervisor
from tpuswarm.train.process.computer import boot_time

BUSY_INTERVAL_S, IDLE_INTERVAL_S = 0.5, 2.0
"""Seconds between two looks at the hosts, the first while something is to be started or ended."""
MAX_HOSTS_PER_S = 25
"""Each answer is a Python that starts beside somebody's training: many hosts are asked less often."""
SWEEP_INTERVAL_S = 30.0
"""Seconds between two looks at all hosts, for runs that go on where no job is any more."""
RETRY_S = 5.0
"""Seconds before something that failed on a host is tried there again."""
HOST_TIMEOUT_S = 30.0
"""Seconds in which a host has to answer a question."""
NO_KEEPER = "nobody keeps the fleet: `tpuswarm keep` begins it"
MAX_LISTING_AGE_S = 30.0
"""Seconds after which a look at the machines is too old to act on: somebody else may keep the fleet by then."""

RouteKey = tuple[str, tuple[Worker, ...]]
"""What a way to a host depends on: the alias of the host, and its machine's addresses."""


class JobRunner:
    """Of the jobs of one fleet, in one process. `store` is its own: it may be used by another thread than others."""

    def __init__(self, routes: Routes, store: Store):
        self._routes, self._store = routes, store
        self._hosts: dict[RouteKey, Host] = {}
        self._preparing = Preparer(routes)
        self._failed: dict[tuple[str, str, str], tuple[float, str]] = {}
        """By job, machine and host: when it is tried again, and what went wrong."""
        self._strays: frozenset[StrayRun] = frozenset()
        self._swept = -SWEEP_INTERVAL_S
        self.pause = IDLE_INTERVAL_S
        """Seconds until the next look, where nothing is under way."""

    @property
    def key(self) -> Path:
        """The file of this computer's private key."""
        return self._routes.key

    async def round(
        self, connections: Connections, listing: Listing, now: float, begins: bool = True
    ) -> tuple[Document | None, bool]:
        """Look once and do what is due; the document as it is then, and whether something is under way.

        begins: whether runs may begin; without it only what has come to its end is noted.
        """
        document = await asyncio.to_thread(self._store.load)
        if document is None or not document.jobs or document.desired.down is not None:
            return document, False
        if not self._routes.accepts_own_key(document):
            await asyncio.to_thread(self._routes.look)
            return document, True
        ours = [each for each in listing.machines if each.fleet == document.desired.fleet]
        open_ = [job for job in document.jobs if not job.is_over]
        sweeps = time.monotonic() - self._swept >= SWEEP_INTERVAL_S
        targets = list(_ready(ours) if sweeps else _targets(open_, ours))
        hosts = await asyncio.to_thread(self._ways, Snapshot(document, listing), targets)
        self.pause = max(IDLE_INTERVAL_S, len(hosts) / MAX_HOSTS_PER_S)
        reached = [each for each in targets if _way(each) in hosts]
        shown = await fan_out(
            [hosts[_way(each)] for each in reached],
            lambda host: Supervisor(connections, host).show(),
            time_out_s=HOST_TIMEOUT_S,
        )
        answers = list(zip(reached, shown, strict=True))
        if sweeps:
            await asyncio.to_thread(self._routes.follow, Snapshot(document, listing))
            await self._sweep(connections, document.jobs, answers, hosts)
        unprepared = (
            self._preparing.look(
                _begun(open_, answers), {to.machine.name for to, said in answers if isinstance(said, dict)}
            )
            if begins
            else dict.fromkeys((each.name for each in ours), NO_KEEPER)
        )
        flags = {
            job.name: {each.name: machine_exports(document, each, job.name) for each in ours if each.state == "ready"}
            for job in open_
        }
        members = {job.name: flags[job.name] for job in open_ if is_member(job)}
        nexts: list[JobUpdate] = []
        for job in restart_for_flags(document.jobs, members, now) if begins else document.jobs:
            job = scale_job(job, document.desired) if begins else job
            nexts.append(
                JobUpdate(job, ())
                if job.is_over
                else update_job(
                    job, ours, listing.unreachable, _reports(job.name, answers), now, unprepared, flags[job.name]
                )
            )
        jobs = tuple(self._said(each, old) for each, old in zip(nexts, document.jobs, strict=True))
        if not begins:  # why something waits is for whoever carries it out to say
            jobs = tuple(_waiting_as_before(old, new) for old, new in zip(document.jobs, jobs, strict=True))
        tpus = {each.name: each.created for each in ours if each.kind == "tpu"}
        spoilt = self._preparing.unusable(tpus) if begins else document.work.unusable
        work = _work(document, jobs, spoilt, now)
        if jobs != document.jobs or work != document.work:
            events = [event for old, new in zip(document.jobs, jobs, strict=True) for event in _events(old, new, now)]
            document = with_events(replace(document, jobs=jobs, work=work), events)
            try:
                await asyncio.to_thread(self._store.save, document)
            except Changed:
                return await asyncio.to_thread(self._store.load), True  # the next look decides again
        acts = [(job, act) for job, each in zip(jobs, nexts, strict=True) for act in each.acts]
        acts = [(job, act) for job, act in acts if begins or isinstance(act, EndRun)]
        await self._do(connections, jobs, acts, [(each, hosts[_way(each)]) for each in reached])
        waits = any(each.phase == "waiting" for job in jobs for each in job.assignments)
        return document, bool(acts) or waits

    async def _do(
        self,
        connections: Connections,
        jobs: Sequence[Job],
        acts: Sequence[tuple[Job, StartRun | EndRun]],
        hosts: Sequence[tuple[Target, Host]],
    ) -> None:
        """Start and end; what fails is noted, and tried again later."""
        reached = {(target.machine.name, target.worker): host for target, host in hosts}

        async def one(job: Job, act: StartRun | EndRun, target: Target, host: Host) -> None:
            key, supervisor = (job.name, act.machine, host.label), Supervisor(connections, host)
            if time.monotonic() < self._failed.get(key, (0.0, ""))[0]:
                return
            try:
                async with asyncio.timeout(HOST_TIMEOUT_S):
                    if isinstance(act, StartRun):
                        spec = {
                            "line": as_set_up(job.line, job.folder, act.flags),
                            "alive_s": job.alive_s,
                            "again": _again(job, target),
                        }
                        await share_token(connections, job, host, jobs, reached)
                        await supervisor.start(job.name, act.run, spec)
                    else:
                        await supervisor.end(job.name, act.run)
                self._failed.pop(key, None)
            except TpuswarmError as error:
                self._failed[key] = (time.monotonic() + RETRY_S, str(error))
            except TimeoutError:
                self._failed[key] = (
                    time.monotonic() + RETRY_S,
                    f"{host.label} did not answer within {HOST_TIMEOUT_S:g} s",
                )

        for first in (True, False):  # a head's secret is there before members ask for it
            async with asyncio.TaskGroup() as group:
                for job, act in acts:
                    for target, host in hosts if is_head(job) == first else ():
                        if target.machine.name == act.machine and target.worker in act.workers:
                            group.create_task(one(job, act, target, host))

    def _said(self, found: JobUpdate, before: Job) -> Job:
        """The job, with what went wrong where something is to be done again, and what was left on a machine."""
        seats = list(found.job.assignments)
        for act in found.acts:
            for number, seat in enumerate(seats):
                if seat.machine == act.machine:
                    told = [
                        why
                        for (job, machine, _), (_, why) in self._failed.items()
                        if (job, machine) == (before.name, act.machine)
                    ]
                    left = self._preparing.left.get(act.machine) if isinstance(act, StartRun) else None
                    if told:
                        seats[number] = replace(seat, why=f"{told[0]}; tried again")
                    elif left:
                        seats[number] = replace(seat, why=f"{seat.why}; {left}")
        return replace(found.job, assignments=tuple(seats))

    async def _sweep(
        self,
        connections: Connections,
        jobs: Iterable[Job],
        answers: Sequence[tuple[Target, object]],
        hosts: Mapping["RouteKey", Host],
    ) -> None:
        """End what has strayed, if it had at the last sweep too: between them the jobs were read anew."""
        self._swept = time.monotonic()
        names = {name for _, found in answers if isinstance(found, dict) for name in found}
        found = find_strays(jobs, {name: _reports(name, answers) for name in names})
        for stray in found & self._strays:
            host = next(
                hosts[_way(to)] for to, _ in answers if (to.machine.name, to.worker) == (stray.machine, stray.worker)
            )
            await fan_out([host], lambda at, job=stray.job, run=stray.run: Supervisor(connections, at).end(job, run))  # type: ignore[misc]
        self._strays = found

    def _ways(self, seen: Snapshot, targets: Sequence[Target]) -> dict[RouteKey, Host]:
        """The way to each that has one; a host that has not written down its keys yet is left out."""
        found = {}
        for each in targets:
            try:
                found[_way(each)] = self._hosts.get(_way(each)) or self._routes.route_to(seen, [each])[0]
            except TpuswarmError:
                continue  # it comes with a later look
        self._hosts = found
        return found


class JobThread:
    """A thread that carries jobs out beside a keeper that leads: it is told of every look of the keeper."""

    def __init__(self, make: Callable[[], JobRunner], tell: Callable[[str], None]):
        self._make, self._tell = make, tell
        self._look: tuple[Listing, float] | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def look(self, listing: Listing, has_jobs: bool) -> None:
        """The keeper has looked, and leads."""
        self._look = (listing, boot_time())
        if has_jobs and (self._thread is None or not self._thread.is_alive()) and not self._end.is_set():
            self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """No more; what runs on hosts goes on."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(HOST_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.run(self._carry())

    async def _carry(self) -> None:
        carrier = self._make()
        async with Connections(carrier.key) as connections:
            said = ""
            while not self._end.is_set():
                moving = False
                look = self._look
                if look is not None and boot_time() - look[1] < MAX_LISTING_AGE_S:
                    try:
                        _, moving = await carrier.round(connections, look[0], time.time())
                        said = ""
                    except Exception as error:  # noqa: BLE001  # it pays for machines: jobs go on
                        sure = isinstance(error, CloudError | TpuswarmError)
                        text = str(error) if sure else f"{type(error).__name__}: {error}"
                        if text != said:
                            said = text
                            self._tell(f"jobs: {text}; tried again")
                for _ in range(round((BUSY_INTERVAL_S if moving else carrier.pause) / 0.1)):
                    if self._end.is_set():
                        return
                    await asyncio.sleep(0.1)


def _way(target: Target) -> RouteKey:
    """What is looked for again where a machine is another one, or has other addresses."""
    return target.alias, target.machine.workers


def _again(job: Job, target: Target) -> bool:
    """Whether a host may begin a run again by itself after a reboot, where no keeper does.

    On one worker, and where it is to run again at all: the workers of a slice have to begin together.
    """
    return job.restart != "never" and (job.worker is not None or len(target.machine.workers) == 1)


def _ready(machines: Iterable[Machine]) -> Iterable[Target]:
    for machine in machines:
        if machine.state == "ready" and machine.workers and all(each.internal for each in machine.workers):
            for worker in range(len(machine.workers)):
                yield Target(machine, worker)


def _targets(jobs: Iterable[Job], machines: Iterable[Machine]) -> Iterable[Target]:
    """The workers that jobs are on or may be soon."""
    seats = [(job, seat) for job in jobs for seat in job.assignments if seat.phase in ("waiting", "running")]
    for target in _ready(machines):
        name, pool = target.machine.name, target.machine.pool
        if any(
            job.worker in (None, target.worker)
            and (seat.machine == name or (seat.machine is None and seat.pool == pool))
            for job, seat in seats
        ):
            yield target


def _waiting_as_before(old: Job, new: Job) -> Job:
    seats = (was if was.phase == "waiting" else now for was, now in zip(old.assignments, new.assignments, strict=True))
    return replace(new, assignments=tuple(seats))


def _reports(job: str, answers: Iterable[tuple[Target, object]]) -> dict[tuple[str, int], RunReport | None]:
    """What hosts say of a job; those that did not answer are left out."""
    return {
        (each.machine.name, each.worker): _report(found.get(job)) for each, found in answers if isinstance(found, dict)
    }


def _begun(jobs: Iterable[Job], answers: Iterable[tuple[Target, object]]) -> dict[str, BootState]:
    """The machines on which something waits to begin, and how often anything has begun there before."""
    waiting = [seat for job in jobs for seat in job.assignments if seat.phase == "waiting"]
    found: dict[str, BootState] = {}
    for target, states in answers:
        machine = target.machine
        if any(
            each.machine == machine.name or (each.machine is None and each.pool == machine.pool) for each in waiting
        ):
            runs = found[machine.name].runs if machine.name in found else None
            if isinstance(states, dict):
                runs = max(runs or 0, sum(each.get("run", 0) for each in states.values()))
            found[machine.name] = BootState(machine.created, runs)
    return found


def _report(state: object) -> RunReport | None:
    if not isinstance(state, dict) or "state" not in state:
        return None
    return RunReport(state["run"], state["state"], state.get("code"), state.get("why", ""))


def _work(document: Document, jobs: Sequence[Job], spoilt: Mapping[str, tuple[float, str]], now: float) -> WorkStatus:
    running = any(each.phase == "running" for job in jobs for each in job.assignments)
    done = all(each.phase == "done" for job in jobs for each in job.assignments)
    busy_at = document.work.busy_at
    if running and (busy_at is None or now - busy_at > 30.0):
        busy_at = now
    return replace(document.work, done=done, busy_at=busy_at, unusable=spoilt)


def _events(old: Job, new: Job, now: float) -> Iterable[Event]:
    """What a person would want to know of."""
    before = dict(enumerate(old.assignments))
    for number, seat in enumerate(new.assignments):
        was = before.get(number)
        if was is None or (was.phase, was.run) != (seat.phase, seat.run):
            machine = seat.machine or (was.machine if was else None) or ""
            yield Event(now, seat.pool, machine, "job", f"{new.name}: {seat.phase}, {seat.why}")
