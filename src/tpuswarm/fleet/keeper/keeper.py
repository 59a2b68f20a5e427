"""Keep a fleet: observe, decide and act, until it is killed or nothing is left.

A keeper may be killed at any point and started again on any computer: what must not be lost is in the document. The
holder of the lease acts; all other keepers watch, and take over when the lease is not renewed.
"""

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tpuswarm.cloud.errors import Changed, CloudError, Unreachable
from tpuswarm.cloud.protocol import Listing, Provider
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.decide.actions import (
    Action,
    ActionResult,
    CloudAnswer,
    Create,
    CreateResult,
    Delete,
    Event,
    Grow,
    Plan,
    Stop,
)
from tpuswarm.fleet.decide.choose_actions import list_remaining, make_plan
from tpuswarm.fleet.decide.fleet_state import FleetState, Observed, machine_key, spec_key
from tpuswarm.fleet.decide.jobs import busy_machines
from tpuswarm.fleet.decide.observe import observe
from tpuswarm.fleet.decide.spending import charge
from tpuswarm.fleet.keeper.clock import Clock, IdleTimer
from tpuswarm.fleet.keeper.traffic_meter import TrafficMeter
from tpuswarm.fleet.store.document import MAX_EVENTS, Document, DocumentStore, KeeperLease, is_holder_alive, with_events
from tpuswarm.fleet.store.history import History
from tpuswarm.fleet.store.machine_flags import add_flag_metadata
from tpuswarm.train.process.computer import computer_id

IDLE_INTERVAL_S, BUSY_INTERVAL_S, WATCH_INTERVAL_S = 3.0, 1.0, 10.0
"""Between two ticks; WATCH_INTERVAL_S while another keeper leads, nothing changes, and the lease will stay there."""
MAX_BACKOFF_S, PERSON_RETRY_S = 60.0, 300.0
"""After the cloud failed to answer; PERSON_RETRY_S if a person has to fix the cause."""
LEASE_S, RENEW_INTERVAL_S, EVENT_SAVE_INTERVAL_S = 60.0, 15.0, 5.0
"""A lease ends after LEASE_S without renewal; new events are saved with an earlier renewal."""
SAFE_LEASE_S = 40.0
"""How long after a renewal the holder may act; another keeper takes over later."""
MACHINE_VARIABLE = "TPUSWARM_KEEPER_ON"
"""Names the fleet's machine on which this keeper runs."""
MAX_STATE_AGE_S = 600.0
MAX_POLLED = 20
MAX_THREADS = 8
MAX_LOG_BYTES = 10_000_000


@dataclass(frozen=True)
class Tick:
    document: Document
    observed: Observed
    plan: Plan
    events: tuple[Event, ...]
    leads: bool
    now: float

    @property
    def remaining(self) -> list[str]:
        return list_remaining(self.document.desired, self.observed)

    @property
    def done(self) -> bool:
        """Whether a fleet that comes down is gone."""
        return self.document.desired.down is not None and not self.remaining

    @property
    def converged(self) -> bool:
        """Whether exactly the desired machines exist, and all are ready."""
        down = self.document.desired.down is not None
        return not self.plan.actions and not self.observed.state.requests and (self.done if down else self._complete)

    @property
    def _complete(self) -> bool:
        desired = self.document.desired
        own = desired.own(self.observed.machines)
        settled = sum(machine.state == ("stopped" if machine.name in desired.paused else "ready") for machine in own)
        names = {machine.name for machine in own}
        wanted = sum(pool.count for pool in desired.pools) - sum(name not in names for name in desired.paused)
        return settled == len(own) == wanted

    @property
    def is_moving(self) -> bool:
        if self.plan.actions or self.observed.state.requests:
            return True
        own = self.document.desired.own(self.observed.listing.machines)
        return any(machine.state not in ("ready", "stopped", "waiting") for machine in own)


Role = Literal["leads", "holds", "watches"]
"""`holds`: this keeper may hold the lease, but cannot act now."""


