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

from tpuswarm.cloud.errors import Changed, CloudError
from tpuswarm.cloud.protocol import Provider
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.core.actions import Action, Answer, Called, Create, Delete, Ended, Event, Plan, Stop
from tpuswarm.fleet.core.ledger import charge
from tpuswarm.fleet.core.memory import Memory, Observed
from tpuswarm.fleet.core.plan import left, plan
from tpuswarm.fleet.core.remember import remember
from tpuswarm.fleet.keeping.clock import Clock
from tpuswarm.fleet.keeping.document import Document, Lease, with_events
from tpuswarm.fleet.keeping.fleets import Held
from tpuswarm.fleet.keeping.history import History

SETTLED, MOVING = 3.0, 1.0
"""Seconds between two looks, the second while something is under way."""
TERM, RENEWED, NEWS = 60.0, 15.0, 5.0
"""Seconds after which a lease that stands still has ended, after which its holder renews it, and after which it does so
where something has happened."""
SURE = 40.0
"""Seconds after its last renewal in which a holder may act: nobody can have taken over by then."""
POLLED = 20
"""Operations asked after in one look."""
THREADS = 8


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
        return left(self.document.desired, self.observed)

    @property
    def done(self) -> bool:
        """Whether a fleet that comes down is gone."""
        return self.document.desired.down is not None and not self.left

    @property
    def converged(self) -> bool:
        """Whether everything that is wanted is there, ready, and nothing else."""
        down = self.document.desired.down is not None
        return not self.plan.actions and not self.observed.memory.asked and (self.done if down else self._complete)

    @property
    def _complete(self) -> bool:
        desired = self.document.desired
        ours = [each for each in self.observed.machines if each.fleet == desired.fleet]
        settled = sum(each.state == ("stopped" if each.name in desired.paused else "ready") for each in ours)
        there = {each.name for each in ours}
        wanted = sum(each.count for each in desired.pools) - sum(each not in there for each in desired.paused)
        return settled == len(ours) == wanted


class Gone(RunFailed):
    """There is no document any more."""


