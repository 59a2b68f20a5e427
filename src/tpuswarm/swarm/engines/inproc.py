"""All processes of a swarm in one, under a virtual clock, with faults: for tests and simulation.

Everything that happens is an event in one queue; the same seed gives the same run, event for event.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from inspect import isgenerator
from typing import Any, cast

from tpuswarm.swarm.processes.effects import Call, Do, Over, Process, Sleep, Together, Unreachable

Seconds = Callable[[random.Random, str], float]


@dataclass(frozen=True)
class Faults:
    """What may go wrong with messages; each a probability. Processes are killed by `Inproc.kill`."""

    lost: float = 0.0
    """A request, or an answer, never arrives."""
    twice: float = 0.0
    """A request arrives again, later."""
    timeout: float = 5.0
    """Seconds a caller waits for an answer; infinite where no answer can get lost."""


@dataclass
class _Running:
    node: str
    generator: Process
    done: Callable[[Any], None]
    epoch: int = 0
    """Answers to anything but its newest effect are too late."""


@dataclass
class Inproc:
    """The engine. Nodes are what dies at once: a machine or a process, with its server object and its generators."""

    seed: int
    seconds: Seconds = lambda rnd, name: rnd.uniform(0.001, 0.05)
    """How long an effect (by name) or a message ("message") takes."""
    faults: Faults = Faults()
    watch: Callable[[str, str, str], None] = lambda node, name, when: None
    """Told of every effect, `before` and `after` it happened, as node and name: tests kill here."""
    over: Callable[[str, Over], None] = lambda node, over: None
    """Told that a process or a server of a node has no place any more; the node was killed."""
    now: float = 0.0
    _random: random.Random = field(init=False)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0
    _servers: dict[str, Any] = field(default_factory=dict)
    _running: dict[int, _Running] = field(default_factory=dict)
    _stopped: dict[str, float] = field(default_factory=dict)
    """Nodes that stand still, and until when."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def serve(self, node: str, server: Any) -> None:
        """Let calls to `node` reach the methods of `server`."""
        self._servers[node] = server

    def spawn(self, node: str, generator: Process, done: Callable[[Any], None] = lambda result: None) -> None:
        """Start a process on a node; `done` is told its result."""
        self._count += 1
        running = _Running(node, generator, done)
        self._running[self._count] = running
        key = self._count
        self.at(self.now, lambda: self._step(key, 0, None, None))

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time of the virtual clock."""
        self._count += 1
        heapq.heappush(self._events, (max(time, self.now), self._count, action))

    def kill(self, node: str) -> None:
        """The node is gone, as by kill -9: nothing of it runs on, nothing is cleaned up."""
        self._stopped.pop(node, None)
        self._servers.pop(node, None)
        for key in [key for key, each in self._running.items() if each.node == node]:
            del self._running[key]

    def stop(self, node: str, seconds: float) -> None:
        """The node stands still, as by SIGSTOP: what would happen there happens when it goes on, in the same order."""
        self._stopped[node] = self.now + seconds

    def stands_still(self, node: str) -> bool:
        """Whether it was stopped and has not gone on yet."""
        return self._stopped.get(node, self.now) > self.now

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Go on until a condition holds; False if nothing is left to happen or the clock passes `limit` seconds."""
        while not until():
            if not self._events or self._events[0][0] > limit:
                return False
            self.now, _, action = heapq.heappop(self._events)
            action()
        return True

    def takes(self, node: str, effect: Do) -> float:
        """Seconds of an effect; a simulation knows more of its nodes than `seconds` does."""
        return self.seconds(self._random, effect.name)

    def travels(self, node: str, call: Call, back: bool) -> float:
        """Seconds that the call of a node takes on its way, or the answer on its way back."""
        return self.seconds(self._random, "message")

    def _step(self, key: int, epoch: int, value: Any, error: BaseException | None) -> None:
        if not self._waits(key, epoch):
            return
        running = self._running[key]
        if self._later(running.node, lambda: self._step(key, epoch, value, error)):
            return
        running.epoch += 1
        try:
            effect = running.generator.throw(error) if error else running.generator.send(value)
        except StopIteration as end:
            del self._running[key]
            running.done(end.value)
        except Over as over:
            self.kill(running.node)
            self.over(running.node, over)
        else:
            self._perform(key, running, effect)

    def _perform(self, key: int, running: _Running, effect: Do | Call | Together | Sleep) -> None:
        epoch = running.epoch
        if isinstance(effect, Sleep):
            self.at(self.now + effect.seconds, lambda: self._step(key, epoch, None, None))
        elif isinstance(effect, Do):
            self.watch(running.node, effect.name, "before")
            self.at(self.now + self.takes(running.node, effect), lambda: self._act(key, epoch, effect))
        elif isinstance(effect, Call):

            def answered(answer: Any) -> None:
                lost = isinstance(answer, Unreachable)
                self._step(key, epoch, None if lost else answer, answer if lost else None)

            self._call(key, epoch, running.node, effect, answered)
        else:
            self._together(key, epoch, running.node, effect.calls)

    def _act(self, key: int, epoch: int, effect: Do) -> None:
        if not self._waits(key, epoch):
            return
        node = self._running[key].node
        if self._later(node, lambda: self._act(key, epoch, effect)):
            return
        try:
            value, error = effect.action(), None
        except Exception as raised:  # noqa: BLE001  # whatever it is, the process gets it
            value, error = None, raised
        self.watch(node, effect.name, "after")
        self._step(key, epoch, value, error)

    def _together(self, key: int, epoch: int, node: str, calls: tuple[Call, ...]) -> None:
        answers: dict[int, Any] = {}

        def answered(number: int, answer: Any) -> None:
            answers.setdefault(number, answer)
            if len(answers) == len(calls):
                self._step(key, epoch, [answers[each] for each in range(len(calls))], None)

        for number, call in enumerate(calls):
            self._call(key, epoch, node, call, partial(answered, number))
        if not calls:
            self.at(self.now, lambda: self._step(key, epoch, [], None))

    def _call(self, key: int, epoch: int, node: str, call: Call, tell: Callable[[Any], None]) -> None:
        """tell: given each answer that arrives while it is waited for, and Unreachable when the time for one is up."""
        if not self._waits(key, epoch):  # killed while it made calls together
            return
        self.watch(node, f"call {call.method}", "before")
        if self.faults.timeout < math.inf:
            self.at(self.now + self.faults.timeout, lambda: tell(Unreachable(call.address)))

        def answer(value: Any) -> None:
            if self._waits(key, epoch):
                self.watch(node, f"call {call.method}", "after")
                tell(value)

        def answered(value: Any) -> None:
            if self._random.random() >= self.faults.lost:
                self.at(self.now + self.travels(node, call, True), lambda: answer(value))

        for _ in range(2 if self._random.random() < self.faults.twice else 1):
            if self._random.random() >= self.faults.lost:
                self.at(self.now + self.travels(node, call, False), lambda: self._deliver(call, answered))

    def _waits(self, key: int, epoch: int) -> bool:
        running = self._running.get(key)
        return running is not None and running.epoch == epoch

    def _later(self, node: str, action: Callable[[], None]) -> bool:
        """Whether a node stands still; the action then happens when it goes on."""
        if not self.stands_still(node):
            return False
        self.at(self._stopped[node], action)
        return True

    def _deliver(self, call: Call, answered: Callable[[Any], None]) -> None:
        server = self._servers.get(call.address)
        if server is None or self._later(call.address, lambda: self._deliver(call, answered)):
            return
        try:
            result = getattr(server, call.method)(*call.arguments)
        except Over as over:
            self.kill(call.address)
            self.over(call.address, over)
            return
        if isgenerator(result):
            self.spawn(call.address, cast(Process, result), answered)
        else:
            answered(result)
