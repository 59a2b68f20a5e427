"""Lines about a member's progress and the run's, for a terminal and for the output of a notebook's cell."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tpuswarm.config.formatting import format_age, format_figure, format_share, token_unit

FIRST_INTERVAL_S, MAX_INTERVAL_S = 5.0, 60.0
"""Time between two lines; it doubles."""
RATE_WINDOW_S = 600.0
"""The estimate uses what the run counted in this time."""


class Progress:
    """Says now and then where the member and the run are."""

    def __init__(self, tokens_per_row: int, say: Callable[[str], None], clock: Callable[[], float]):
        self._tokens_per_row, self._say, self._clock = tokens_per_row, say, clock
        self._interval_s, self._next = FIRST_INTERVAL_S, 0.0
        self._row: Mapping[str, Any] | None = None
        """The last step."""
        self._counts: deque[tuple[float, int]] = deque()
        """When which number of the run's tokens was known to be counted."""

    def update(self, report: Mapping[str, Any], counted: tuple[int, int] | None) -> None:
        """Take a report of the member, and the run's counted tokens with those at its end, if they are known."""
        now = self._clock()
        self._row = next((row for row in reversed(report["rows"]) if "loss" in row), self._row)
        if counted is not None and (not self._counts or counted[0] > self._counts[-1][1]):
            self._counts.append((now, counted[0]))
            while now - self._counts[0][0] > RATE_WINDOW_S and len(self._counts) > 2:
                self._counts.popleft()
        if self._row is None or now < self._next:
            return
        self._next, self._interval_s = now + self._interval_s, min(2 * self._interval_s, MAX_INTERVAL_S)
        unit = token_unit(self._tokens_per_row)
        parts = [f"step {self._row['step']:,}: loss {format_figure(self._row['loss'])}"]
        if report["rows_per_s"]:
            parts.append(f"{report['rows_per_s'] * self._tokens_per_row:,.0f} {unit}/s here")
        if counted is not None:
            left = self._left_s(now, counted)
            estimate = "" if left is None else f", about {format_age(left)} to its end"
            parts.append(f"{format_share(counted[0] / counted[1])} of the run{estimate}")
        self._say(", ".join(parts))

    def _left_s(self, now: float, counted: tuple[int, int]) -> float | None:
        """Estimate the time to the end of the run from its speed; None before it has counted twice."""
        if len(self._counts) < 2:
            return None
        (since, first), (_, last) = self._counts[0], self._counts[-1]
        return (counted[1] - last) * (now - since) / (last - first)
