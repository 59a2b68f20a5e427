"""What a member measured: a row for each of its steps and evaluations, until its supervisor has read them."""

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from tpuswarm.swarm.member.contract import Evaluated
from tpuswarm.train.look.pictures import PICTURES, TEXTS
from tpuswarm.train.losses import COUNTS
from tpuswarm.train.recipe import Metrics


class MetricsRows:
    """Rows of metrics, read from the devices by a thread of its own as their steps end."""

    def __init__(self, name: str, steps: int, tokens: int, version: Callable[[], int]):
        """steps: that this member made before; tokens: of one of its steps; version: the one it has adopted."""
        self._version = version
        self._name, self._steps, self._tokens = name, steps, tokens
        self._pending: queue.SimpleQueue[tuple[int, Metrics]] = queue.SimpleQueue()
        self._rows: list[dict[str, Any]] = []
        self._first = 0
        self._began = self._read_at = time.monotonic()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        """Why no more rows are read."""
        threading.Thread(target=self._read, name="metrics", daemon=True).start()

    def took(self, metrics: Metrics) -> None:
        """A step was dispatched; its metrics are still on the devices. Raises what ended the reading of others."""
        if self._failure:
            raise self._failure
        self._pending.put((self._version(), metrics))

    def evaluated(self, found: Evaluated) -> None:
        """A version was evaluated. Pictures and texts go with the row, to whoever writes it."""
        attachments = {name: value for name, value in ((PICTURES, found.pictures), (TEXTS, found.texts)) if value}
        with self._lock:
            self._rows.append({"step": self._steps} | found.row | {"member": self._name} | attachments)

    def since(self, number: int) -> list[dict[str, Any]]:
        """Rows from `number` on, counted from 0; those before are forgotten."""
        with self._lock:
            self._rows = self._rows[max(0, number - self._first) :]
            self._first = max(number, self._first)
            return list(self._rows)

    def _read(self) -> None:
        try:
            while True:
                self._read_one(*self._pending.get())
        except BaseException as error:  # noqa: BLE001  # raised where the next step is
            self._failure = error

    def _read_one(self, version: int, metrics: Metrics) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        uncounted = {} if values.pop(COUNTS, True) else {"uncounted": True}  # no row of the step counts: it has no loss
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
