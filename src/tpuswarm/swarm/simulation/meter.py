"""Count a coordinator's requests and commits, and measure its processor time."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tpuswarm.swarm.core.messages import Granted, Heartbeat, Refused
from tpuswarm.swarm.core.values import Header, Incarnation, Record
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Process


@dataclass
class MeteredCoordinator:
    """A coordinator that counts its requests and commits and measures its processor time."""

    inner: Coordinator
    clock: Callable[[], float]
    records: dict[int, Record]
    """Filled with each new record."""
    merges: list[float] = field(default_factory=list)
    """Seconds of the virtual clock from each choice to its record."""
    count: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Processor time by kind of request."""

    def beat(self, report: Heartbeat) -> Granted | Refused | None:
        start = time.thread_time()
        answer = self.inner.beat(report)
        self.count["beat"] += 1
        self.seconds["beat"] += time.thread_time() - start
        return answer

    def push(self, header: Header) -> Process:
        self.count["push"] += 1
        return self._timed("push", self.inner.push(header))

    def leave(self, incarnation: Incarnation) -> None:
        self.inner.leave(incarnation)

    def run(self) -> Process:
        rounds, chosen = self._timed("rounds", self.inner.run()), 0.0
        value: Any = None
        while True:
            idle, ended = self.inner.state.merging is None, False
            try:
                effect = rounds.send(value)
            except StopIteration:
                ended = True
            state = self.inner.state
            if state.view.version not in self.records:
                self.records[state.view.version] = state.view.newest
                self.merges.append(self.clock() - chosen)
            if idle and state.merging:
                chosen = self.clock()
            if ended:
                return
            value = yield effect

    def _timed(self, name: str, process: Process) -> Process:
        value: Any = None
        while True:
            start = time.thread_time()
            try:
                effect = process.send(value)
            except StopIteration as end:
                return end.value
            finally:
                self.seconds[name] += time.thread_time() - start
            value = yield effect
