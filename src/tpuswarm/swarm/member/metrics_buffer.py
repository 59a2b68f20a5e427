"""Collect a member's metrics, one row per step and evaluation, until its supervisor has read them."""

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from tpuswarm.swarm.member.device_state import Evaluation
from tpuswarm.train.look.pictures import PICTURES, TEXTS
from tpuswarm.train.losses import HAS_COUNTED_ROWS
from tpuswarm.train.recipe import Metrics


class MetricsBuffer:
    """Rows of metrics. A thread reads them from the devices as steps end."""

    def __init__(self, name: str, steps: int, tokens: int, version: Callable[[], int]):
        """steps: how many this member made before; tokens: per step; version: returns the adopted version."""
        self._version = version
        self._name, self._steps, self._tokens = name, steps, tokens
        self._pending: queue.SimpleQueue[tuple[int, Metrics]] = queue.SimpleQueue()
        self._rows: list[dict[str, Any]] = []
        self._first = 0
        self.steps_begun = 0
        """Steps whose metrics were queued."""
        self._steps_stored = 0
        self._began = self._read_at = time.monotonic()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        """The error that ended the reading thread."""
        threading.Thread(target=self._read, name="metrics", daemon=True).start()

    def add_step(self, metrics: Metrics) -> None:
        """Queue the metrics of a dispatched step. Raise the error that ended the reading of earlier ones."""
        if self._failure:
            raise self._failure
        self.steps_begun += 1
        self._pending.put((self._version(), metrics))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Add the row of an evaluation; pictures and texts are attached for the writer."""
        parts = ((PICTURES, evaluation.pictures), (TEXTS, evaluation.texts))
        attachments = {name: value for name, value in parts if value}
        with self._lock:
            self._rows.append({"step": self._steps} | evaluation.row | {"member": self._name} | attachments)

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the rows from `number` on, counted from 0, and drop earlier ones, which the supervisor has stored."""
        with self._lock:
            count = max(0, number - self._first)
            self._steps_stored += sum("loss" in row for row in self._rows[:count])
            self._rows = self._rows[count:]
            self._first = max(number, self._first)
            return list(self._rows)

    def steps_stored(self) -> int:
        """Return how many queued steps have stored rows. Raise the error that ended the reading of metrics."""
        if self._failure:
            raise self._failure
        return self._steps_stored

    def _read(self) -> None:
        try:
            while True:
                self._read_one(*self._pending.get())
        except BaseException as error:  # noqa: BLE001  # raised at the next step
            self._failure = error

    def _read_one(self, version: int, metrics: Metrics) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        uncounted = {} if values.pop(HAS_COUNTED_ROWS, True) else {"uncounted": True}
        now = time.monotonic()
        self._steps += 1
        row = {
            "step": self._steps,
            "tokens": self._steps * self._tokens,
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "tokens_per_s": self._tokens / max(now - self._read_at, 1e-9),
            "wall_s": now - self._began,
            "member": self._name,
            "version": version,
            **uncounted,
        }
        self._read_at = now
        with self._lock:
            self._rows.append(row)
