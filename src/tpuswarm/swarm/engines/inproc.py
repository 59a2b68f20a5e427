"""Run all processes of a swarm in one, under a virtual clock, with faults: for tests and simulation.

Every event is in one queue; the same seed gives the same run, event for event.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import isgenerator
from typing import Any, cast

from tpuswarm.swarm.processes.effects import Call, Parallel, Process, ProcessEnded, RunBlocking, Sleep, Unreachable

Seconds = Callable[[random.Random, str], float]


@dataclass(frozen=True)
class Faults:
    """Probabilities of message faults. `Inproc.kill` kills processes."""

    lost: float = 0.0
    """A request or an answer never arrives."""
    twice: float = 0.0
    """A request arrives again later."""
    timeout: float = 5.0
    """How long a caller waits for an answer; may be infinite if answers are never lost."""


@dataclass
class _Running:
    node: str
    generator: Process
    done: Callable[[Any], None]
    epoch: int = 0
    """Number of its newest effect; answers to earlier ones are too late."""


@dataclass
class Inproc:
    """The engine. A node, with its server object and its processes, dies as a whole."""

    seed: int
    seconds: Seconds = lambda rnd, name: rnd.uniform(0.001, 0.05)
    """Duration of an effect, by name, or of a message ("message")."""
    faults: Faults = Faults()
    watch: Callable[[str, str, str], None] = lambda node, name, when: None
    """Called with node, name and `before` or `after` around every effect; tests kill here."""
    on_ended: Callable[[str, ProcessEnded], None] = lambda node, error: None
    """Called after a process or server raised ProcessEnded and its node was killed."""
    now: float = 0.0
    _random: random.Random = field(init=False)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0
    _servers: dict[str, Any] = field(default_factory=dict)
    _running: dict[int, _Running] = field(default_factory=dict)
    _stopped: dict[str, float] = field(default_factory=dict)
    """Stopped nodes with the time when they continue."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def serve(self, node: str, server: Any) -> None:
        """Serve calls to `node` by the methods of `server`."""
        self._servers[node] = server

    def spawn(self, node: str, generator: Process, done: Callable[[Any], None] = lambda result: None) -> None:
        """Start a process on a node; `done` receives its result."""
        self._count += 1
        running = _Running(node, generator, done)
        self._running[self._count] = running
        key = self._count
        self.at(self.now, lambda: self._step(key, 0, None, None))

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run an action at a time of the virtual clock."""
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, action))

    def kill(self, node: str) -> None:
        """Kill a node as by kill -9, without any clean-up."""
        self._stopped.pop(node, None)
        self._servers.pop(node, None)
        for key in [key for key, running in self._running.items() if running.node == node]:
            del self._running[key]

    def stop(self, node: str, seconds: float) -> None:
        """Stop a node as by SIGSTOP: its events happen in the same order once it continues."""
        self._stopped[node] = self.now + seconds

    def is_stopped(self, node: str) -> bool:
        return self._stopped.get(node, self.now) > self.now

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Process events until a condition holds; False if no event is left or the clock passes `limit` seconds."""
        while not until():
            if not self._events or self._events[0][0] > limit:
                return False
            self.now, _, action = heapq.heappop(self._events)
            action()
        return True

    def effect_seconds(self, node: str, effect: RunBlocking) -> float:
        """Return the duration of an effect; a simulation overrides it."""
        return self.seconds(self._random, effect.name)

    def travel_seconds(self, node: str, call: Call, back: bool) -> float:
        """Return the travel time of a node's call, or of the answer; a simulation overrides it."""
        return self.seconds(self._random, "message")

    def _step(self, key: int, epoch: int, value: Any, error: BaseException | None) -> None:
        if not self._is_current(key, epoch):
            return
        running = self._running[key]
        if self._postpone(running.node, lambda: self._step(key, epoch, value, error)):
            return
        running.epoch += 1
        try:
            effect = running.generator.throw(error) if error else running.generator.send(value)
        except StopIteration as end:
            del self._running[key]
            running.done(end.value)
        except ProcessEnded as ended:
            self.kill(running.node)
            self.on_ended(running.node, ended)
        else:
            self._perform(key, running, effect)

    def _perform(self, key: int, running: _Running, effect: RunBlocking | Call | Parallel | Sleep) -> None:
        epoch = running.epoch
        if isinstance(effect, Sleep):
            self.at(self.now + effect.seconds, lambda: self._step(key, epoch, None, None))
        elif isinstance(effect, RunBlocking):
            self.watch(running.node, effect.name, "before")
            self.at(self.now + self.effect_seconds(running.node, effect), lambda: self._act(key, epoch, effect))
        elif isinstance(effect, Call):

            def deliver_answer(answer: Any) -> None:
                lost = isinstance(answer, Unreachable)
                self._step(key, epoch, None if lost else answer, answer if lost else None)

            self._call(key, epoch, running.node, effect, deliver_answer)
        else:
            self._call_all(key, epoch, running.node, effect.calls)

    def _act(self, key: int, epoch: int, effect: RunBlocking) -> None:
        if not self._is_current(key, epoch):
            return
        node = self._running[key].node
        if self._postpone(node, lambda: self._act(key, epoch, effect)):
            return
        try:
            value, error = effect.action(), None
        except Exception as raised:  # noqa: BLE001  # passed to the process
            value, error = None, raised
        self.watch(node, effect.name, "after")
        self._step(key, epoch, value, error)

    def _call_all(self, key: int, epoch: int, node: str, calls: tuple[Call, ...]) -> None:
        answers: dict[int, Any] = {}

        def deliver_answer(number: int, answer: Any) -> None:
            answers.setdefault(number, answer)
            if len(answers) == len(calls):
                self._step(key, epoch, [answers[index] for index in range(len(calls))], None)

        for number, call in enumerate(calls):
            self._call(key, epoch, node, call, partial(deliver_answer, number))
        if not calls:
            self.at(self.now, lambda: self._step(key, epoch, [], None))

    def _call(self, key: int, epoch: int, node: str, call: Call, deliver: Callable[[Any], None]) -> None:
        """Make a call. deliver: receives every answer that arrives in time, and Unreachable after the timeout."""
        if not self._is_current(key, epoch):  # killed while it made parallel calls
            return
        self.watch(node, f"call {call.method}", "before")
        if self.faults.timeout < math.inf:
            self.at(self.now + self.faults.timeout, lambda: deliver(Unreachable(call.address)))

        def answer(value: Any) -> None:
            if self._is_current(key, epoch):
                self.watch(node, f"call {call.method}", "after")
                deliver(value)

        def deliver_answer(value: Any) -> None:
            if self._random.random() >= self.faults.lost:
                self.at(self.now + self.travel_seconds(node, call, True), lambda: answer(value))

        for _ in range(2 if self._random.random() < self.faults.twice else 1):
            if self._random.random() >= self.faults.lost:
                self.at(self.now + self.travel_seconds(node, call, False), lambda: self._deliver(call, deliver_answer))

    def _is_current(self, key: int, epoch: int) -> bool:
        running = self._running.get(key)
        return running is not None and running.epoch == epoch

    def _postpone(self, node: str, action: Callable[[], None]) -> bool:
        if not self.is_stopped(node):
            return False
        self.at(self._stopped[node], action)
        return True

    def _deliver(self, call: Call, deliver_answer: Callable[[Any], None]) -> None:
        server = self._servers.get(call.address)
        if server is None or self._postpone(call.address, lambda: self._deliver(call, deliver_answer)):
            return
        try:
            result = getattr(server, call.method)(*call.arguments)
        except ProcessEnded as ended:
            self.kill(call.address)
            self.on_ended(call.address, ended)
            return
        if isgenerator(result):
            self.spawn(call.address, cast(Process, result), deliver_answer)
        else:
            deliver_answer(result)
