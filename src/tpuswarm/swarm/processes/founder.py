"""What the coordinator's process serves: the founding of a run, then the coordinator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from tpuswarm.swarm.core.messages import Accepted, Beat, Granted, Refused, Terms
from tpuswarm.swarm.core.state import disagreement
from tpuswarm.swarm.core.summary import Summary, summary
from tpuswarm.swarm.core.values import Digests, Header, Incarnation, Record
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Do, Over, Process, Sleep
from tpuswarm.swarm.processes.plan import Founding, Plan
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

FOUNDING = "founding.json"
FOUNDER = 120.0
"""Seconds that a founder has; it has compiled its program before."""
LOOK = 0.2
_FOUNDING: TypeAdapter[Founding] = TypeAdapter(Founding)


@dataclass(frozen=True)
class Found:
    """Answer to a hello: there is no first state yet; make it."""


@dataclass(frozen=True)
class Wait:
    """Answer to a hello: another member makes the first state, or the coordinator reads its ledger."""


@dataclass(frozen=True)
class Joining:
    """Answer to a hello: what the run is, and its newest version."""

    terms: Terms
    founding: Founding
    version: int
    tokens: int
    state: tuple[str, ...]


class Head:
    """One life of the coordinator's process."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        shards: Sequence[str],
        clock: Callable[[], float],
        time: Callable[[], float],
        *,
        alone: bool,
    ):
        """alone: no member of an earlier epoch can be alive, so that nobody is waited for."""
        self._plan, self._store, self._ledger = plan, store, Ledger(store)
        self._shards, self._clock, self._time, self._alone = tuple(shards), clock, time, alone
        self._founding: Founding | None = None
        self._founder: tuple[str, float] | None = None
        self._coordinator: Coordinator | None = None

    def run(self) -> Process:
        """Until the end of the run; raises Over where another coordinator rules."""
        founded = False
        while (founding := (yield Do("coordinator reads the founding", lambda: read_founding(self._store)))) is None:
            founded = True
            yield Sleep(LOOK)
        shards = self._shards[: len(founding.fragments)]
        terms = self._plan.terms(founding)
        coordinator = Coordinator(
            terms, self._ledger, shards, self._clock, self._time, founded=founded, alone=self._alone
        )
        yield from coordinator.open()
        newest = coordinator.state.view.newest
        if newest.run != terms.run:
            raise Over(
                f"{self._store.root} has commits of run {newest.run}, this is run {terms.run}; use another --run"
            )
        if newest.digests.layout != founding.layout.digest:
            raise Over(f"{self._store.root} has commits with another layout than its {FOUNDING}; use another --run")
        self._founding, self._coordinator = founding, coordinator
        yield from coordinator.run()

    def hello(self, member: str, makes: bool = True) -> Joining | Found | Wait:
        """What a member does first; makes: it could make the first state now."""
        if self._coordinator and self._founding:
            newest = self._coordinator.state.view.newest
            return Joining(self._coordinator.state.terms, self._founding, newest.version, newest.tokens, newest.state)
        now = self._clock()
        if not makes or (self._plan.members and member not in self._plan.members):
            return Wait()  # what makes the run is one of those that it was started with, where there are any
        if self._founder is None or self._founder[0] == member or now > self._founder[1]:
            self._founder = (member, now + FOUNDER)
            return Found()
        return Wait()

    def found(self, founding: Founding, state: tuple[str, ...], outer: tuple[str, ...], digests: Digests) -> Process:
        """Create the first record, once: whoever comes second finds it there, and goes on with it.

        The record comes before the founding: what a kill between them leaves is a run without members, whose layout
        the next founder reports. Refused to a founder of another run.
        """
        terms = self._plan.terms(founding)
        if digests != terms.digests:
            return Refused(disagreement(digests, terms.digests))
        record = Record(
            run=terms.run, version=0, epoch=1, parent="", state=state, outer=outer, decisions=(),
            rule=terms.outer.rule, rate=0.0, momentum=terms.outer.momentum, share=0.0, gathered=0.0, tokens=0,
            changes=0, processed=(), digests=terms.digests, time=self._time(), averaged=terms.outer.averaged,
            kept=1.0 if terms.outer.average else None,
        )  # fmt: skip
        outcome = yield Do("coordinator creates genesis", lambda: self._ledger.append(record))
        if outcome == "lost":
            there = yield Do("coordinator reads genesis", lambda: self._ledger.record(0))
            if (there.run, there.digests.layout) != (terms.run, digests.layout):
                return Refused(f"commit 0 in {self._store.root} belongs to another run; use another --run")
        data = _FOUNDING.dump_json(founding)
        yield Do("coordinator keeps the founding", lambda: self._store.create(FOUNDING, data))
        return Accepted()

    def beat(self, said: Beat) -> Granted | Refused | None:
        """A member's hello, announcement or heartbeat; None while the ledger is being read."""
        return self._coordinator.beat(said) if self._coordinator else None

    def push(self, header: Header) -> Process:
        """Accept a contribution whose payload is stored, or say why not; None while the ledger is being read."""
        if self._coordinator is None:
            return None
        return (yield from self._coordinator.push(header))

    def leave(self, incarnation: Incarnation) -> None:
        """A member goes in good order."""
        if self._coordinator:
            self._coordinator.leave(incarnation)

    def look(self) -> Summary | None:
        """How the run stands; None before its first state."""
        return summary(self._coordinator.state, self._coordinator.clock()) if self._coordinator else None


def read_founding(store: Store) -> Founding | None:
    """The founding of a run; None before it. Raises Corrupt where it is none."""
    try:
        return _FOUNDING.validate_json(store.read(FOUNDING))
    except Missing:
        return None
    except ValidationError as error:
        raise Corrupt(FOUNDING, store.root, error.errors()[0]["msg"]) from error
