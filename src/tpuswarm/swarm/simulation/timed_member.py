"""A member's machine in the simulation: a clock, a link, and no arrays."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpuswarm.swarm.core.member_state import Adopt
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.member.device_state import Payload
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.simulation.scenario import MemberGroup

Where = Literal["gone", "joining", "alive"]


@dataclass
class Way:
    """One direction of a member's link; what is sent at once goes one after the other."""

    bytes: float = 0.0
    """Sent so far."""
    free: float = 0.0
    """When the last of them has left."""

    def send(self, size: float, mbit: float, now: float) -> float:
        """Seconds until so many bytes have left."""
        self.bytes += size
        self.free = max(self.free, now) + size * 8 / (mbit * 1e6)
        return self.free - now


@dataclass
class Machine:
    """Where a member lives: its speed, its link, and what became of its time."""

    name: str
    group: MemberGroup
    step_s: float
    where: Where = "gone"
    since: float = 0.0
    seconds: dict[Where, float] = field(default_factory=lambda: {"gone": 0.0, "joining": 0.0, "alive": 0.0})
    training: float = 0.0
    """Seconds in steps, of those alive."""
    rows: int = 0
    """Trained."""
    up: "Way" = field(default_factory=lambda: Way())
    down: "Way" = field(default_factory=lambda: Way())
    step: float = 0.0
    """Seconds of the step under way."""
    life: MemberLoop | None = None

    def comes(self, where: Where, now: float) -> None:
        """It is somewhere else from now on."""
        self.seconds[self.where] += now - self.since
        self.where, self.since = where, now


@dataclass
class TimedHolder:
    """A member's arrays, if it had any."""

    machine: Machine
    fragments: int

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        """A step is done."""
        self.machine.rows += len(rows)
        self.machine.training += self.machine.step
        return len(rows)

    def settle(self) -> int:
        """Nothing is under way."""
        return 0

    def snapshot(self) -> bool:
        """Taken."""
        return True

    def payload(self, snapshot: Any) -> Payload:
        """Names of fragments that nobody has."""
        name = hashlib.sha256(f"{self.machine.name} {self.machine.rows}".encode()).hexdigest()
        return Payload(({},) * self.fragments, (name,) * self.fragments, 1.0, True)

    def place(self, fragments: Sequence[Any]) -> bool:
        """Brought."""
        return True

    def adopt(self, adopt: Adopt, version: Any, keep: float) -> None:
        """Done."""

    def evaluate(self, leave: Callable[[], bool], average: object, version: int, tokens: int) -> None:
        """Not asked for."""

    def ramp(self) -> None:
        """Small updates take as long as others."""
