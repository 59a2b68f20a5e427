"""Carries out kept jobs: asks their hosts, decides, stores what is decided, and then does it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tpuswarm.cloud.errors import Changed, CloudError
from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.errors import TpuswarmError
from tpuswarm.fleet.core.actions import Event
from tpuswarm.fleet.core.jobs import Job, Next, Report, Start, next_of, scaled
from tpuswarm.fleet.core.memory import Work
from tpuswarm.fleet.keeping.document import Document, with_events
from tpuswarm.fleet.keeping.fleets import Held
from tpuswarm.fleet.reach import Reach, Seen, Target
from tpuswarm.fleet.setting_up import Beginning, Preparing
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.places import as_set_up
from tpuswarm.remote.supervisor import Supervisor

MOVING, SETTLED = 0.5, 2.0
"""Seconds between two looks at the hosts, the first while something is to be started or ended."""
ANSWER = 30.0
"""Seconds in which a host has to answer a question."""
STALE = 30.0
"""Seconds after which a look at the machines is too old to act on: somebody else may keep the fleet by then."""


class Carrier:
    """Of the jobs of one fleet, in one process. `store` is its own: it may be used by another thread than others."""

    def __init__(self, reach: Reach, store: Held):
        self._reach, self._store = reach, store
        self._hosts: dict[str, Host] = {}
        """By alias."""
        self._preparing = Preparing(reach)

    @property
    def key(self) -> Path:
        """The file of this computer's private key."""
        return self._reach.key

    async def round(self, connections: Connections, listing: Listing, now: float) -> tuple[Document | None, bool]:
        """Look once and do what is due; the document as it is then, and whether something is under way."""
        document = self._store.load()
        if document is None or not document.jobs or document.desired.down is not None:
            return document, False
        ours = [each for each in listing.machines if each.fleet == document.desired.fleet]
        open_ = [job for job in document.jobs if not job.over]
        targets = list(_targets(open_, ours))
        hosts = self._ways(Seen(document, listing), targets)
        reached = [each for each in targets if each.alias in hosts]
        shown = await fan_out(
            [hosts[each.alias] for each in reached],
            lambda host: Supervisor(connections, host).show(),
            time_out_s=ANSWER,
        )
        answers = list(zip(reached, shown, strict=True))
        unprepared = self._preparing.look(_begun(open_, answers))
        nexts: list[Next] = []
        for job in document.jobs:
            reports = {
                (each.machine.name, each.worker): _report(found.get(job.name))
                for each, found in answers
                if not isinstance(found, TpuswarmError)
            }
            job = scaled(job, document.desired)
            nexts.append(
                Next(job, ()) if job.over else next_of(job, ours, listing.unreachable, reports, now, unprepared)
            )
        jobs = tuple(each.job for each in nexts)
        if jobs != document.jobs or _work(document, jobs, now) != document.work:
            events = [event for old, new in zip(document.jobs, jobs, strict=True) for event in _events(old, new, now)]
            document = with_events(replace(document, jobs=jobs, work=_work(document, jobs, now)), events)
            try:
                self._store.save(document)
            except Changed:
                return self._store.load(), True  # somebody wrote meanwhile: the next look decides again
        acts = [(each.job, act) for each in nexts for act in each.acts]
        todo = [
            (job, act, hosts[target.alias])
            for job, act in acts
            for target in reached
            if target.machine.name == job.seats[act.seat].machine and target.worker in act.workers
        ]

        async def do(host: Host) -> None:
            for job, act, at in todo:
                if at is host:
                    supervisor = Supervisor(connections, host)
                    if isinstance(act, Start):
                        line = as_set_up(job.line, job.folder)
                        await supervisor.start(job.name, act.run, {"line": line, "alive_s": job.alive_s})
                    else:
                        await supervisor.end(job.name, act.run)

        await fan_out(list(dict.fromkeys(host for *_, host in todo)), do, time_out_s=ANSWER)
        waits = any(each.phase == "waiting" for job in jobs for each in job.seats)
        return document, bool(acts) or waits

    def _ways(self, seen: Seen, targets: Sequence[Target]) -> dict[str, Host]:
        """The way to each that has one, by alias; a host that has not written down its keys yet is left out."""
        found = {}
        for each in targets:
            try:
                found[each.alias] = self._hosts.get(each.alias) or self._reach.ways(seen, [each])[0]
            except TpuswarmError:
                continue  # it comes with a later look
        self._hosts = found
        return found


