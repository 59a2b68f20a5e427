"""Read data that has a length and an index."""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from copy import copy
from functools import cached_property
from multiprocessing import get_context
from pickle import Pickler
from signal import SIG_IGN, SIGINT, SIGTERM, Signals, signal
from types import FunctionType
from typing import Any
from weakref import finalize

import numpy as np

from tpuswarm.errors import InputError, TpuswarmError, message_of
from tpuswarm.train.data.items import ArrayRows, concatenate, stack_items
from tpuswarm.train.data.source import row_numbers
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.user_code import blame, describe_failure, import_files, imported_files, line_of


@entry_point
class IndexedSource:
    """A source of data with `len(data)` and `data[i]`, or with `__getitems__`, which takes lists of i.

    Examples are a torch Dataset, a Hugging Face dataset, a grain MapDataset, a list. Every epoch is a new order of
    all rows, and a resumed run continues exactly. An item is a dict of arrays or numbers, or a tuple whose parts
    `names` names. workers: processes that read and decode, each with a copy of `data`; 0: only this process.
    """

    def __init__(self, data: Any, names: Sequence[str] = (), workers: int = 0, seed: int | None = None):
        try:
            self.rows_per_epoch = len(data)
        except TypeError as error:
            raise InputError(
                f"{type(data).__name__} has no length: an IndexedSource reads rows by their number; use StreamSource"
            ) from error
        if not self.rows_per_epoch:
            raise InputError(f"{type(data).__name__} has no rows")
        self._data, self._names, self._workers = data, tuple(names), workers
        self._has_seed, self._seed = seed is not None, seed or 0
        self.code_line = _code_line(data)
        """See `line_of_source`."""

    def rows(self, start: int, count: int) -> ArrayRows:
        """Read rows start to start + count of the order."""
        numbers = self.row_numbers(start, count).tolist()
        if not self._workers:
            with blame("the data source failed", every_error=True):
                return _read_items(self._data, self._names, numbers)
        size = -(-len(numbers) // self._workers)
        parts = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        pool = self._pool
        processes: list[Any] = []
        try:
            try:
                results = pool.map(_read_in_worker, parts)
            except BrokenProcessPool:
                raise
            except Exception as error:  # when a process starts
                failure = describe_failure(f"the {type(self._data).__name__} cannot be sent to worker processes", error)
                raise InputError(
                    f"{failure}; define classes and functions at the top of a file, open files only where rows are "
                    "read, or leave out workers"
                ) from error
            processes += pool._processes.values()
            return concatenate(list(results), self.code_line)
        except BrokenProcessPool as error:
            del self._pool  # a later run makes another one
            pool.shutdown()  # waits until all have ended
            raise InputError(_describe_death([process.exitcode for process in processes])) from error

    def row_numbers(self, start: int, count: int) -> np.ndarray:
        """Return int64[count]: the rows of the data at positions start to start + count of the order."""
        return row_numbers(start, count, self.rows_per_epoch, self._seed)

    def seeded(self, seed: int) -> "IndexedSource":
        """Return the same rows in the order of a run's seed, unless the source has a seed."""
        if self._has_seed:
            return self
        other = copy(self)
        other.__dict__.pop("_pool", None)  # each pool ends with its own source
        other._has_seed, other._seed = True, seed
        return other

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        _refuse_notebook_classes(self._data)
        context = get_context("spawn")  # a fork would copy JAX's threads
        pool = ProcessPoolExecutor(
            self._workers, context, initializer=_start_worker, initargs=(_RecipeFiles(), self._data, self._names)
        )
        finalize(self, _shut_down, pool)  # else it may end while Python exits, which prints a traceback
        return pool


def _code_line(data: Any) -> str:
    return line_of(getattr(data, "__getitems__", None) or getattr(data, "__getitem__", None))


def _read_items(data: Any, names: Sequence[str], numbers: list[int]) -> ArrayRows:
    has_many = hasattr(data, "__getitems__")
    items = data.__getitems__(numbers) if has_many else (data[number] for number in numbers)
    line = _code_line(data)
    rows = stack_items(items, names, lambda position: f"row {numbers[position]} of the data", line)
    if (found := len(next(iter(rows.values()), ()))) != len(numbers):
        raise InputError(f"the data gives {found} items for {len(numbers)} rows{line}")
    return rows


def _describe_death(exit_codes: list[int | None]) -> str:
    """Explain the end of worker processes: one died, and the pool ended the others with SIGTERM."""
    code = next((code for code in exit_codes if code not in (0, None, -SIGTERM)), -SIGTERM)
    if code < 0:
        return f"a process that reads rows was ended by {Signals(-code).name}; is there memory for all workers?"
    return (
        f"a process that reads rows ended with exit code {code}; does the data end it, or is the program's own code "
        "not under `if __name__ == '__main__':`?"
    )


def _refuse_notebook_classes(data: Any) -> None:
    """Raise InputError if data needs a definition of a notebook, which worker processes cannot import."""
    if hasattr(sys.modules["__main__"], "__file__"):
        return
    finder = _MainFinder(_NullFile())
    with suppress(Exception):  # starting a process reports values that cannot be pickled
        finder.dump(data)
    if finder.found:
        raise InputError(
            f"{finder.found} is defined in a notebook or at a prompt, where worker processes cannot import it: put it "
            "into a .py file and import it, or leave out workers"
        )


class _NullFile:
    def write(self, part: Any) -> None:
        pass


class _MainFinder(Pickler):
    """Finds a class or function of `__main__` among pickled values."""

    found = ""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.found = value.__name__
        return NotImplemented


_worker_data: list[Any] = []
"""In a worker: its copy of the data, and the names."""


class _RecipeFiles:
    """Unpickled before the data, imports the recipes' files, which may define its classes, in a worker."""

    def __reduce__(self) -> Any:
        return _import_in_worker, (imported_files(),)


def _import_in_worker(files: list[str]) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # the devices are the program's
    import_files(files)


def _shut_down(pool: ProcessPoolExecutor) -> None:
    with suppress(RuntimeError):  # the pool's own thread collects the source
        pool.shutdown()


def _start_worker(*received: Any) -> None:
    signal(SIGINT, SIG_IGN)  # Ctrl-C at a terminal reaches all its processes; the program ends these
    _worker_data[:] = received[1:]


def _read_in_worker(numbers: list[int]) -> ArrayRows:
    data, names = _worker_data
    try:
        with blame("the data fails in a worker process", every_error=True):  # only here is the failing line known
            return _read_items(data, names, numbers)
    except TpuswarmError as error:
        raise InputError(message_of(error)) from None  # a user's subclass may not survive the way to this program
