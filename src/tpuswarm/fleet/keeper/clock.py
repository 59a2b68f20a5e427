"""Tell a keeper the time, whether the clock has jumped, and how long nothing has run."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tpuswarm.fleet.decide.fleet_state import WorkStatus
from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.train.process.computer import boot_time

MIN_JUMP_S = 5.0
MAX_GAP_S = 120.0
"""After a longer gap between two updates, idle time counts from zero."""


@dataclass
class Clock:
    wall: Callable[[], float] = time.time
    """Unix seconds."""
    steady: Callable[[], float] = boot_time
    _offset: float | None = field(default=None, init=False)

    def read(self) -> tuple[float, float, float]:
        """Return Unix seconds, monotonic seconds, and by how much the wall clock has jumped since the last call."""
        now, steady = self.wall(), self.steady()
        offset = now - steady
        jump = 0.0 if self._offset is None else offset - self._offset
        self._offset = offset
        return now, steady, jump if abs(jump) >= MIN_JUMP_S else 0.0


@dataclass
class IdleTimer:
    """Measures how long nothing has run. Time that the keeper did not observe does not count as idle."""

    _last: float | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)

    def update(self, work: WorkStatus, jobs: Iterable[Job], now: float, steady: float) -> WorkStatus:
        """Return the status with the last time at which a job may have run."""
        if self._last is None or steady - self._last > MAX_GAP_S:
            self._since = steady
        self._last = steady
        if work.busy_at is None:
            return work
        if any(not job.is_over for job in jobs):
            return replace(work, busy_at=now)
        return replace(work, busy_at=max(work.busy_at, now - (steady - self._since)))
