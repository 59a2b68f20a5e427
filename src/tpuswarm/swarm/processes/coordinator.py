"""The coordinator's process: the state machine of core/state.py with the ledger and the shards around it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core import state as core
from tpuswarm.swarm.core.known import State
from tpuswarm.swarm.core.messages import (
    Accepted,
    Beat,
    Damage,
    Granted,
    Lost,
    Merge,
    Outdated,
    Refused,
    StoreHeader,
    Terms,
)
from tpuswarm.swarm.core.summary import Summary, summary
from tpuswarm.swarm.core.values import Header, Identity, Incarnation
from tpuswarm.swarm.core.view import View
from tpuswarm.swarm.processes.clock import Clock
from tpuswarm.swarm.processes.effects import Call, Do, Over, Process, Sleep, Together, Unreachable
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.verify import newest_whole
from tpuswarm.train.process.terminal import say

LOOK = 0.5
"""Seconds between two looks at the clock, at most."""
LEAST = 0.001
"""Seconds between two, at least: a shorter wait may be lost in rounding."""


class Coordinator:
    """One life of a coordinator. `open` first; then `run` beside the methods that members call."""

    def __init__(self, ledger: Ledger, shards: Sequence[str], clock: Callable[[], float], time: Callable[[], float]):
        """clock: seconds that never jump, for leases and rounds; time: seconds since 1970, for the record."""
        self._ledger, self._shards = ledger, tuple(shards)
        self.clock, self._time, self._founded = Clock(clock), time, False
        self.opened = False
        self.state: State
        """Once it is opened."""

    def open(self, terms: Terms, *, founded: bool, alone: bool = False) -> Process:
        """Read the ledger and the stored headers: everything accepted is accepted, whoever is alive.

        founded: genesis was created a moment ago; alone: no member of an earlier epoch can be alive.
        """
        self._founded = founded
        view = yield Do("coordinator reads the ledger", self._ledger.view)
        headers = yield Do("coordinator lists headers", lambda: self._ledger.headers(view))
        self.state = core.start(terms, view, headers, self.clock(), founded=founded, alone=alone)
        self.opened = True

    def beat(self, said: Beat) -> Granted | Refused | None:
        """A member's hello, announcement or heartbeat; None while the ledger is being read."""
        if not self.opened:
            return None
        self.state, answer = core.beat(self.state, said, self.clock())
        if isinstance(answer, Outdated):
            raise _outruled(answer)
        return answer

    def push(self, header: Header) -> Process:
        """Accept a contribution whose payload is stored, or say why not; None while the ledger is being read."""
        if not self.opened:
            return None
        self.state, answer = core.push(self.state, header)
        if isinstance(answer, Outdated):
            raise _outruled(answer)
        if not isinstance(answer, StoreHeader):
            return answer
        outcome = yield Do("coordinator creates a header", lambda: self._ledger.create_header(header))
        if outcome == "lost":
            return Refused("a different push with the same identity is stored")
        self.state = core.stored(self.state, header, self.clock())
        return Accepted()

    def leave(self, incarnation: Incarnation) -> None:
        """A member goes in good order."""
        if self.opened:
            self.state = core.leave(self.state, incarnation)

    def look(self) -> Summary | None:
        """How the run stands; None before its first state."""
        return summary(self.state, self.clock()) if self.opened else None

    def run(self) -> Process:
        """Rounds, one after the other, until the end of the run.

        Raises Over where another coordinator rules, and where the newest version is damaged.
        """
        if not self._founded:
            yield from self._from_shards("check", self.state.view.newest)
        while not self.state.ended:
            self.state, merge, when = core.tick(self.state, self.clock())
            if merge:
                yield from self._commit(merge)
            else:
                yield Sleep(max(LEAST, min(LOOK, when.look_at - self.clock())))

    def _commit(self, merge: Merge) -> Process:
        while True:
            parts = yield from self._from_shards("merge", self.state.view.newest, merge)
            lost = frozenset[Identity]().union(*(part.identities for part in parts if isinstance(part, Lost)))
            if not lost:
                break
            self.state, merge = core.unreadable(self.state, lost)
        state = {number: digest for part in parts for number, digest in part.state.items()}
        outer = {number: digest for part in parts for number, digest in part.outer.items()}
        updates = {number: digest for part in parts for number, digest in part.updates.items()}
        record = core.merged(
            self.state,
            self._ledger.digest(self.state.view.newest),
            _in_order(state),
            _in_order(outer),
            _in_order(updates),
            self._time(),
        )
        self.state.view.after(record)  # raises, before it is there for ever, where it does not follow
        outcome = yield Do("coordinator creates a record", lambda: self._ledger.append(record))
        if outcome == "lost":
            raise Over(f"another coordinator wrote record {record.version}; this one stops")
        self.state = core.committed(self.state, record)
        if self._ledger.bookmark_due(self.state.view):
            yield Do("coordinator leaves a bookmark", partial(self._leave_bookmark, self.state.view))

    def _leave_bookmark(self, view: View) -> None:
        """Without it the next start reads more records: no reason to end this one, whatever the storage says."""
        try:
            self._ledger.bookmark(view)
        except RunFailed as error:
            say(f"no bookmark at commit {view.version}: {error}", err=True)

    def _from_shards(self, method: str, *arguments: Any) -> Process:
        """Of each shard its answer, all at work together; one that does not answer is asked again."""
        found: dict[str, Any] = {}
        while left := [shard for shard in self._shards if shard not in found]:
            answers = yield Together(tuple(Call(shard, method, arguments) for shard in left))
            for shard, answer in zip(left, answers, strict=True):
                if isinstance(answer, Damage):
                    raise Over((yield Do("coordinator looks for a whole version", partial(self._advice, answer))))
                if not isinstance(answer, Unreachable):
                    found[shard] = answer
            if len(found) < len(self._shards):
                yield Sleep(LOOK)
        return list(found.values())

    def _advice(self, damage: Damage) -> str:
        """What is wrong with the newest version, and from which one the run could go on."""
        try:
            whole = f"commit {newest_whole(self._ledger.store)} is the newest that is intact"
        except RunFailed as error:
            whole = str(error)
        return f"commit {self.state.view.version} is damaged: {damage.reason}; {whole}"


def _in_order(digests: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(digests[number] for number in sorted(digests))


def _outruled(answer: Outdated) -> Over:
    return Over(f"a member is at commit {answer.version}: another coordinator is in charge; this one stops")
