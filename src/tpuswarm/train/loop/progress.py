"""Track the progress of a run: its state, its step, and the rows it writes."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tpuswarm.train.look.outputs import Outputs
from tpuswarm.train.loop.hooks import Step
from tpuswarm.train.loop.session import Session


class Progress:
    """The state, step and newest row of a run; the loop shares them with its evaluations, hooks and checkpoints."""

    def __init__(self, session: Session, outputs: Outputs):
        self.session, self.outputs = session, outputs
        self.state = session.state
        session.state = None  # the first step donates its buffers
        self.step = session.first_step
        self.last_row: dict[str, Any] = {}
        """The newest row of an update, with the metrics of the newest evaluation."""
        self.wait_s = 0.0
        """Time spent waiting for data since that row."""
        self._noted: set[str] = set()
        """Kinds of notes, and names of metrics without a value, that were reported."""
        self._pauses = 0
        self._start = self._row_time = time.monotonic()

    def restart_clock(self) -> None:
        """Measure the time of the next row from now on."""
        self._row_time = time.monotonic()

    @contextmanager
    def pause_clock(self) -> Iterator[None]:
        """Exclude the time inside this block from the speed of training."""
        start, self._pauses = time.monotonic(), self._pauses + 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._row_time += time.monotonic() - start

    @property
    def wall_s(self) -> float:
        """Seconds of training so far, including earlier processes."""
        return self.session.wall_s + time.monotonic() - self._start

    @property
    def tokens(self) -> int:
        """Tokens of all updates so far."""
        return self.step * self.session.tokens_per_step

    def write_update(self, step: int, values: Mapping[str, float]) -> Step:
        """Write the row of an update, with None for numbers that are not finite."""
        now, tokens = time.monotonic(), self.session.tokens_per_step
        row = {
            "step": step,
            "tokens": step * tokens,
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "tokens_per_s": tokens / max(now - self._row_time, 1e-9),
            "wait_s": self.wait_s,
            "wall_s": self.wall_s,
        }
        self._row_time, self.wait_s = now, 0.0
        self.last_row |= row
        return self.write(row)

    def write(self, row: Mapping[str, Any]) -> Step:
        """Write a row of metrics.jsonl."""
        self.outputs.write_row(row)
        return Step(dict(row), self.state)

    def event(self, event: str, message: str) -> None:
        self.outputs.write_event(self.step, event, message)

    def note_once(self, kind: str, message: str) -> None:
        """Write and show a note, the first time only."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.outputs.announce(self.step, "note", message)

    def note_missing(self, row: Mapping[str, Any]) -> None:
        """Report the metrics of a row that have no value, once for each metric."""
        names = [name for name, value in row.items() if value is None and name not in self._noted]
        if names:
            self._noted.update(names)
            have = "have" if len(names) > 1 else "has"
            message = (
                f"{', '.join(names)} {have} no value at step {row['step']}: NaN or infinity, or no row counts for it; "
                "this is reported once"
            )
            self.outputs.announce(self.step, "note", message)