class DocumentGone(RunFailed):
    """The document was deleted while a keeper ran."""


class Keeper:
    def __init__(
        self,
        provider: Provider,
        store: DocumentStore,
        history: History,
        clock: Clock | None = None,
        threads: int = MAX_THREADS,
    ):
        self._provider, self._store, self._history = provider, store, history
        self._clock, self._threads = clock or Clock(), threads
        self._id, self._pid = secrets.token_hex(6), os.getpid()
        self._host = os.environ.get(MACHINE_VARIABLE) or socket.gethostname()
        self._computer = computer_id()
        self._idle_timer, self._traffic_meter = IdleTimer(), TrafficMeter(provider)
        self.current: Tick | None = None
        """The last tick, from before its actions."""
        self.sent: dict[str, Action] = {}
        """Actions sent to the cloud and not refused, by `machine_key`, since the last observation."""
        self._answers: list[CloudAnswer] = []
        self._state: FleetState | None = None
        self._observed_beat: tuple[str, int] | None = None
        self._observed_beat_at = 0.0
        self._renewed_at: float | None = None
        """Steady seconds of the last renewal; None: the lease is not ours."""
        self._stood_back_at: float | None = None
        """When the lease was left to the keeper on the fleet's own machine."""
        self._unsaved_events: list[Event] = []
        self._unsaved_jump = 0.0
        self._reported: frozenset[Event] | None = None

    def tick(self) -> Tick:
        """Observe, decide and act once. Raise CloudError if the cloud does not answer."""
        now, steady, jump = self._clock.read()
        self._unsaved_jump += jump
        self._state = self._load_state(now) if self._state is None else self._state.shifted(jump)
        document = self._load()
        stored = document
        answers = [*self._answers, *self._poll_operations()]
        listing = self._provider.machines(dict.fromkeys((*document.desired.zones, *document.zones)))
        state, events = observe(self._state, document.desired, listing, answers, now)
        state = replace(state, unused_zones=document.unused_zones)
        self._state, self._answers, self.sent = state, [], {}
        if jump:
            events = (Event(now, "", "", "clock", f"the clock has jumped by {jump:+.0f} s"), *events)
        seen = Observed(listing, state)
        spending = replace(document.spending, at=document.spending.at + self._unsaved_jump)
        spending = charge(spending, document.desired, seen, now)
        traffic = self._traffic_meter.update(document, seen.machines, now, steady)
        work = self._idle_timer.update(document.work, document.jobs, now, steady)
        work = replace(work, done=work.done and all(job.is_over for job in document.jobs))
        observed = Observed(listing, state, spending.dollars, work, traffic, busy_machines(document.jobs))
        self._unsaved_events = [*self._unsaved_events, *events][-MAX_EVENTS:]
        document = with_events(replace(document, spending=spending, traffic=traffic), self._unsaved_events)
        plan = make_plan(document.desired, observed, now)
        document = replace(document, waits=plan.waits)
        role = self._take_role(document, listing, plan, steady, now)
        if role == "watches":  # the leader reports the events
            self._unsaved_events, self._unsaved_jump = [], 0.0
            document, plan = replace(document, waits=stored.waits), plan._replace(waits=stored.waits)
            return Tick(document, observed, plan, self._new_events(stored.events), False, now)
        self._history.save(state, events, now)
        if role == "leads" and plan.end:
            document = replace(document, desired=replace(document.desired, down=plan.end))
            plan = make_plan(document.desired, observed, now)
        self.current = Tick(document, observed, plan, events, role == "leads", now)
        if role == "leads":
            self._answers = self._act(plan.actions, document)
        return self.current

    def _new_events(self, stored: tuple[Event, ...]) -> tuple[Event, ...]:
        before, self._reported = self._reported, frozenset(stored)
        return () if before is None else tuple(event for event in stored if event not in before)

    def run(
        self,
        show: Callable[[Tick], None],
        until: Callable[[Tick], bool],
        sleep: Callable[[float], None],
        patient: bool = False,
    ) -> Tick:
        """Tick until `until` returns true; retry while the cloud does not answer.

        `patient`: also retry errors that a person has to fix, as nobody may be there to start another keeper.
        """
        failures = 0
        while True:
            try:
                tick = self.tick()
            except CloudError as error:
                needs_person = error.exit_code == 2
                if needs_person and not patient:
                    raise
                failures += 1
                pause_s = PERSON_RETRY_S if needs_person else min(MAX_BACKOFF_S, BUSY_INTERVAL_S * 2**failures)
                self.log(f"{error}; trying again" + (f" in {pause_s / 60:.0f} min" if needs_person else ""))
                sleep(pause_s)
                continue
            failures = 0
            show(tick)
            if until(tick):
                return tick
            leads_soon = self._renewed_at is not None or self._host == tick.document.desired.keeper_machine
            idle_s = IDLE_INTERVAL_S if leads_soon else WATCH_INTERVAL_S
            sleep(BUSY_INTERVAL_S if tick.is_moving or self._answers else idle_s)

    def log(self, text: str) -> None:
        self.log_line(f"{time.strftime('%H:%M:%S')} {text}")

    log_line: Callable[[str], None] = staticmethod(lambda text: None)

    def release(self) -> None:
        """Give the lease back, so that the next keeper need not wait until it ends."""
        if self._renewed_at is None:
            return
        self._renewed_at = None

        def release(document: Document | None) -> Document:
            if document is None:
                raise DocumentGone(f"{self._store.where} is gone")
            is_ours = document.lease is not None and document.lease.holder == self._id
            newest = self.current.plan.waits if self.current else document.waits
            waits = tuple(wait._replace(until=None) for wait in newest)  # nobody tries again by itself
            released = replace(document, lease=None, waits=waits)
            return with_events(released, self._unsaved_events) if is_ours else document

        self._store.change(release)
        self._unsaved_events.clear()

    def stand_back(self) -> None:
        """Leave the lease to the keeper on the fleet's own machine, and watch while it takes over."""
        self.release()
        self._stood_back_at = self._clock.steady()

    def _load(self) -> Document:
        document = self._store.load()
        if document is None:
            raise DocumentGone(f"{self._store.where} was deleted; `tpuswarm up` makes it again")
        return document

    def _load_state(self, now: float) -> FleetState:
        """Return the recent state of the last keeper on this computer, if there was one."""
        stored = self._history.state()
        if stored is None or not 0 <= now - stored[1] < MAX_STATE_AGE_S:
            return FleetState()
        return stored[0]

    def _poll_operations(self) -> list[CreateResult]:
        """Poll open creations, first those missing from listings."""
        assert self._state is not None
        seen = self._state.seen
        operations = [(key, each.operation) for key, each in self._state.requests.items() if each.operation]
        results = []
        for key, operation in sorted(operations, key=lambda item: item[0] in seen)[:MAX_POLLED]:
            try:
                outcome = self._provider.outcome(operation)
            except CloudError:
                continue
            if outcome.done:
                results.append(CreateResult(key, outcome.error))
        return results

    # The lease.

    def _take_role(self, document: Document, listing: Listing, plan: Plan, steady: float, now: float) -> Role:
        """Renew or take the lease if it is ours to have; save first why the fleet is to end."""
        lease = document.lease
        if lease is None or lease.holder != self._id:
            self._renewed_at = None
            if not self._may_take(lease, steady) and not _holder_is_gone(lease, document, listing):
                return "watches"
        age_s = LEASE_S if self._renewed_at is None else steady - self._renewed_at
        used_zones = document.used_zones
        if used_zones is not None:
            requested = (action.spec.zone for action in plan.actions if isinstance(action, Create))
            used_zones = tuple(dict.fromkeys((*used_zones, *requested)))
        must_save = plan.end is not None or used_zones != document.used_zones
        if age_s >= (EVENT_SAVE_INTERVAL_S if self._unsaved_events else RENEW_INTERVAL_S) or must_save:
            beat = (lease.beat if lease and lease.holder == self._id else 0) + 1
            desired = replace(document.desired, down=plan.end) if plan.end else document.desired
            own_lease = KeeperLease(self._id, self._host, self._pid, beat, now, self._computer)
            zones = tuple(dict.fromkeys((*document.zones, *desired.zones)))
            # The save fails if anybody has written since the document was loaded, so the listing still holds.
            saved_at = self._clock.steady()
            try:
                self._store.save(
                    replace(document, lease=own_lease, desired=desired, zones=zones, used_zones=used_zones)
                )
            except Changed:
                return "holds"  # somebody else wrote: the next tick shows what
            except CloudError as error:
                self.log(f"the lease cannot be renewed: {error}")
                if must_save:
                    return "holds"
            else:
                self._renewed_at = saved_at
                self._unsaved_events, self._unsaved_jump = [], 0.0
        return "leads" if self._lease_is_safe() else "holds"

    def _lease_is_safe(self) -> bool:
        """Whether the lease is still ours, even if this computer has slept."""
        return self._renewed_at is not None and self._clock.steady() - self._renewed_at < SAFE_LEASE_S

    def _may_take(self, lease: KeeperLease | None, steady: float) -> bool:
        """Whether the lease is free, its process is dead, or it was not renewed in time."""
        if lease is None:
            return self._stood_back_at is None or steady - self._stood_back_at >= LEASE_S
        if is_holder_alive(lease) is False:
            return True
        beat = (lease.holder, lease.beat)
        if beat != self._observed_beat:
            self._observed_beat, self._observed_beat_at = beat, steady
        return steady - self._observed_beat_at >= LEASE_S

    # Acting.

    def _act(self, actions: tuple[Action, ...], document: Document) -> list[CloudAnswer]:
        if self._threads == 1 or len(actions) == 1:
            results = [self._call(action, document) for action in actions]
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                results = list(pool.map(lambda action: self._call(action, document), actions))
        return [result for result in results if result is not None]

    def _call(self, action: Action, document: Document) -> ActionResult | None:
        """Carry out an action; return None if another keeper may lead by now."""
        if not self._lease_is_safe():
            return None
        provider = self._provider
        key = spec_key(action.spec) if isinstance(action, Create) else machine_key(action.machine)
        self.sent[key] = action
        try:
            if isinstance(action, Create):
                spec = add_flag_metadata(action.spec, document.all_flags)
                return ActionResult(action, provider.create(spec), None)
            if isinstance(action, Delete):
                return ActionResult(action, provider.delete(action.machine), None)
            if isinstance(action, Grow):
                return ActionResult(action, provider.grow_disk(action.machine, action.disk_gib), None)
            call = provider.stop if isinstance(action, Stop) else provider.start
            return ActionResult(action, call(action.machine), None)
        except CloudError as error:
            if not isinstance(error, Unreachable):  # otherwise it may have been done
                del self.sent[key]
            return ActionResult(action, None, error)


def _holder_is_gone(lease: KeeperLease | None, document: Document, listing: Listing) -> bool:
    """Whether the lease's holder ran on a machine of the fleet that no longer runs."""
    specs = (pool.spec for pool in document.desired.pools if pool.name == document.desired.kept_on)
    spec = next(specs, None)
    if spec is None or lease is None or lease.host != spec.name or spec.zone in listing.unreachable:
        return False
    in_zone = (m for m in listing.machines if m.fleet == spec.fleet and m.zone == spec.zone)
    return all(m.name != spec.name or m.state in ("dead", "stopped", "creating") for m in in_zone)


def rotate_log(log: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Move a long log to `log.1`, if it is this process's stdout; the open file stays the same."""
    try:
        file, stdout = log.stat(), os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):  # no log, or no stdout
        return
    if (file.st_dev, file.st_ino) != (stdout.st_dev, stdout.st_ino) or file.st_size <= max_bytes:
        return
    with suppress(OSError):  # a full disk keeps the older log
        sys.stdout.flush()
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
