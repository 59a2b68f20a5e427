"""A member's two processes: one trains and never waits for the swarm, one talks and never touches the devices.

They share the books (core/member.py). Only the training process changes parameters; what the other fetched it lays
down in `_arrived`, to be taken up between two steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tpuswarm.swarm.core import member as core
from tpuswarm.swarm.core.member import Adopt, Member
from tpuswarm.swarm.core.messages import Accepted, Granted, Refused
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Header, Identity
from tpuswarm.swarm.effects import Call, Do, Over, Process, Sleep, Unreachable

BEAT = 2.0
"""Seconds between two heartbeats while there is nothing to wait for."""
WAIT = 0.2
"""Seconds between two while a verdict or rows are awaited."""
REFUSALS = 3
"""Refusals of one contribution by a coordinator that knows the incarnation, until it gives up its life."""
IDLE = 0.02
"""Seconds a training process without rows waits before it looks again."""


@dataclass(frozen=True)
class Payload:
    """A contribution on the host, ready to be sent."""

    fragments: tuple[dict[str, Any], ...]
    """Of each fragment its arrays: `s`, or `codes` and `scales`."""
    digests: tuple[str, ...]
    norm: float
    finite: bool


class Holder(Protocol):
    """Who has the arrays: parameters, anchor, inner state, error feedback."""

    def train(self, rows: Rows, progress: tuple[int, int]) -> None:
        """One step on these rows, at this share (of tokens) of the run."""
        ...

    def snapshot(self) -> Any:
        """The parameters as they are, on the devices; training may go on at once."""
        ...

    def payload(self, snapshot: Any, identity: Identity) -> Payload:
        """A snapshot brought to the host and encoded; the same identity and snapshot give the same bytes."""
        ...

    def adopt(self, adopt: Adopt, fragments: Sequence[Any]) -> None:
        """Come to a published version, in the way that `adopt.how` says."""
        ...


@dataclass
class MemberProcesses:
    """One incarnation."""

    books: Member
    holder: Holder
    coordinator: str
    shards: Sequence[str]
    """Addresses; fragment f is with shard f modulo their number."""
    clock: Callable[[], float]
    leaving: bool = False
    """Asked to go: hand in what is done, give the rest back."""
    ended: bool = False
    """The run is over."""
    _snapshot: Any = None
    """Taken and not yet encoded."""
    _pushed: tuple[Header, Payload] | None = None
    """The last contribution, kept until the next: a coordinator that does not know it asks for it again."""
    _arrived: tuple[Adopt, int, Sequence[Any]] | None = None
    _speed: "Speed" = field(default_factory=lambda: Speed())

    def train(self) -> Process:
        """Steps, snapshots and adoptions, until the run ends; raises Over when this incarnation has to end."""
        while not self.ended:
            if self._arrived:
                if core.fits(self.books, self._arrived[0]):
                    yield from self._take_up(*self._arrived)
                self._arrived = None
            if self.books.push_due or (self.leaving and self.books.outstanding and not self.books.undecided):
                self._snapshot = yield Do("member takes a snapshot", self.holder.snapshot)
                self.books = core.snapshot(self.books)
            rows = self.books.next_rows
            if not rows or self.leaving:
                yield Sleep(IDLE)
                continue
            start = self.clock()
            yield Do("member trains", partial(self.holder.train, rows, self.books.progress))
            self.books = core.trained(self.books, rows)
            self._speed.add(len(rows), self.clock() - start)

    def exchange(self) -> Process:
        """Heartbeats, pushes and news, until the run ends; raises Over when this incarnation has to end."""
        while not self.ended:
            if self._snapshot is not None:
                yield from self._encode()
                yield from self._push()
            reply = yield from self._beat()
            if reply is not None:
                if reply.unknown and self._pushed and self._snapshot is None:
                    yield from self._push()
                self.ended = reply.ended
                adopt = core.news(self.books, reply)
                if adopt and self._arrived is None:
                    yield from self._fetch(adopt, reply.tokens)
            if self.leaving and self._snapshot is None and (self.books.undecided or not self.books.outstanding):
                yield from self._until_answered(Call(self.coordinator, "leave", (self.books.incarnation,)))
                raise Over("left in good order")
            waiting = self.books.undecided is not None or not self.books.todo
            yield Sleep(WAIT if waiting else BEAT)

    def _take_up(self, adopt: Adopt, tokens: int, fragments: Sequence[Any]) -> Process:
        yield Do("member adopts", lambda: self.holder.adopt(adopt, fragments))
        if adopt.how == "fresh":
            raise Over("its numbers were not finite")
        self.books = core.adopted(self.books, adopt, tokens)

    def _beat(self) -> Process:
        heard = self.books.heard
        try:
            said = core.beat(self.books, self._speed.rows_per_s)
            reply: Granted | Refused = yield Call(self.coordinator, "beat", (said,))
        except Unreachable:
            return None
        if isinstance(reply, Refused):
            raise Over(reply.reason)
        self.books = core.granted(self.books, reply, heard)
        return reply

    def _encode(self) -> Process:
        snapshot, undecided = self._snapshot, self.books.undecided
        assert undecided is not None
        payload = yield Do("member encodes", lambda: self.holder.payload(snapshot, undecided.identity))
        self.books, header = core.header(self.books, payload.norm, payload.finite, payload.digests)
        self._snapshot, self._pushed = None, (header, payload)

    def _push(self) -> Process:
        """Bring the payload to the shards, then its header to the coordinator; again until it is accepted."""
        assert self._pushed is not None
        header, payload = self._pushed
        refusals = 0
        for number, arrays in enumerate(payload.fragments):
            shard = self.shards[number % len(self.shards)]
            put = Call(shard, "put", (header.identity, number, arrays, payload.digests[number]))
            while not isinstance(answer := (yield from self._until_answered(put)), Accepted):
                if isinstance(answer, Refused):
                    raise Over(answer.reason)
                yield Sleep(WAIT)
        while True:
            answer = yield from self._until_answered(Call(self.coordinator, "push", (header,)))
            if isinstance(answer, Accepted):
                return
            # A new coordinator has to be told first what this incarnation holds.
            if (yield from self._beat()) is not None:
                refusals += 1
            if refusals > REFUSALS:
                raise Over(answer.reason)
            yield Sleep(WAIT)

    def _until_answered(self, call: Call) -> Process:
        while True:
            try:
                return (yield call)
            except Unreachable:
                yield Sleep(WAIT)

    def _fetch(self, adopt: Adopt, tokens: int) -> Process:
        fragments = []
        for number, digest in enumerate(adopt.state):
            shard = self.shards[number % len(self.shards)]
            fragments.append((yield from self._until_answered(Call(shard, "fetch", (number, digest)))))
        self._arrived = (adopt, tokens, fragments)


@dataclass
class Speed:
    """Rows a second, the newest steps counting most."""

    rows_per_s: float | None = None

    def add(self, rows: int, seconds: float) -> None:
        """One step."""
        now = rows / max(seconds, 1e-9)
        self.rows_per_s = now if self.rows_per_s is None else 0.9 * self.rows_per_s + 0.1 * now
