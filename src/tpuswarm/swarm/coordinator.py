"""The coordinator's process: the state machine of core/coordinator.py with the ledger and the shards around it."""

from collections.abc import Callable, Sequence

from tpuswarm.swarm.core import coordinator as core
from tpuswarm.swarm.core.messages import Accepted, Beat, Granted, Lost, Merge, Outdated, Refused, Store, Terms
from tpuswarm.swarm.core.values import Header, Identity, Incarnation, Record
from tpuswarm.swarm.effects import Call, Do, Over, Process, Sleep, Unreachable
from tpuswarm.swarm.ledger import Ledger

LOOK = 0.5
"""Seconds between two looks at the clock, at most."""


class Coordinator:
    """One life of a coordinator. `open` first; then `run` beside the methods that members call."""

    def __init__(
        self,
        terms: Terms,
        ledger: Ledger,
        shards: Sequence[str],
        clock: Callable[[], float],
        time: Callable[[], float],
        *,
        founded: bool,
    ):
        """clock: seconds that never jump, for leases and rounds; time: seconds since 1970, for the record."""
        self._terms, self._ledger, self._shards = terms, ledger, tuple(shards)
        self._clock, self._time, self._founded = clock, time, founded
        self.state: core.State

    def open(self) -> Process:
        """Read the ledger and the stored headers: everything accepted is accepted, whoever is alive."""
        view = yield Do("coordinator reads the ledger", self._ledger.view)
        headers = yield Do("coordinator lists headers", lambda: self._ledger.headers(view.verdicts))
        self.state = core.start(self._terms, view, headers, self._clock(), founded=self._founded)

    def beat(self, said: Beat) -> Granted | Refused:
        """A member's hello, announcement or heartbeat."""
        self.state, answer = core.beat(self.state, said, self._clock())
        if isinstance(answer, Outdated):
            raise _outruled(answer)
        return answer

    def push(self, header: Header) -> Process:
        """Accept a contribution whose payload is stored, or say why not."""
        self.state, answer = core.push(self.state, header, self._clock())
        if isinstance(answer, Outdated):
            raise _outruled(answer)
        if not isinstance(answer, Store):
            return answer
        outcome = yield Do("coordinator creates a header", lambda: self._ledger.create_header(header))
        if outcome == "lost":
            return Refused("another contribution of the same identity is stored")
        self.state = core.stored(self.state, header, self._clock())
        return Accepted()

    def leave(self, incarnation: Incarnation) -> None:
        """A member goes in good order."""
        self.state = core.leave(self.state, incarnation)

    def run(self) -> Process:
        """Rounds, one after the other, until the end of the run; raises Over where another coordinator rules."""
        while not self.state.ended:
            self.state, merge, when = core.tick(self.state, self._clock())
            if merge:
                yield from self._commit(merge)
            else:
                yield Sleep(max(0.0, min(LOOK, when.look_at - self._clock())))

    def _commit(self, merge: Merge) -> Process:
        while True:
            parts = yield from self._merge(merge)
            lost = frozenset[Identity]().union(*(part.identities for part in parts if isinstance(part, Lost)))
            if not lost:
                break
            self.state, merge = core.unreadable(self.state, lost)
        state = {number: digest for part in parts for number, digest in part.state.items()}
        outer = {number: digest for part in parts for number, digest in part.outer.items()}
        record = core.merged(
            self.state,
            self._ledger.digest(self.state.view.newest),
            tuple(state[number] for number in sorted(state)),
            tuple(outer[number] for number in sorted(outer)),
            self._time(),
        )
        outcome = yield Do("coordinator creates a record", lambda: self._ledger.append(record))
        if outcome == "lost":
            raise Over(f"another coordinator made record {record.version}; this one leaves")
        self.state = core.committed(self.state, record)

    def _merge(self, merge: Merge) -> Process:
        """Of each shard its part; a shard that does not answer is asked again."""
        newest: Record = self.state.view.newest
        parts = []
        for shard in self._shards:
            while True:
                try:
                    parts.append((yield Call(shard, "merge", (newest, merge))))
                    break
                except Unreachable:
                    yield Sleep(LOOK)
        return parts


def _outruled(answer: Outdated) -> Over:
    return Over(f"a member is at version {answer.version}: another coordinator rules, this one leaves")
