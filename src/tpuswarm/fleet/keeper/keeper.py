"""Looks at a fleet, decides and acts, again and again, until it is killed or nothing is left.

Nothing it knows is only in its memory that must not be lost: it may be killed at any point and begun again anywhere.
Whoever holds the lease acts; all others watch, and take over when it stands still.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from tpuswarm.cloud.errors import Changed, CloudError
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
    Plan,
    Stop,
)
from tpuswarm.fleet.decide.jobs import busy_machines
from tpuswarm.fleet.decide.observe import observe
from tpuswarm.fleet.decide.plan import list_remaining, make_plan
from tpuswarm.fleet.decide.spending import charge
from tpuswarm.fleet.decide.state import FleetState, Observed
from tpuswarm.fleet.keeper.clock import Clock
from tpuswarm.fleet.keeper.idle import IdleTimer
from tpuswarm.fleet.keeper.traffic_meter import TrafficMeter
from tpuswarm.fleet.store.document import MAX_EVENTS, Document, KeeperLease, is_holder_alive, with_events
from tpuswarm.fleet.store.fleets import Store
from tpuswarm.fleet.store.history import History
from tpuswarm.fleet.store.machine_flags import add_flag_metadata
from tpuswarm.train.process.computer import this_computer

IDLE_INTERVAL_S, BUSY_INTERVAL_S = 3.0, 1.0
"""Seconds between two looks, the second while something is under way."""
PERSON_RETRY_S = 300.0
"""Seconds until something is asked again that a person has to mend."""
LEASE_S, RENEW_INTERVAL_S, EVENT_SAVE_INTERVAL_S = 60.0, 15.0, 5.0
"""Seconds after which a lease that stands still has ended, after which its holder renews it, and after which it does so
where something has happened."""
SAFE_LEASE_S = 40.0
"""Seconds after its last renewal in which a holder may act: nobody can have taken over by then."""
MACHINE_VARIABLE = "TPUSWARM_KEEPER_ON"
"""The variable that tells a keeper on a machine of its own fleet what that is called."""
MAX_POLLED = 20
"""Operations asked after in one look."""
MAX_THREADS = 8


@dataclass(frozen=True)
class Tick:
    """What came of one look."""

    document: Document
    observed: Observed
    plan: Plan
    events: tuple[Event, ...]
    leads: bool
    """Whether this keeper acts; else it watches."""
    now: float

    @property
    def left(self) -> list[str]:
        """What there still is of a fleet that comes down."""
        return list_remaining(self.document.desired, self.observed)

    @property
    def done(self) -> bool:
        """Whether a fleet that comes down is gone."""
        return self.document.desired.down is not None and not self.left

    @property
    def converged(self) -> bool:
        """Whether everything that is wanted is there, ready, and nothing else."""
        down = self.document.desired.down is not None
        return not self.plan.actions and not self.observed.state.requests and (self.done if down else self._complete)

    @property
    def _complete(self) -> bool:
        desired = self.document.desired
        ours = [each for each in self.observed.machines if each.fleet == desired.fleet]
        settled = sum(each.state == ("stopped" if each.name in desired.paused else "ready") for each in ours)
        there = {each.name for each in ours}
        wanted = sum(each.count for each in desired.pools) - sum(each not in there for each in desired.paused)
        return settled == len(ours) == wanted


Role = Literal["leads", "holds", "watches"]
"""Of a keeper in one look: it acts; it has the lease, or nobody has, and cannot act now; somebody else leads."""


class DocumentGone(RunFailed):
    """There is no document any more."""


class Keeper:
    """Of one fleet, in one process."""

    def __init__(
        self, provider: Provider, store: Store, history: History, clock: Clock | None = None, threads: int = MAX_THREADS
    ):
        self._provider, self._store, self._history = provider, store, history
        self._clock, self._threads = clock or Clock(), threads
        self._me, self._pid = secrets.token_hex(6), os.getpid()
        self._host = os.environ.get(MACHINE_VARIABLE) or socket.gethostname()
        self._computer = this_computer()
        self._idle, self._carried = IdleTimer(), TrafficMeter(provider)
        self._answers: list[CloudAnswer] = []
        self._memory: FleetState | None = None
        self._seen_beat: tuple[str, int] | None = None
        self._still_since = 0.0
        self._renewed: float | None = None
        """When the lease was written last, by the even clock; None: it is not ours."""
        self._stood_back: float | None = None
        """When it was left to the keeper on the fleet's own machine, by the even clock."""
        self._news: list[Event] = []
        """What is not in the document yet."""
        self._jumped = 0.0
        """By how many seconds the clock has jumped since the document was written last by this keeper."""
        self._told: frozenset[Event] | None = None
        """What the document has told."""

    def tick(self) -> Tick:
        """Look once, and do what is due. Raises CloudError where the cloud cannot be asked."""
        now, steady, jumped = self._clock.look()
        self._jumped += jumped
        self._memory = self._kept(now) if self._memory is None else self._memory.moved(jumped)
        document = self._load()
        told = document.events
        answers = [*self._answers, *self._outcomes()]
        listing = self._provider.machines(dict.fromkeys((*document.desired.zones, *document.zones)))
        memory, events = observe(self._memory, document.desired, listing, answers, now)
        self._memory, self._answers = memory, []
        if jumped:
            events = (Event(now, "", "", "clock", f"the clock has jumped by {jumped:+.0f} s"), *events)
        ledger = replace(document.spending, at=document.spending.at + self._jumped)
        there = Observed(listing, memory)
        ledger = charge(ledger, document.desired, there, now)
        traffic = self._carried.look(document, there.machines, now, steady)
        work = self._idle.look(document.work, document.jobs, now, steady)
        work = replace(work, done=work.done and all(each.is_over for each in document.jobs))
        observed = Observed(listing, memory, ledger.dollars, work, traffic, busy_machines(document.jobs))
        self._news = [*self._news, *events][-MAX_EVENTS:]
        document = with_events(replace(document, spending=ledger, traffic=traffic), self._news)
        found = make_plan(document.desired, observed, now)
        part = self._lead(document, listing, found, steady, now)
        if part == "watches":  # whoever leads knows better what happened
            self._news, self._jumped = [], 0.0
            return Tick(document, observed, found, self._heard(told), False, now)
        self._history.keep(memory, events, now)
        if part == "leads" and found.end:
            document = replace(document, desired=replace(document.desired, down=found.end))
            found = make_plan(document.desired, observed, now)
        if part == "leads":
            self._answers = self._act(_with_flags(each, document) for each in found.actions)
        return Tick(document, observed, found, events, part == "leads", now)

    def _heard(self, told: tuple[Event, ...]) -> tuple[Event, ...]:
        """What the document tells that it did not tell before."""
        before, self._told = self._told, frozenset(told)
        return () if before is None else tuple(each for each in told if each not in before)

    def run(
        self,
        show: Callable[[Tick], None],
        until: Callable[[Tick], bool],
        sleep: Callable[[float], None],
        patient: bool = False,
    ) -> Tick:
        """Tick until `until`; what the cloud does not answer is said and asked again.

        patient: so is what a person has to mend, as nobody may be there to start another keeper; else it is raised.
        """
        failures = 0
        while True:
            try:
                tick = self.tick()
            except CloudError as error:
                for_people = error.exit_code == 2
                if for_people and not patient:
                    raise
                failures += 1
                pause = PERSON_RETRY_S if for_people else min(60.0, BUSY_INTERVAL_S * 2**failures)
                self.say(f"{error}; asked again" + (f" in {pause / 60:.0f} min" if for_people else ""))
                sleep(pause)
                continue
            failures = 0
            show(tick)
            if until(tick):
                return tick
            moving = tick.plan.actions or self._answers or tick.observed.state.requests or self._under_way(tick)
            sleep(BUSY_INTERVAL_S if moving else IDLE_INTERVAL_S)

    def say(self, text: str) -> None:
        """What there is to be said beside the ticks."""
        self.told(f"{time.strftime('%H:%M:%S')} {text}")

    told: Callable[[str], None] = staticmethod(lambda text: None)
    """Takes what is said."""

    def release(self) -> None:
        """Give the lease back, so that the next one need not wait for its end."""
        if self._renewed is None:
            return
        self._renewed = None

        def give(document: Document | None) -> Document:
            if document is None:
                raise DocumentGone(f"{self._store.where} is gone")
            ours = document.lease is not None and document.lease.holder == self._me
            return with_events(replace(document, lease=None), self._news) if ours else document

        self._store.change(give)
        self._news.clear()

    def stand_back(self) -> None:
        """Leave the lease to the keeper on the fleet's own machine, and watch: for as long as it takes it."""
        self.release()
        self._stood_back = self._clock.steady()

    def _load(self) -> Document:
        document = self._store.load()
        if document is None:
            raise DocumentGone(f"{self._store.where} is gone: somebody has deleted it; `tpuswarm up` makes it again")
        return document

    def _kept(self, now: float) -> FleetState:
        """What the last keeper on this computer knew, if it is not old; its times are of the same clock, or nearly."""
        kept = self._history.state()
        if kept is None or not 0 <= now - kept[1] < 600:
            return FleetState()
        return kept[0]

    def _outcomes(self) -> list[CreateResult]:
        """What came of creations; of a few at a time, those first that are in no list."""
        assert self._memory is not None
        seen = self._memory.seen
        asked = [(key, each.operation) for key, each in self._memory.requests.items() if each.operation]
        ended = []
        for key, operation in sorted(asked, key=lambda each: each[0] in seen)[:MAX_POLLED]:
            try:
                outcome = self._provider.outcome(operation)
            except CloudError:
                continue  # the next look asks again
            if outcome.done:
                ended.append(CreateResult(key, outcome.error))
        return ended

    # The lease.

    def _lead(self, document: Document, listing: Listing, found: Plan, steady: float, now: float) -> Role:
        """What this keeper may do now; renews its lease, and stores first what is to end."""
        lease = document.lease
        if lease is None or lease.holder != self._me:
            self._renewed = None
            if not self._may_take(lease, steady) and not _is_away(lease, document, listing):
                return "watches"
        age = LEASE_S if self._renewed is None else steady - self._renewed
        if age >= (EVENT_SAVE_INTERVAL_S if self._news else RENEW_INTERVAL_S) or found.end is not None:
            beat = (lease.beat if lease and lease.holder == self._me else 0) + 1
            desired = replace(document.desired, down=found.end) if found.end else document.desired
            mine = KeeperLease(self._me, self._host, self._pid, beat, now, self._computer)
            zones = tuple(dict.fromkeys((*document.zones, *desired.zones)))
            # Nobody has written since the document was loaded, or this fails: what was listed since then still holds,
            # however long that took.
            renewed = self._clock.steady()
            try:
                self._store.save(replace(document, lease=mine, desired=desired, zones=zones))
            except Changed:
                return "holds"  # somebody wrote meanwhile: the next look shows what
            except CloudError as error:
                self.say(f"the lease cannot be renewed: {error}")
                if found.end:
                    return "holds"
            else:
                self._renewed = renewed
                self._news, self._jumped = [], 0.0
        return "leads" if self._sure() else "holds"

    def _sure(self) -> bool:
        """Whether nobody can have taken the lease over by now, also where this computer has slept meanwhile."""
        return self._renewed is not None and self._clock.steady() - self._renewed < SAFE_LEASE_S

    def _may_take(self, lease: KeeperLease | None, steady: float) -> bool:
        """Whether the lease is free: nobody has it, its process is dead, or it has stood still for long enough."""
        if lease is None:
            return self._stood_back is None or steady - self._stood_back >= LEASE_S
        if is_holder_alive(lease) is False:
            return True
        beat = (lease.holder, lease.beat)
        if beat != self._seen_beat:
            self._seen_beat, self._still_since = beat, steady
        return steady - self._still_since >= LEASE_S

    # Acting.

    def _act(self, actions: Iterable[Action]) -> list[CloudAnswer]:
        todo = list(actions)
        if self._threads == 1 or len(todo) == 1:
            answers = [self._do(each) for each in todo]
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                answers = list(pool.map(self._do, todo))
        return [each for each in answers if each is not None]

    def _do(self, action: Action) -> CloudAnswer | None:
        """What came of it; None: it is too late for that, as another keeper may lead by now."""
        if not self._sure():
            return None
        provider = self._provider
        try:
            if isinstance(action, Create):
                return ActionResult(action, provider.create(action.spec), None)
            if isinstance(action, Delete):
                return ActionResult(action, provider.delete(action.machine), None)
            turn = provider.stop if isinstance(action, Stop) else provider.start
            return ActionResult(action, turn(action.machine), None)
        except CloudError as error:
            return ActionResult(action, None, error)

    def _under_way(self, tick: Tick) -> bool:
        fleet = tick.document.desired.fleet
        settled = ("ready", "stopped", "waiting")
        return any(each.fleet == fleet and each.state not in settled for each in tick.observed.listing.machines)


def _with_flags(action: Action, document: Document) -> Action:
    return action._replace(spec=add_flag_metadata(action.spec, document)) if isinstance(action, Create) else action


def _is_away(lease: KeeperLease | None, document: Document, listing: Listing) -> bool:
    """Whether who has the lease lived on a machine of the fleet that is not there, or does not run, any more."""
    homes = (each.spec for each in document.desired.pools if each.name == document.desired.kept_on)
    home = next(homes, None)
    if home is None or lease is None or lease.host != home.name or home.zone in listing.unreachable:
        return False
    ours = (each for each in listing.machines if each.fleet == home.fleet and each.zone == home.zone)
    return all(each.name != home.name or each.state in ("dead", "stopped", "creating") for each in ours)
