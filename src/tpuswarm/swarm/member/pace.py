"""How fast a member trains, by the steps that it is known to have made."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median


@dataclass
class Speed:
    """Rows a second while there are rows to train: the median of the newest steps, so that no single pause counts.

    A step is known to be done when the next one was dispatched, or when the devices were waited for. The first step of
    an incarnation is left out: it warms up.
    """

    running: int = 0
    """Rows of steps not known to be done."""
    _since: float = 0.0
    _warm: bool = False
    _seconds_per_row: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def rows_per_s(self) -> float | None:
        """None until a step was measured."""
        return 1 / median(self._seconds_per_row) if self._seconds_per_row else None

    def begins(self, rows: int, now: float) -> None:
        """A step is about to be dispatched."""
        if not self.running:
            self._since = now  # the time before it was a pause
        self.running += rows

    def ends(self, rows: int, now: float) -> None:
        """Steps of so many rows are known to be done; nothing happens for none."""
        if not rows:
            return
        if self._warm:
            self._seconds_per_row.append(max(now - self._since, 1e-9) / rows)
        self.running, self._since, self._warm = self.running - rows, now, True
