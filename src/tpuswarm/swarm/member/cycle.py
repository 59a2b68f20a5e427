"""A member's three processes: `train` never waits for the swarm, `exchange` brings pushes there and versions back, and
`heartbeats` keep the lease while `exchange` is busy with one of these.

They share the books (core/books.py). Only `train` changes parameters: it lays a snapshot down in `_snapshot`, to be
pushed, and takes up between two steps what `exchange` has laid down in `_arrived`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tpuswarm.swarm.core import books as core
from tpuswarm.swarm.core.books import Adopt, Member
from tpuswarm.swarm.core.messages import Accepted, Gone, Granted, Refused
from tpuswarm.swarm.core.values import Header, Identity
from tpuswarm.swarm.member.contract import Evaluated, Holder, Payload
from tpuswarm.swarm.member.pace import Speed
from tpuswarm.swarm.processes.effects import Call, Do, Over, Process, Sleep, Together, Unreachable

BEAT = 2.0
"""Seconds between two heartbeats while there is nothing to wait for."""
LATE = 1.5
"""Times the seconds between two after which one is late: `exchange`, which hears the news, must come first."""
SOON = 0.01
"""Seconds that are not waited for."""
WAIT = 0.2
"""Seconds between two while a verdict or rows are awaited."""
REFUSALS = 3
"""Refusals of one contribution by a coordinator that knows the incarnation, until it gives up its life; and arrivals of
its payload at a shard with other bytes than were sent.
"""
IDLE = 0.02
"""Seconds a training process without rows waits before it looks again."""
EVALUATES = "member evaluates"
FIRST = 600.0
"""Seconds in which what the devices do for the first time may be compiled."""


@dataclass
class MemberProcesses:
    """One incarnation."""

    books: Member
    holder: Holder
    coordinator: str
    shards: Sequence[str]
    """Addresses; fragment f is with shard f modulo their number."""
    clock: Callable[[], float]
    anchor: Sequence[Any] | None = None
    """What a quantized downlink adds to: the fragments of the version brought here last, at first of `books.base`.

    None: the next version is fetched whole.
    """
    say: Callable[[str], None] = lambda sentence: None
    """Told what a user may want to know."""
    leaving: bool = False
    """Asked to go: hand in what is done, give the rest back."""
    ended: bool = False
    """The run is over."""
    evaluate_every: int | None = None
    """Tokens counted between two evaluations; None: there are none."""
    evaluated: Callable[[Evaluated], None] = lambda found: None
    """Told of an evaluation."""
    _accepted: Identity | None = None
    """The last contribution that was."""
    _snapshot: Any = None
    """Taken and not yet encoded."""
    _pushed: tuple[Header, Payload] | None = None
    """The last contribution, kept until the next: a coordinator that does not know it asks for it again."""
    _arrived: tuple[Adopt, int, Any, Any | None] | None = None
    _anchored: int = field(init=False)
    """The version of `anchor`."""
    _busy: dict[str, float] = field(default_factory=dict)
    """What the devices are at, and since when."""
    _done: set[str] = field(default_factory=set)
    """What they have done before."""
    _speed: Speed = field(default_factory=Speed)
    _said_at: float = -math.inf
    """When the last heartbeat was sent."""
    _apart: float = 0.0
    """Seconds between two, at least, as the coordinator asked."""

    def __post_init__(self) -> None:
        self._anchored = self.books.base

    @property
    def rows_per_s(self) -> float | None:
        """While there are rows to train; None until a step was measured."""
        return self._speed.rows_per_s

    @property
    def stalled(self) -> float:
        """Seconds for which the devices have been at one thing, those in which it may be compiled left out."""
        now = self.clock()
        return max((now - at - FIRST * (name not in self._done) for name, at in list(self._busy.items())), default=0.0)

    @property
    def at_risk(self) -> int:
        """Rows whose work would be lost if this process died now: trained since the last accepted push."""
        books = self.books
        accepted = books.undecided is not None and books.undecided.identity == self._accepted
        return len(books.undecided.after if books.undecided and accepted else books.outstanding)

    def train(self) -> Process:
        """Steps, snapshots and adoptions, until the run ends; raises Over when this incarnation has to end."""
        if self.books.base > 0:
            self.holder.ramp()
        while not self.ended:
            if self._arrived:
                if core.fits(self.books, self._arrived[0]):
                    yield from self._take_up(*self._arrived)
                self._arrived = None
            last = self.leaving and (self.books.undecided or self.books.whole)  # else a batch of the run is half done
            if self.books.push_due or (last and self.books.outstanding and not self.books.undecided):
                yield from self._take_snapshot()
            rows = self.books.next_rows
            if not rows or last:
                yield from self._settle()
                yield Sleep(IDLE)
                continue
            self._speed.begins(len(rows), self.clock())
            step = partial(self.holder.train, rows, self.books.progress, self.books.todo - rows)
            done = yield from self._on_devices("member trains", step)
            self._speed.ends(done, self.clock())
            self.books = core.trained(self.books, rows)

    def exchange(self) -> Process:
        """Heartbeats, pushes and news, until the run ends; raises Over when this incarnation has to end."""
        while not self.ended:
            if self._snapshot is not None:
                yield from self._encode()
                yield from self._push()
            reply = (yield from self._beat()) if self._until_beat <= SOON else None
            if reply is not None:
                if reply.unknown and self._pushed and self._snapshot is None:
                    yield from self._push()
                self.ended = reply.ended
                adopt = core.news(self.books, reply)
                if adopt and self._arrived is None:
                    yield from self._fetch(adopt, reply.tokens)
            if self.leaving and self._snapshot is None and (self.books.undecided or not self.books.outstanding):
                yield from self._until_answered(Call(self.coordinator, "leave", (self.books.incarnation,)))
                raise Over("left cleanly")
            yield Sleep(self._pause())

    def _pause(self) -> float:
        """Seconds until there is something to say or to look for: a heartbeat, or the push that is due by then."""
        books, speed = self.books, self._speed.rows_per_s
        if not books.todo and not books.undecided:
            return WAIT  # all that it was leased is trained: its snapshot comes at once
        due = (books.cycle - len(books.outstanding)) / speed if speed else 0.0
        return min(BEAT, max(WAIT, self._until_beat if self._waits else min(self._until_beat, due)))

    @property
    def _waits(self) -> bool:
        """Whether a verdict or rows are awaited."""
        return self.books.undecided is not None or not self.books.todo

    @property
    def _until_beat(self) -> float:
        """Seconds until the next heartbeat."""
        return self._said_at + max(WAIT if self._waits else BEAT, self._apart) - self.clock()

    def heartbeats(self) -> Process:
        """Heartbeats where `exchange` sends none: a payload or version on its way must not cost the lease; raises Over
        as it does.
        """
        while not self.ended:
            missing = self._said_at + LATE * max(BEAT, self._apart) - self.clock()
            if missing <= SOON:
                yield from self._beat()
            yield Sleep(BEAT if missing <= SOON else missing)

    def _on_devices(self, name: str, action: Callable[[], Any]) -> Process:
        """Do something that never ends where the devices hang."""
        self._busy[name] = self.clock()
        try:
            done = yield Do(name, action)
        finally:
            del self._busy[name]
        self._done.add(name)
        return done

    @property
    def evaluating(self) -> bool:
        """Whether it evaluates, and does not train meanwhile."""
        return EVALUATES in self._busy

    def _between_batches(self, allowed_s: float = 0.0) -> bool:
        """Return whether to leave an evaluation. To ask is progress; what comes next may take `allowed_s` more."""
        self._busy[EVALUATES] = self.clock() + allowed_s
        return self.leaving

    def _settle(self) -> Process:
        if self._speed.running:
            done = yield from self._on_devices("member finishes its step", self.holder.settle)
            self._speed.ends(done, self.clock())

    def _take_snapshot(self) -> Process:
        self._snapshot = yield from self._on_devices("member takes a snapshot", self.holder.snapshot)
        self.books = core.snapshot(self.books)

    def _take_up(self, adopt: Adopt, tokens: int, version: Any, average: Any | None) -> Process:
        take = partial(self.holder.adopt, adopt, version, self.books.keep)
        if adopt.how not in self._done:  # each way is a program of its own, and may be compiled now
            self._done.discard("member adopts")
        yield from self._on_devices("member adopts", take)
        self._done.add(adopt.how)
        if adopt.how == "fresh":
            raise Over("its numbers were not finite; lower the learning rate, use --clip, or look for NaNs in the data")
        evaluates = self._evaluates(tokens)
        self.books = core.adopted(self.books, adopt, tokens)
        if evaluates:
            yield from self._settle()
            evaluate = partial(self.holder.evaluate, self._between_batches, average, adopt.version, tokens)
            if found := (yield from self._on_devices(EVALUATES, evaluate)):
                self.evaluated(found)

    def _evaluates(self, tokens: int) -> bool:
        """Whether the version to adopt, of so many tokens, is one to evaluate."""
        every = self.evaluate_every
        return every is not None and tokens // every > self.books.tokens // every

    def _beat(self) -> Process:
        heard, self._said_at = self.books.heard, self.clock()
        try:
            said = core.beat(self.books, self._speed.rows_per_s, max(0.0, self.stalled))
            reply: Granted | Refused | None = yield Call(self.coordinator, "beat", (said,))
        except Unreachable:
            self._apart = min(
                self._apart, BEAT
            )  # a lease lasts but three of the longest pauses: the lost one is made up
            return None
        if reply is None:  # it reads its ledger
            return None
        if isinstance(reply, Refused):
            raise Over(reply.reason)
        self._apart = reply.pause
        self.books = core.granted(self.books, reply, heard)
        return reply

    def _encode(self) -> Process:
        payload = yield from self._on_devices("member encodes", partial(self.holder.payload, self._snapshot))
        self.books, header = core.header(self.books, payload.norm, payload.finite, payload.digests)
        self._snapshot, self._pushed = None, (header, payload)

    def _push(self) -> Process:
        """Bring the payload to the shards, then its header to the coordinator; again until it is accepted."""
        assert self._pushed is not None
        header, payload = self._pushed
        refusals = damaged = 0
        puts: dict[int, tuple[Any, ...]] = {
            number: (header.identity, number, arrays, payload.digests[number])
            for number, arrays in enumerate(payload.fragments)
        }
        while puts:
            answers = yield from self._from_shards("put", puts)
            for answer in answers.values():
                if isinstance(answer, Refused):
                    raise Over(answer.reason)
            puts = {number: put for number, put in puts.items() if not isinstance(answers[number], Accepted)}
            if puts:
                damaged += 1
                if damaged > REFUSALS:  # it is this machine's memory rather than the way
                    raise Over(answers[next(iter(puts))].reason)
                yield Sleep(WAIT)
        while True:
            try:
                answer = yield Call(self.coordinator, "push", (header,))
            except Unreachable:
                answer = None
            if isinstance(answer, Accepted):
                self._accepted = header.identity
                return
            # A new coordinator has to be told first what this incarnation holds.
            if (yield from self._beat()) is not None:
                refusals += 1
            if refusals > REFUSALS and isinstance(answer, Refused):
                raise Over(answer.reason)
            yield Sleep(WAIT)

    def _until_answered(self, call: Call) -> Process:
        while True:
            try:
                return (yield call)
            except Unreachable:
                yield Sleep(WAIT)

    def _from_shards(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Process:
        """Of each fragment what its shard answers, one call to every shard at a time; asked again until it answers."""
        answers: dict[int, Any] = {}
        while left := [number for number in arguments if number not in answers]:
            first = {number % len(self.shards): number for number in reversed(left)}.values()
            found = yield Together(tuple(self._of_shard(number, method, *arguments[number]) for number in first))
            answers |= {
                number: answer
                for number, answer in zip(first, found, strict=True)
                if not isinstance(answer, Unreachable)
            }
            if any(isinstance(answer, Unreachable) for answer in found):
                yield Sleep(WAIT)
        return answers

    def _fetch(self, adopt: Adopt, tokens: int) -> Process:
        """Bring a version here: by what was added since the last one, where that is sent, else whole.

        One that came so slowly that it is not kept any longer is left: the next heartbeat brings news of a newer one.
        """
        found: dict[int, Any] = {}
        follows = self.books.terms.outer.downlink != "plain"
        if self.anchor is not None and follows:
            asked = {number: (number, self._anchored, adopt.version) for number in range(len(adopt.state))}
            for number, chain in (yield from self._from_shards("updates", asked)).items():
                if chain is not None:
                    found[number] = yield Do("member adds updates", partial(chain.on, self.anchor[number]))
                    if found[number] is None:
                        self.say(
                            f"fragment {number} of commit {adopt.version} does not match the ledger: fetching all of it"
                        )
        whole = {n: (n, digest) for n, digest in enumerate(adopt.state) if found.get(n) is None}
        found |= yield from self._from_shards("fetch", whole)
        if any(isinstance(each, Gone) for each in found.values()):
            self.say(f"commit {adopt.version} was removed meanwhile; fetching a newer one")
            return
        fragments = [found[number] for number in range(len(adopt.state))]
        version = yield Do("member places a version", lambda: self.holder.place(fragments))
        average = None
        if self.books.terms.outer.average and self._evaluates(tokens):
            means = yield from self._from_shards("average", {n: (n, adopt.version) for n in range(len(adopt.state))})
            ordered = [means[number] for number in range(len(adopt.state))]
            if any(isinstance(each, Gone) for each in ordered):
                return
            average = yield Do("member places an average", lambda: self.holder.place(ordered))
        self._arrived = (adopt, tokens, version, average)
        if follows:
            self.anchor, self._anchored = fragments, adopt.version

    def _of_shard(self, number: int, method: str, *arguments: Any) -> Call:
        return Call(self.shards[number % len(self.shards)], method, arguments)