class Keeper:
    """Of one fleet, in one process."""

    def __init__(
        self, provider: Provider, store: Held, history: History, clock: Clock | None = None, threads: int = THREADS
    ):
        self._provider, self._store, self._history = provider, store, history
        self._clock, self._threads = clock or Clock(), threads
        self._me, self._host, self._pid = secrets.token_hex(6), socket.gethostname(), os.getpid()
        self._answers: list[Answer] = []
        self._memory: Memory | None = None
        self._seen_beat: tuple[str, int] | None = None
        self._still_since = 0.0
        self._renewed: float | None = None
        """When the lease was written last, by the even clock; None: it is not ours."""
        self._news: list[Event] = []
        """What is not in the document yet."""
        self._told: frozenset[Event] | None = None
        """What the document has told."""

    def tick(self) -> Tick:
        """Look once, and do what is due. Raises CloudError where the cloud cannot be asked."""
        now, steady, jumped = self._clock.look()
        document = self._load()
        told = document.events
        if self._memory is None:
            self._memory = self._kept(now)
        elif jumped:
            self._memory = self._memory.moved(jumped)
        answers = [*self._answers, *self._outcomes()]
        listing = self._provider.machines(dict.fromkeys((*document.desired.zones, *document.zones)))
        memory, events = remember(self._memory, document.desired, listing, answers, now)
        self._memory, self._answers = memory, []
        if jumped:
            events = (Event(now, "", "", "clock", f"the clock has jumped by {jumped:+.0f} s"), *events)
        at = document.ledger.at + jumped if jumped else document.ledger.at
        ledger = charge(replace(document.ledger, at=at), document.desired, Observed(listing, memory), now)
        observed = Observed(listing, memory, ledger.dollars, document.work)
        self._news += events
        document = with_events(replace(document, ledger=ledger), self._news)
        found = plan(document.desired, observed, now)
        leads = self._lead(document, found, steady, now)
        if leads and found.end:
            document = replace(document, desired=replace(document.desired, down=found.end))
            found = plan(document.desired, observed, now)
        if leads:
            self._history.keep(memory, events, now)
            self._answers = self._act(found.actions)
        else:  # whoever leads knows better what happened
            self._news.clear()
            events = self._heard(told)
        return Tick(document, observed, found, events, leads, now)

    def _heard(self, told: tuple[Event, ...]) -> tuple[Event, ...]:
        """What the document tells that it did not tell before."""
        before, self._told = self._told, frozenset(told)
        return () if before is None else tuple(each for each in told if each not in before)

    def run(self, show: Callable[[Tick], None], until: Callable[[Tick], bool], sleep: Callable[[float], None]) -> Tick:
        """Tick until `until`; what the cloud does not answer is said and asked again."""
        failures = 0
        while True:
            try:
                tick = self.tick()
            except CloudError as error:
                if error.exit_code == 2:  # a person has to do something
                    raise
                failures += 1
                self.say(f"{error}; asked again")
                sleep(min(60.0, MOVING * 2**failures))
                continue
            failures = 0
            show(tick)
            if until(tick):
                return tick
            moving = tick.plan.actions or self._answers or tick.observed.memory.asked or self._under_way(tick)
            sleep(MOVING if moving else SETTLED)

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
                raise Gone(f"{self._store.where} is gone")
            ours = document.lease is not None and document.lease.holder == self._me
            return with_events(replace(document, lease=None), self._news) if ours else document

        self._store.change(give)
        self._news.clear()

    def _load(self) -> Document:
        document = self._store.load()
        if document is None:
            raise Gone(f"{self._store.where} is gone: somebody has deleted it; `tpuswarm up` makes it again")
        return document

    def _kept(self, now: float) -> Memory:
        """What the last keeper on this computer knew, if it is not old; its times are of the same clock, or nearly."""
        kept = self._history.memory()
        if kept is None or not 0 <= now - kept[1] < 600:
            return Memory()
        return kept[0]

    def _outcomes(self) -> list[Ended]:
        """What came of creations; of a few at a time, those first that are in no list."""
        assert self._memory is not None
        seen = self._memory.seen
        asked = [(key, each.operation) for key, each in self._memory.asked.items() if each.operation]
        ended = []
        for key, operation in sorted(asked, key=lambda each: each[0] in seen)[:POLLED]:
            try:
                outcome = self._provider.outcome(operation)
            except CloudError:
                continue  # the next look asks again
            if outcome.done:
                ended.append(Ended(key, outcome.error))
        return ended

    # The lease.

    def _lead(self, document: Document, found: Plan, steady: float, now: float) -> bool:
        """Whether this keeper may act now; renews its lease, and stores first what is to end."""
        lease = document.lease
        if lease is None or lease.holder != self._me:
            self._renewed = None
            if not self._may_take(lease, steady):
                return False
        age = TERM if self._renewed is None else steady - self._renewed
        if age >= (NEWS if self._news else RENEWED) or found.end is not None:
            beat = (lease.beat if lease and lease.holder == self._me else 0) + 1
            desired = replace(document.desired, down=found.end) if found.end else document.desired
            mine = Lease(self._me, self._host, self._pid, beat, now)
            zones = tuple(dict.fromkeys((*document.zones, *desired.zones)))
            try:
                self._store.save(replace(document, lease=mine, desired=desired, zones=zones))
            except Changed:
                return False  # somebody wrote meanwhile: the next look shows what
            except CloudError as error:
                self.say(f"the lease cannot be renewed: {error}")
            else:
                self._renewed = steady
                self._news.clear()
        if self._renewed is None or (found.end and self._renewed != steady):
            return False
        return steady - self._renewed < SURE

    def _may_take(self, lease: Lease | None, steady: float) -> bool:
        """Whether the lease is free: nobody has it, its process is dead, or it has stood still for long enough."""
        if lease is None or (lease.host == self._host and not _alive(lease.pid)):
            return True
        beat = (lease.holder, lease.beat)
        if beat != self._seen_beat:
            self._seen_beat, self._still_since = beat, steady
        return steady - self._still_since >= TERM

    # Acting.

    def _act(self, actions: Iterable[Action]) -> list[Answer]:
        todo = list(actions)
        if self._threads == 1 or len(todo) == 1:
            return [self._do(each) for each in todo]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._do, todo))

    def _do(self, action: Action) -> Answer:
        provider = self._provider
        try:
            if isinstance(action, Create):
                return Called(action, provider.create(action.spec), None)
            if isinstance(action, Delete):
                return Called(action, provider.delete(action.machine), None)
            turn = provider.stop if isinstance(action, Stop) else provider.start
            return Called(action, turn(action.machine), None)
        except CloudError as error:
            return Called(action, None, error)

    def _under_way(self, tick: Tick) -> bool:
        fleet = tick.document.desired.fleet
        settled = ("ready", "stopped", "waiting")
        return any(each.fleet == fleet and each.state not in settled for each in tick.observed.listing.machines)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
