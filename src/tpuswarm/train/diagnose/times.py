"""Where the time of a process goes: every second in exactly one place."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

SET_UP, COMPILING, STEPS, WAITING, READING, USER, EVALUATION, CHECKPOINTS = PLACES = (
    "set-up",
    "compiling",
    "steps on the devices",
    "waiting for data",
    "reading device arrays",
    "your code between steps",
    "evaluation",
    "checkpoints",
)
TRAINING = (STEPS, WAITING, READING, USER)
"""From step to step: without set-up, compiling, evaluations and checkpoints."""


class Times:
    """A stopwatch that stands in one place at a time; its places add up to the time since it was made."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._place, self._since = SET_UP, time.perf_counter()

    def go(self, place: str) -> str:
        """Be in `place` from now on; where it was before."""
        now = time.perf_counter()
        self._seconds[self._place] += now - self._since
        before, self._place, self._since = self._place, place, now
        return before

    @contextmanager
    def during(self, place: str) -> Iterator[None]:
        """Be in `place` for a while."""
        before = self.go(place)
        try:
            yield
        finally:
            self.go(before)

    def move(self, seconds: float, to: str) -> None:
        """Count seconds that just passed to another place."""
        self._seconds[self._place] -= seconds
        self._seconds[to] += seconds

    def of(self, *places: str) -> float:
        """Seconds in these places so far."""
        now = time.perf_counter() - self._since if self._place in places else 0.0
        return now + sum(self._seconds[place] for place in places)

    def all(self) -> dict[str, float]:
        """Seconds of each place so far."""
        return {place: self.of(place) for place in PLACES}
