"""A clock on which nobody is late because this process did not listen."""

import threading
from collections.abc import Callable

PAUSE = 2.0
"""Seconds between two readings that still count: who reads the clock does so more often while it runs."""


class Clock:
    """Seconds that never jump; while the process that reads it stands still, they do so too.

    A process that was stopped, or that did not get a core, hears late what others said in time. What it measures by
    this clock, a lease, a round, a silence, is longer by the gap since it last looked.
    """

    def __init__(self, clock: Callable[[], float]):
        """clock: seconds that never jump, of the machine."""
        self._clock = clock
        self._lock = threading.Lock()
        self._read = self._now = clock()

    def __call__(self) -> float:
        """Seconds now."""
        with self._lock:
            read = self._clock()
            self._now += min(read - self._read, PAUSE)
            self._read = read
            return self._now
