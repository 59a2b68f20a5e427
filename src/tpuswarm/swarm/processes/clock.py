"""A clock that pauses while its process does."""

import threading
from collections.abc import Callable

MAX_TICK_S = 2.0
"""A running process reads its clock more often than this."""


class Clock:
    """Monotonic seconds that stand still while the process that reads them does.

    A process that was stopped, or got no core, receives in-time messages late. Leases, rounds and silences measured by
    this clock grow by that gap, so no sender seems late.
    """

    def __init__(self, clock: Callable[[], float]):
        """clock: the machine's monotonic seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._read = self._now = clock()

    def __call__(self) -> float:
        with self._lock:
            read = self._clock()
            self._now += min(read - self._read, MAX_TICK_S)
            self._read = read
            return self._now
