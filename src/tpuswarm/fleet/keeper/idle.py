"""Since when nothing has run on a fleet, as far as somebody has watched."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.fleet.decide.state import WorkStatus

MAX_GAP_S = 120.0
"""Seconds between two looks, after which the time between them was not watched."""


@dataclass
class IdleTimer:
    """Of one keeper. Time in which it did not look, as while its computer slept, is no time in which nothing ran."""

    _last: float | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    """Since when it has watched, by the even clock."""

    def look(self, work: WorkStatus, jobs: Iterable[Job], now: float, steady: float) -> WorkStatus:
        """What is reported, with `busy_at` as late as something may have run. `now`: Unix seconds."""
        if self._last is None or steady - self._last > MAX_GAP_S:
            self._since = steady
        self._last = steady
        if work.busy_at is None:
            return work
        if any(each.phase in ("waiting", "running") for job in jobs for each in job.assignments):
            return replace(work, busy_at=now)  # as far as anybody knows
        return replace(work, busy_at=max(work.busy_at, now - (steady - self._since)))
