"""A member's three concurrent loops: training, exchange with the swarm, and heartbeats.

`train` never waits for the swarm. `exchange` pushes contributions and fetches versions. `heartbeats` keeps the lease
while `exchange` is busy with a transfer. All share the MemberState. Only `train` changes parameters: it leaves a
snapshot in `_snapshot` to be pushed, and adopts between two steps what `exchange` leaves in `_incoming`.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from tpuswarm.swarm.core import member_state as core
from tpuswarm.swarm.core.member_state import Adopt, MemberState
from tpuswarm.swarm.core.messages import Accepted, Granted, Refused, VersionExpired
from tpuswarm.swarm.core.values import Header, Identity
from tpuswarm.swarm.member.device_state import DeviceState, Evaluation, Payload
from tpuswarm.swarm.processes.effects import Call, Parallel, Process, ProcessEnded, RunBlocking, Sleep, Unreachable

HEARTBEAT_INTERVAL_S = 2.0
"""Used while the member awaits nothing."""
LATE_FACTOR = 1.5
"""`heartbeats` steps in after this many intervals, so that `exchange`, which uses the replies, comes first."""
MIN_SLEEP_S = 0.01
POLL_INTERVAL_S = 0.2
"""Heartbeat interval while a verdict or rows are awaited."""
MAX_REFUSALS = 3
"""Limit of refusals of one contribution by a coordinator that knows the incarnation, and of damaged arrivals of its
payload."""
IDLE_SLEEP_S = 0.02
"""A process that waits for rows, or until metrics are stored, looks again after this time."""
EVALUATION = "member evaluates"
LEAVE_PATIENCE_S = 15.0
"""A leaving member waits this long for the verdict on its last push, to push what it has trained since; half of
NOTICE_S."""
COMPILE_GRACE_S = 600.0
"""A device action that runs for the first time may have to be compiled."""


@dataclass
class Speed:
    """Training speed while there are rows to train: the median of recent steps, so that a single pause does not count.

    A step is known to be done when the next one is dispatched, or after waiting for the devices. The first step of an
    incarnation warms up and is not measured.
    """

    running: int = 0
    """Rows of steps not known to be done."""
    _since: float = 0.0
    _warm: bool = False
    _seconds_per_row: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def rows_per_s(self) -> float | None:
        """Rows per second; None until a step was measured."""
        return 1 / median(self._seconds_per_row) if self._seconds_per_row else None

    def step_starts(self, rows: int, now: float) -> None:
        """Note that a step is about to be dispatched."""
        if not self.running:
            self._since = now  # the time before was a pause
        self.running += rows

    def steps_done(self, rows: int, now: float) -> None:
        """Note that steps with this many rows, possibly none, are done."""
        if not rows:
            return
        if self._warm:
            self._seconds_per_row.append(max(now - self._since, 1e-9) / rows)
        self.running, self._since, self._warm = self.running - rows, now, True


@dataclass
class MemberLoop:
    """The loops of one incarnation, as generators that yield effects."""

    state: MemberState
    device_state: DeviceState
    coordinator: str
    shards: Sequence[str]
    """Addresses of the aggregators; fragment f belongs to shard f modulo their number."""
    clock: Callable[[], float]
    anchor: Sequence[Any] | None = None
    """Fragments of the version fetched last, to which quantized updates are added; None fetches whole versions."""
    say: Callable[[str], None] = lambda sentence: None
    """Shows a sentence to the user."""
    calls_per_shard: int = 1
    """Payloads or fragments that travel to or from an aggregator at a time: several connections bear losses better."""
    leaving: bool = False
    """Whether the member should push its finished work, return the rest, and end."""
    ended: bool = False
    """Whether the run is over."""
    evaluate_every: int | None = None
    """Counted tokens between two evaluations; None for no evaluations."""
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None
    steps_begun: Callable[[], int] = lambda: 0
    """Returns the number of steps that this process has dispatched."""
    steps_stored: Callable[[], int] = lambda: 0
    """Returns how many of them have rows of metrics on the supervisor's disk."""
    awaits_storage: bool = False
    """Whether a push waits until its rows of metrics are stored."""
    push_bytes_per_s: float | None = None
    """Speed of the last push; None before the first."""
    round_trip_s: float | None = None
    """Duration of the last heartbeat."""
    _push_s: float = 0.0
    """Duration of the last push."""
    _exchanges_s: deque[float] = field(default_factory=lambda: deque(maxlen=3))
    """Durations of the last pushes with the fetch of the version that counts them."""
    _accepted: Identity | None = None
    """The last accepted contribution."""
    _snapshot: Any = None
    """A snapshot that is not encoded yet."""
    _snapshot_steps: int = 0
    """`steps_begun` at the last snapshot."""
    _pushed: tuple[Header, Payload] | None = None
    """The last contribution, kept until the next: a coordinator that does not know it requests it again."""
    _incoming: tuple[Adopt, int, Any, Any | None] | None = None
    """A fetched version: how to adopt it, tokens counted at it, its arrays and its moving average."""
    _anchor_version: int = field(init=False)
    _running_actions: dict[str, float] = field(default_factory=dict)
    """Running device actions and their start times."""
    _finished_actions: set[str] = field(default_factory=set)
    """Device actions that have finished before, so that they are compiled."""
    _speed: Speed = field(default_factory=Speed)
    _leaving_since: float | None = None
    """When `_may_leave` was first asked with a push undecided."""
    _last_heartbeat: float = -math.inf
    _min_interval_s: float = 0.0
    """Minimum time between two heartbeats, as the coordinator requested."""

    def __post_init__(self) -> None:
        self._anchor_version = self.state.base

    @property
    def rows_per_s(self) -> float | None:
        """Training speed while there are rows to train; None until a step was measured."""
        return self._speed.rows_per_s

    @property
    def exchange_s(self) -> float:
        """Seconds in which a contribution and a version travel while it trains; the median ignores a single cut."""
        if not self.state.overlap:
            return 0.0
        return median(self._exchanges_s) if self._exchanges_s else self._push_s

    @property
    def stalled(self) -> float:
        """How long the current device action has run, excluding compile time."""
        now = self.clock()
        times = [
            now - start - COMPILE_GRACE_S * (name not in self._finished_actions)
            for name, start in list(self._running_actions.items())
        ]
        return max(times, default=0.0)

    @property
    def at_risk(self) -> int:
        """Rows that a crash now would lose: trained since the last accepted push."""
        undecided = self.state.undecided
        if undecided is not None and undecided.identity == self._accepted:
            return len(undecided.after)
        return len(self.state.outstanding)

    @property
    def evaluating(self) -> bool:
        """Whether the member evaluates instead of training."""
        return EVALUATION in self._running_actions

    def train(self) -> Process:
        """Train, take snapshots and adopt versions until the run ends. Raise ProcessEnded if the incarnation ends."""
        if self.state.base > 0:
            self.device_state.ramp()
        while not self.ended:
            if self._incoming:
                if core.is_still_valid(self.state, self._incoming[0]):
                    yield from self._adopt(*self._incoming)
                self._incoming = None
            # A leaving member stops at a batch of the run: it cannot push a part.
            last = self.leaving and (self.state.undecided or self.state.has_whole_batches)
            if self.state.push_due or (last and self.state.outstanding and not self.state.undecided):
                yield from self._take_snapshot()
            rows = self.state.next_rows
            if not rows or last:
                yield from self._settle()
                yield Sleep(IDLE_SLEEP_S)
                continue
            self._speed.step_starts(len(rows), self.clock())
            step = partial(self.device_state.train, rows, self.state.progress, self.state.todo - rows)
            done = yield from self._on_devices("member trains", step)
            self._speed.steps_done(done, self.clock())
            self.state = core.after_step(self.state, rows)

    def exchange(self) -> Process:
        """Push and fetch until the run ends. Raise ProcessEnded if the incarnation ends."""
        while not self.ended:
            if self._snapshot is not None:
                began = self.clock()
                yield from self._encode()
                yield from self._push()
                self._push_s = self.clock() - began
            reply = (yield from self._beat()) if self._until_heartbeat_s <= MIN_SLEEP_S else None
            if reply is not None:
                if reply.unknown and self._pushed and self._snapshot is None:
                    yield from self._push()
                self.ended = reply.ended
                adopt = core.find_adoption(self.state, reply)
                if adopt and self._incoming is None:
                    began = self.clock()
                    yield from self._fetch(adopt, reply.tokens)
                    if adopt.verdict_on:
                        self._exchanges_s.append(self._push_s + self.clock() - began)
            if self.leaving and self._snapshot is None and self._may_leave():
                yield from self._call_until_answered(Call(self.coordinator, "leave", (self.state.incarnation,)))
                raise ProcessEnded("left cleanly")
            yield Sleep(self._exchange_pause_s())

    def _may_leave(self) -> bool:
        """Return whether all work is pushed, or a verdict that delays the rest was awaited for long enough."""
        undecided = self.state.undecided
        if undecided is None:
            return not self.state.outstanding
        if self._leaving_since is None:
            self._leaving_since = self.clock()
        return not undecided.after or self.clock() - self._leaving_since > LEAVE_PATIENCE_S

    def heartbeats(self) -> Process:
        """Keep the lease while `exchange` is busy with a transfer. Raise ProcessEnded as `exchange` does."""
        while not self.ended:
            interval = max(HEARTBEAT_INTERVAL_S, self._min_interval_s)
            missing = self._last_heartbeat + LATE_FACTOR * interval - self.clock()
            if missing <= MIN_SLEEP_S:
                yield from self._beat()
            yield Sleep(HEARTBEAT_INTERVAL_S if missing <= MIN_SLEEP_S else missing)

    def _exchange_pause_s(self) -> float:
        """Return the seconds until the next heartbeat or push."""
        state, speed = self.state, self._speed.rows_per_s
        if not state.todo and not state.undecided:
            return POLL_INTERVAL_S  # the whole lease is trained: its snapshot comes at once
        until_push = (state.cycle - len(state.outstanding)) / speed if speed else 0.0
        until_heartbeat = self._until_heartbeat_s
        pause = until_heartbeat if self._awaits_reply else min(until_heartbeat, until_push)
        return min(HEARTBEAT_INTERVAL_S, max(POLL_INTERVAL_S, pause))

    @property
    def _awaits_reply(self) -> bool:
        return self.state.undecided is not None or not self.state.todo

    @property
    def _until_heartbeat_s(self) -> float:
        interval = POLL_INTERVAL_S if self._awaits_reply else HEARTBEAT_INTERVAL_S
        return self._last_heartbeat + max(interval, self._min_interval_s) - self.clock()

    def _on_devices(self, name: str, action: Callable[[], Any]) -> Process:
        """Run a device action, which never ends if the devices hang."""
        self._running_actions[name] = self.clock()
        try:
            done = yield RunBlocking(name, action)
        finally:
            del self._running_actions[name]
        self._finished_actions.add(name)
        return done

    def _should_stop_evaluation(self, allowed_s: float = 0.0) -> bool:
        """Return whether to stop an evaluation. Asking is progress; what follows may take `allowed_s` more."""
        self._running_actions[EVALUATION] = self.clock() + allowed_s
        return self.leaving

    def _settle(self) -> Process:
        if self._speed.running:
            done = yield from self._on_devices("member finishes its step", self.device_state.settle)
            self._speed.steps_done(done, self.clock())

    def _take_snapshot(self) -> Process:
        self._snapshot = yield from self._on_devices("member takes a snapshot", self.device_state.snapshot)
        self._snapshot_steps = self.steps_begun()
        self.state = core.after_snapshot(self.state)

    def _adopt(self, adopt: Adopt, tokens: int, version: Any, average: Any | None) -> Process:
        if adopt.how not in self._finished_actions:  # each way is a separate program and may be compiled now
            self._finished_actions.discard("member adopts")
        action = partial(self.device_state.adopt, adopt, version, self.state.own_share)
        yield from self._on_devices("member adopts", action)
        self._finished_actions.add(adopt.how)
        if adopt.how == "fresh":
            raise ProcessEnded(
                "its numbers were not finite; lower the learning rate, use --clip, or look for NaNs in the data"
            )
        evaluation_due = self._evaluation_due(tokens)
        self.state = core.after_adoption(self.state, adopt, tokens)
        if evaluation_due:
            yield from self._settle()
            evaluate = partial(self.device_state.evaluate, self._should_stop_evaluation, average, adopt.version, tokens)
            if evaluation := (yield from self._on_devices(EVALUATION, evaluate)):
                self.on_evaluation(evaluation)

    def _evaluation_due(self, tokens: int) -> bool:
        every = self.evaluate_every
        return every is not None and tokens // every > self.state.tokens // every

    def _beat(self) -> Process:
        adoptions, self._last_heartbeat = self.state.adoptions, self.clock()
        try:
            stalled, speed = max(0.0, self.stalled), self._speed.rows_per_s
            report = core.make_heartbeat(self.state, speed, stalled, self.exchange_s)
            began = self.clock()
            reply: Granted | Refused | None = yield Call(self.coordinator, "beat", (report,))
            self.round_trip_s = self.clock() - began
        except Unreachable:
            # A lease lasts only three of the longest pauses: make up for the lost heartbeat.
            self._min_interval_s = min(self._min_interval_s, HEARTBEAT_INTERVAL_S)
            return None
        if reply is None:  # the coordinator is reading its ledger
            return None
        if isinstance(reply, Refused):
            raise ProcessEnded(reply.reason)
        self._min_interval_s = reply.pause
        self.state = core.after_grant(self.state, reply, adoptions)
        return reply

    def _encode(self) -> Process:
        payload = yield from self._on_devices("member encodes", partial(self.device_state.payload, self._snapshot))
        self.state, header = core.finish_push(self.state, payload.norm, payload.finite, payload.digests)
        self._snapshot, self._pushed = None, (header, payload)

    def _push(self) -> Process:
        """Send the payload to the shards, then its header to the coordinator, until it is accepted.

        The rows of its steps are stored in between: a commit that survives a power cut has its rows.
        """
        assert self._pushed is not None
        header, payload = self._pushed
        refusals = damaged = 0
        uploads: dict[int, tuple[Any, ...]] = {
            number: (header.identity, number, arrays, payload.digests[number])
            for number, arrays in enumerate(payload.fragments)
        }
        began = self.clock()
        while uploads:
            answers = yield from self._call_shards("put", uploads)
            uploads = {
                number: upload for number, upload in uploads.items() if not isinstance(answers[number], Accepted)
            }
            if uploads:
                damaged += 1
                if damaged > MAX_REFUSALS:  # probably this machine's memory, not the network
                    raise ProcessEnded(answers[next(iter(uploads))].reason)
                yield Sleep(POLL_INTERVAL_S)
        self.push_bytes_per_s = payload.size_bytes / max(self.clock() - began, 1e-9)
        while self.steps_stored() < self._snapshot_steps:
            self.awaits_storage = True
            yield Sleep(IDLE_SLEEP_S)
        self.awaits_storage = False
        while True:
            try:
                answer = yield Call(self.coordinator, "push", (header,))
            except Unreachable:
                answer = None
            if isinstance(answer, Accepted):
                self._accepted = header.identity
                return
            # A new coordinator must first learn what this incarnation holds.
            if (yield from self._beat()) is not None:
                refusals += 1
            if refusals > MAX_REFUSALS and isinstance(answer, Refused):
                raise ProcessEnded(answer.reason)
            yield Sleep(POLL_INTERVAL_S)

    def _call_until_answered(self, call: Call) -> Process:
        while True:
            try:
                return (yield call)
            except Unreachable:
                yield Sleep(POLL_INTERVAL_S)

    def _call_shards(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Process:
        """Call the shard of each fragment until it answers, `calls_per_shard` at a time; return all answers.

        Raise ProcessEnded if one is refused.
        """
        answers: dict[int, Any] = {}
        while left := [number for number in arguments if number not in answers]:
            count = len(self.shards)
            queues = ([number for number in left if number % count == index] for index in range(count))
            numbers = [number for queue in queues for number in queue[: self.calls_per_shard]]
            calls = (Call(self.shards[number % len(self.shards)], method, arguments[number]) for number in numbers)
            results = yield Parallel(tuple(calls))
            if refused := next((result for result in results if isinstance(result, Refused)), None):
                raise ProcessEnded(refused.reason)
            answers |= {
                number: result
                for number, result in zip(numbers, results, strict=True)
                if not isinstance(result, Unreachable)
            }
            if any(isinstance(result, Unreachable) for result in results):
                yield Sleep(POLL_INTERVAL_S)
        return answers

    def _fetch(self, adopt: Adopt, tokens: int) -> Process:
        """Fetch a version: as updates to the last one if they are sent, else whole.

        A version that expires during the fetch is abandoned: the next heartbeat names a newer one.
        """
        found: dict[int, Any] = {}
        sends_updates = self.state.terms.outer.downlink != "plain"
        if self.anchor is not None and sends_updates:
            ranges = {number: (number, self._anchor_version, adopt.version) for number in range(len(adopt.state))}
            for number, chain in (yield from self._call_shards("updates", ranges)).items():
                if chain is not None:
                    found[number] = yield RunBlocking("member adds updates", partial(chain.on, self.anchor[number]))
                    if found[number] is None:
                        self.say(f"fragment {number} of commit {adopt.version} does not match the ledger; fetching it")
        missing = {number: (number, digest) for number, digest in enumerate(adopt.state) if found.get(number) is None}
        found |= yield from self._call_shards("fetch", missing)
        if any(isinstance(fragment, VersionExpired) for fragment in found.values()):
            self.say(f"commit {adopt.version} was removed meanwhile; fetching a newer one")
            return
        fragments = [found[number] for number in range(len(adopt.state))]
        version = yield RunBlocking("member places a version", lambda: self.device_state.place(fragments))
        average = None
        if self.state.terms.outer.average and self._evaluation_due(tokens):
            numbers = range(len(adopt.state))
            means = yield from self._call_shards("average", {number: (number, adopt.version) for number in numbers})
            ordered = [means[number] for number in numbers]
            if any(isinstance(mean, VersionExpired) for mean in ordered):
                return
            average = yield RunBlocking("member places an average", lambda: self.device_state.place(ordered))
        self._incoming = (adopt, tokens, version, average)
        if sends_updates:
            self.anchor, self._anchor_version = fragments, adopt.version