class Carrying:
    """A thread that carries jobs out beside a keeper that leads: it is told of every look of the keeper."""

    def __init__(self, make: Callable[[], Carrier], tell: Callable[[str], None]):
        self._make, self._tell = make, tell
        self._look: tuple[Listing, float] | None = None
        self._thread: threading.Thread | None = None
        self._end = threading.Event()

    def look(self, listing: Listing, has_jobs: bool) -> None:
        """The keeper has looked, and leads."""
        self._look = (listing, time.monotonic())
        if has_jobs and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """No more; what runs on hosts goes on."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(ANSWER)

    def _run(self) -> None:
        asyncio.run(self._carry())

    async def _carry(self) -> None:
        carrier = self._make()
        async with Connections(carrier.key) as connections:
            said = ""
            while not self._end.is_set():
                moving = False
                look = self._look
                if look is not None and time.monotonic() - look[1] < STALE:
                    try:
                        _, moving = await carrier.round(connections, look[0], time.time())
                        said = ""
                    except (CloudError, TpuswarmError) as error:
                        if str(error) != said:
                            said = str(error)
                            self._tell(f"jobs: {error}; tried again")
                for _ in range(round((MOVING if moving else SETTLED) / 0.1)):
                    if self._end.is_set():
                        return
                    await asyncio.sleep(0.1)


def _targets(jobs: Iterable[Job], machines: Iterable[Machine]) -> Iterable[Target]:
    """The workers that jobs are on or may be soon."""
    seats = [(job, seat) for job in jobs for seat in job.seats if seat.phase in ("waiting", "running")]
    for machine in machines:
        if machine.state == "ready" and machine.workers and all(each.internal for each in machine.workers):
            mine = [
                job
                for job, seat in seats
                if seat.machine == machine.name or (seat.machine is None and seat.pool == machine.pool)
            ]
            for worker in range(len(machine.workers)):
                if any(job.worker in (None, worker) for job in mine):
                    yield Target(machine, worker)


def _begun(jobs: Iterable[Job], answers: Iterable[tuple[Target, object]]) -> dict[str, Beginning]:
    """The machines on which something waits to begin, and how often anything has begun there before."""
    waiting = [seat for job in jobs for seat in job.seats if seat.phase == "waiting"]
    found: dict[str, tuple[Machine, int]] = {}
    for target, states in answers:
        machine = target.machine
        if any(
            each.machine == machine.name or (each.machine is None and each.pool == machine.pool) for each in waiting
        ):
            runs = sum(each.get("run", 0) for each in states.values()) if isinstance(states, dict) else 0
            found[machine.name] = (machine, max(runs, found.get(machine.name, (machine, 0))[1]))
    return {machine.name: Beginning(machine.created, runs) for machine, runs in found.values()}


def _report(state: object) -> Report | None:
    if not isinstance(state, dict) or "state" not in state:
        return None
    return Report(state["run"], state["state"], state.get("code"), state.get("why", ""))


def _work(document: Document, jobs: Sequence[Job], now: float) -> Work:
    running = any(each.phase == "running" for job in jobs for each in job.seats)
    done = all(each.phase == "done" for job in jobs for each in job.seats)
    busy = document.work.busy_at
    if running and (busy is None or now - busy > 30.0):
        busy = now
    return replace(document.work, done=done, busy_at=busy)


def _events(old: Job, new: Job, now: float) -> Iterable[Event]:
    """What a person would want to know of."""
    before = dict(enumerate(old.seats))
    for number, seat in enumerate(new.seats):
        was = before.get(number)
        if was is None or (was.phase, was.run) != (seat.phase, seat.run):
            machine = seat.machine or (was.machine if was else None) or ""
            yield Event(now, seat.pool, machine, "job", f"{new.name}: {seat.phase}, {seat.why}")
