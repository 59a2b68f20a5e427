"""Batches on their way to the devices: rows are read and sent while the step before them runs.

A thread does that. Where rows are in memory and take no time, handing a batch from thread to thread takes longer (300
us of a step of 700, for a small model on a CPU): then they are read where they are taken, as long as that stays quick,
and one device gets them with the step's own call, without a second one that only sends them. A disk or a network may be
slow at any time, and has its thread.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from jax.sharding import Sharding

from tpuswarm.errors import InputError
from tpuswarm.train.data.placing import in_jax_types, place_batch
from tpuswarm.train.data.source import rows_of
from tpuswarm.train.recipe import Batch, Source
from tpuswarm.train.user_code import blame

PATIENCE = 1.0
"""Seconds that leaving waits for rows still being read; a save may be waiting for it."""
DEPTH = 2
"""Batches held ready or being read; more would only take device memory."""
QUICK, IN_A_ROW = 1e-3, 8
"""After so many batches read in fewer seconds each the thread ends."""
SLOW = 5e-3
"""Seconds for one batch, after which there is a thread again."""
ALIVE = DEPTH + 2
"""Batches on the devices at once, at most: besides those, that of the step which runs and that of the one dispatched
behind it."""


class Feed:
    """The batches of a run from one step on: batch(step) = rows(step * size, size).

    They are on the devices, or in NumPy's arrays where one device gets them with the step's own call. A context
    manager; its thread ends with it.
    """

    def __init__(self, source: Source, spec: Mapping[str, Any], sharding: Sharding, first_step: int, last_step: int):
        self._source, self._spec, self._sharding = source, dict(spec), sharding
        self._in_memory = getattr(source, "in_memory", False)
        self._steps, self._size = iter(range(first_step, last_step)), next(iter(self._spec.values())).shape[0]
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue()
        """Of the thread; None: it has ended, and the next batch is read where it is taken."""
        self._room = threading.Semaphore(DEPTH)  # taken before a batch is read: one read too early is on the devices
        self._stopped = threading.Event()
        self._begin()

    def _begin(self) -> None:
        self._ahead = True
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def __enter__(self) -> "Feed":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._room.release()
        self._thread.join(PATIENCE)

    def next(self, leave: Callable[[], bool] = lambda: False) -> tuple[Batch, float] | None:
        """The next batch, and the seconds that were spent waiting for it; None if told to leave while waiting.

        Raises what reading it raised.
        """
        start = time.perf_counter()
        while self._ahead:
            try:
                item = self._ready.get(timeout=0.2)
            except queue.Empty:
                if leave():
                    return None
                continue
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                self._room.release()
                return item, time.perf_counter() - start
            self._ahead = False
        batch, seconds = self._read(next(self._steps), send=len(self._sharding.device_set) > 1)
        if seconds >= SLOW:
            self._begin()
            self._thread.start()
        return batch, seconds

    def _read(self, step: int, send: bool = True) -> tuple[Batch, float]:
        start = time.perf_counter()
        batch = read_batch(self._source, self._spec, self._sharding, step * self._size, send)
        return batch, time.perf_counter() - start

    def _run(self) -> None:
        quick = 0
        try:
            while quick < IN_A_ROW or not self._in_memory:
                self._room.acquire()
                if self._stopped.is_set() or (step := next(self._steps, None)) is None:
                    return
                batch, seconds = self._read(step)
                self._ready.put(batch)
                quick = quick + 1 if seconds < QUICK else 0
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the training thread raises it
            self._ready.put(error)


def read_batch(source: Source, spec: Mapping[str, Any], sharding: Sharding, start: int, send: bool = True) -> Batch:
    """Rows of a source from `start` on, as many as `spec` has, on the devices; each host reads those of its own.

    send: False leaves them in this host's memory, for a program of one device that takes them from there.
    """
    size = next(iter(spec.values())).shape[0]

    def read(first: int, count: int) -> Mapping[str, np.ndarray]:
        return read_rows(source, spec, start + first, count)

    return place_batch(read, size, sharding) if send else in_jax_types(read(0, size))


def read_rows(source: Source, spec: Mapping[str, Any], start: int, count: int) -> dict[str, np.ndarray]:
    """Rows of a source; InputError if their names, shapes or dtypes are not those the program was compiled for.

    spec: of a batch of any size.
    """
    with blame("the data source failed"):
        rows = rows_of(source, start, count)
    got = {name: (np.shape(array), np.asarray(array).dtype) for name, array in rows.items()}
    want = {name: ((count, *leaf.shape[1:]), np.dtype(leaf.dtype)) for name, leaf in spec.items()}
    if got != want:  # only now by name, for which NumPy takes microseconds
        are, expected = ({name: (shape, dtype.name) for name, (shape, dtype) in each.items()} for each in (got, want))
        raise InputError(
            f"rows {start} to {start + count} of the data are {are}, the program expects {expected}: every batch has "
            "the same names, shapes and dtypes, so pad or cut rows to one shape"
        )
    return rows
