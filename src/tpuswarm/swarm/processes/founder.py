"""What the coordinator's process serves: the founding of a run, and from then on the coordinator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpuswarm.swarm.core.messages import Accepted, Refused, Terms
from tpuswarm.swarm.core.state import disagreement
from tpuswarm.swarm.core.values import Digests, Record
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Do, Over, Process, Sleep
from tpuswarm.swarm.processes.plan import Plan
from tpuswarm.swarm.storage.founding import FOUNDING, Founding, keep_founding, read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store

FOUNDER = 120.0
"""Seconds that a founder has; it has compiled its program before."""
LOOK = 0.2


@dataclass(frozen=True)
class Begin:
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


class FoundingCoordinator(Coordinator):
    """A coordinator that waits for the founding of its run; the methods that members call first."""

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
        super().__init__(Ledger(store), shards, clock, time)
        self._plan, self._store, self._alone = plan, store, alone
        self._founding: Founding | None = None
        self._unfounded = False
        """Whether it was looked for, and is not there yet."""
        self._founder: tuple[str, float] | None = None

    def run(self) -> Process:
        """Until the end of the run; raises Over where another coordinator rules."""
        founded = False
        while (founding := (yield Do("coordinator reads the founding", lambda: read_founding(self._store)))) is None:
            founded = self._unfounded = True
            yield Sleep(LOOK)
        self._unfounded = False
        self._shards = self._shards[: len(founding.fragments)]
        terms = self._plan.terms(founding)
        yield from self.open(terms, founded=founded, alone=self._alone)
        newest = self.state.view.newest
        if newest.run != terms.run:
            raise Over(
                f"{self._store.root} has commits of run {newest.run}, this is run {terms.run}; use another --run"
            )
        if newest.digests.layout != founding.layout.digest:
            raise Over(f"{self._store.root} has commits with another layout than its {FOUNDING}; use another --run")
        self._founding = founding
        yield from super().run()

    def hello(self, member: str, makes: bool = True) -> Joining | Begin | Wait:
        """What a member does first; makes: it could make the first state now."""
        if self._founding:
            newest = self.state.view.newest
            return Joining(self.state.terms, self._founding, newest.version, newest.tokens, newest.state)
        now = self.clock()
        if not self._unfounded or not makes or (self._plan.members and member not in self._plan.members):
            return Wait()  # what makes the run is one of those that it was started with, where there are any
        if self._founder is None or self._founder[0] == member or now > self._founder[1]:
            self._founder = (member, now + FOUNDER)
            return Begin()
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
        yield Do("coordinator keeps the founding", lambda: keep_founding(self._store, founding))
        return Accepted()
