"""Read batches and send them to the devices while the step before runs.

A thread reads ahead. For rows in memory the exchange between threads would cost more than the read (300 us of a step of
700, for a small model on a CPU). Then the training thread reads them itself while that stays quick, and a single device
gets them with the step's own call. Files and networks may be slow at any time and always have the thread.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Sharding

from tpuswarm.errors import InputError
from tpuswarm.train.data.placing import narrow_rows, place_batch
from tpuswarm.train.data.source import line_of_source, rows_of
from tpuswarm.train.recipe import Batch, Source
from tpuswarm.train.user_code import blame

CLOSE_TIMEOUT_S = 1.0
"""How long closing waits for the thread; a save may follow."""
MAX_READ_AHEAD = 2
"""Batches that are ready or being read; more would only take device memory."""
QUICK_READ_S, QUICK_READS = 1e-3, 8
"""So many quick reads in a row end the thread."""
SLOW_READ_S = 5e-3
"""A slower read starts the thread again."""
MAX_BATCHES_ON_DEVICES = MAX_READ_AHEAD + 2
"""Includes the batches of the running step and of the step behind it."""


class Feed:
    """The batches of a run from a step on: batch(step) = rows(step * size, size).

    They are on the devices; a single device may get NumPy arrays with the step's call. A context manager that ends its
    thread.
    """

    def __init__(self, source: Source, spec: Mapping[str, Any], sharding: Sharding, first_step: int, last_step: int):
        self._source, self._spec, self._sharding = source, dict(spec), sharding
        self._in_memory = getattr(source, "in_memory", False)
        self._steps, self._size = iter(range(first_step, last_step)), next(iter(self._spec.values())).shape[0]
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue()
        """Results of the thread; None if it has ended, and the caller reads the next batch."""
        self._free = threading.Semaphore(MAX_READ_AHEAD)  # acquired before a read, which fills device memory
        self._stopped = threading.Event()
        self._make_thread()

    def _make_thread(self) -> None:
        self._has_thread = True
        self._thread = threading.Thread(target=self._read_ahead, name="feed", daemon=True)

    def __enter__(self) -> "Feed":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._free.release()
        self._thread.join(CLOSE_TIMEOUT_S)

    def next(self, should_leave: Callable[[], bool] = lambda: False) -> tuple[Batch, float] | None:
        """Return the next batch and the seconds spent waiting; None if `should_leave` returns True while waiting.

        Raise the error of the read.
        """
        start = time.perf_counter()
        while self._has_thread:
            try:
                item = self._ready.get(timeout=0.2)
            except queue.Empty:
                if should_leave():
                    return None
                continue
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                self._free.release()
                return item, time.perf_counter() - start
            self._has_thread = False
        batch, read_s = self._read(next(self._steps), send=len(self._sharding.device_set) > 1)
        if read_s >= SLOW_READ_S:
            self._make_thread()
            self._thread.start()
        return batch, read_s

    def _read(self, step: int, send: bool = True) -> tuple[Batch, float]:
        start = time.perf_counter()
        batch = read_batch(self._source, self._spec, self._sharding, step * self._size, send)
        return batch, time.perf_counter() - start

    def _read_ahead(self) -> None:
        quick_reads = 0
        try:
            while quick_reads < QUICK_READS or not self._in_memory:
                self._free.acquire()
                if self._stopped.is_set() or (step := next(self._steps, None)) is None:
                    return
                batch, read_s = self._read(step)
                self._ready.put(batch)
                quick_reads = quick_reads + 1 if read_s < QUICK_READ_S else 0
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001  # the training thread raises it
            self._ready.put(error)


def read_batch(source: Source, spec: Mapping[str, Any], sharding: Sharding, start: int, send: bool = True) -> Batch:
    """Return the rows of a source from `start` on, as many as `spec` has, on the devices; each host reads its own.

    send: False returns NumPy arrays, for a program of one device.
    """
    size = next(iter(spec.values())).shape[0]

    def read(first: int, count: int) -> Mapping[str, np.ndarray]:
        return read_checked_rows(source, spec, start + first, count)

    return place_batch(read, size, sharding) if send else narrow_rows(read(0, size))


def read_checked_rows(source: Source, spec: Mapping[str, Any], start: int, count: int) -> dict[str, np.ndarray]:
    """Return rows of a source; raise InputError if names, shapes or dtypes differ from `spec`."""
    with blame("the data source failed"):
        rows = rows_of(source, start, count)
    got = {name: (np.shape(array), np.asarray(array).dtype) for name, array in rows.items()}
    want = {name: ((count, *leaf.shape[1:]), np.dtype(leaf.dtype)) for name, leaf in spec.items()}
    if got != want:
        found, expected = (
            {name: (shape, dtype.name) for name, (shape, dtype) in arrays.items()} for arrays in (got, want)
        )
        raise InputError(
            f"rows {start} to {start + count} of the data are {found}, the program expects {expected}: every batch has "
            f"the same names, shapes and dtypes, so pad or cut rows to one shape{line_of_source(source)}"
        )
    return rows
