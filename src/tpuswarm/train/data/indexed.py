"""Read data that has a length and an index."""

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from copy import copy
from functools import cached_property
from multiprocessing import get_context
from pickle import Pickler, PicklingError
from types import FunctionType
from typing import Any
from weakref import finalize

import numpy as np

from tpuswarm.errors import InputError, first_line
from tpuswarm.train.data.items import ArrayRows, concatenate, stack_items
from tpuswarm.train.data.source import row_numbers
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.user_code import blame


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

    def rows(self, start: int, count: int) -> ArrayRows:
        """Read rows start to start + count of the order."""
        numbers = self.row_numbers(start, count).tolist()
        if not self._workers:
            return stack_items(_items(self._data, numbers), self._names)
        size = -(-len(numbers) // self._workers)
        parts = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        pool = self._pool
        try:
            try:
                results = pool.map(_read_in_worker, parts)
            except (AttributeError, TypeError, ValueError, PicklingError) as error:  # when a process starts
                raise InputError(
                    f"the {type(self._data).__name__} cannot be sent to worker processes ({first_line(error)}): define "
                    "classes and functions at the top of a file, open files only where rows are read, or leave out "
                    "workers"
                ) from error
            return concatenate(list(results))
        except BrokenProcessPool as error:
            raise InputError(
                "a process that reads rows has died; is the program's own code under `if __name__ == '__main__':`, and "
                "is there memory for all workers?"
            ) from error

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
            self._workers, context, initializer=_start_worker, initargs=(self._data, self._names)
        )
        finalize(self, pool.shutdown)  # else it may end while Python exits, which prints a traceback
        return pool


def _items(data: Any, numbers: list[int]) -> Iterable[Any]:
    return data.__getitems__(numbers) if hasattr(data, "__getitems__") else (data[number] for number in numbers)


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


def _start_worker(*data_and_names: Any) -> None:
    _worker_data[:] = data_and_names


def _read_in_worker(numbers: list[int]) -> ArrayRows:
    data, names = _worker_data
    with blame("the data fails in a worker process"):  # only here is the failing line known
        return stack_items(_items(data, numbers), names)
