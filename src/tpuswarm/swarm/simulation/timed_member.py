"""A member's machine in the simulation: durations and a link instead of arrays."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpuswarm.swarm.core.member_state import Adopt
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.member.device_state import Payload
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.simulation.scenario import MemberGroup

State = Literal["gone", "joining", "alive"]


@dataclass
class LinkDirection:
    """One direction of a member's link, which sends one message after the other."""

    bytes: float = 0.0
    """Sent so far."""
    free: float = 0.0
    """When the link is free again."""

    def send(self, size: float, mbit: float, now: float) -> float:
        """Return the seconds until a message of `size` bytes has left."""
        self.bytes += size
        self.free = max(self.free, now) + size * 8 / (mbit * 1e6)
        return self.free - now


@dataclass
class Machine:
    """A member's machine: its speed, its link, and its times in each state."""

    name: str
    group: MemberGroup
    step_s: float
    state: State = "gone"
    since: float = 0.0
    seconds: dict[State, float] = field(default_factory=lambda: {"gone": 0.0, "joining": 0.0, "alive": 0.0})
    training: float = 0.0
    """Seconds in steps, while alive."""
    rows: int = 0
    """Rows trained."""
    up: LinkDirection = field(default_factory=LinkDirection)
    down: LinkDirection = field(default_factory=LinkDirection)
    step: float = 0.0
    """Duration of the current step."""
    loop: MemberLoop | None = None

    def set_state(self, state: State, now: float) -> None:
        self.seconds[self.state] += now - self.since
        self.state, self.since = state, now


@dataclass
class TimedDeviceState:
    """A device state without arrays."""

    machine: Machine
    fragments: int

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        self.machine.rows += len(rows)
        self.machine.training += self.machine.step
        return len(rows)

    def settle(self) -> int:
        return 0

    def snapshot(self) -> bool:
        return True

    def payload(self, snapshot: Any) -> Payload:
        """Return names of fragments that do not exist."""
        name = hashlib.sha256(f"{self.machine.name} {self.machine.rows}".encode()).hexdigest()
        return Payload(({},) * self.fragments, (name,) * self.fragments, 1.0, True)

    def place(self, fragments: Sequence[Any]) -> bool:
        return True

    def adopt(self, adopt: Adopt, version: Any, own_share: float) -> None:
        pass

    def evaluate(self, stop: Callable[..., bool], average: object, version: int, tokens: int) -> None:
        pass

    def ramp(self) -> None:
        pass
