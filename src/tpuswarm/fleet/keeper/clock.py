"""Time for a keeper: what the wall clock says, and whether it has jumped."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tpuswarm.train.process.computer import boot_time

MIN_JUMP_S = 5.0
"""Seconds by which a clock that is only corrected does not move."""


@dataclass
class Clock:
    """Both clocks of a computer."""

    wall: Callable[[], float] = time.time
    """Unix seconds."""
    steady: Callable[[], float] = boot_time
    _apart: float | None = field(default=None, init=False)

    def look(self) -> tuple[float, float, float]:
        """Unix seconds, seconds that go on evenly, and by how many the first has jumped since the last look."""
        now, steady = self.wall(), self.steady()
        apart = now - steady
        before = apart if self._apart is None else self._apart
        self._apart = apart
        moved = apart - before
        return now, steady, moved if abs(moved) >= MIN_JUMP_S else 0.0
