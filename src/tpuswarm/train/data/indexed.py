"""Data with a length and an index as a source."""

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
from tpuswarm.train.data.items import ArrayRows, joined, stacked
from tpuswarm.train.data.source import row_numbers
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.user_code import blame


@entry_point
class IndexedSource:
    """A source of data with `len(data)` and `data[i]`, or with `__getitems__`, which takes lists of i.

    Examples are a torch Dataset, a Hugging Face dataset, a grain MapDataset, a list. Every epoch is a new order of
    all rows, and a resumed run reads on exactly where it was. An item is a dict of arrays or numbers, or a tuple whose
    parts `names` names. workers: processes that read and decode, each with a copy of `data`; 0: none but this one.
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
        self._given, self._seed = seed, seed or 0

    def rows(self, start: int, count: int) -> ArrayRows:
        """Read rows start to start + count of the order."""
        index = self.row_numbers(start, count).tolist()
        if not self._workers:
            return stacked(_items(self._data, index), self._names)
        each = -(-len(index) // self._workers)
        parts = [index[first : first + each] for first in range(0, len(index), each)]
        pool = self._pool
        try:
            try:
                found = pool.map(_work, parts)
            except (AttributeError, TypeError, ValueError, PicklingError) as error:  # when a process starts
                raise InputError(
                    f"the {type(self._data).__name__} cannot be sent to worker processes ({first_line(error)}): define "
                    "classes and functions at the top of a file, open files only where rows are read, or leave out "
                    "workers"
                ) from error
            return joined(list(found))
        except BrokenProcessPool as error:
            raise InputError(
                "a process that reads rows has died; is the program's own code under `if __name__ == '__main__':`, and "
                "is there memory for all workers?"
            ) from error

    def row_numbers(self, start: int, count: int) -> np.ndarray:
        """Return int64[count]: the rows of the data at positions start to start + count of the order."""
        return row_numbers(start, count, self.rows_per_epoch, self._seed)

    def seeded(self, seed: int) -> "IndexedSource":
        """Return the same rows in the order of a run's seed; itself if it was given a seed."""
        if self._given is not None:
            return self
        other = copy(self)
        other.__dict__.pop("_pool", None)  # which ends with its source
        other._given = other._seed = seed
        return other

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        _refuse_notebook_classes(self._data)
        context = get_context("spawn")  # a fork would take JAX's threads with it
        pool = ProcessPoolExecutor(self._workers, context, initializer=_begin, initargs=(self._data, self._names))
        finalize(self, pool.shutdown)  # one that ends by itself may do so while Python ends, which prints a traceback
        return pool


def _items(data: Any, index: list[int]) -> Iterable[Any]:
    return data.__getitems__(index) if hasattr(data, "__getitems__") else (data[row] for row in index)


def _refuse_notebook_classes(data: Any) -> None:
    """Raise InputError if data needs what is defined in a notebook: worker processes have no file to import it from."""
    if hasattr(sys.modules["__main__"], "__file__"):
        return
    finder = _MainFinder(_Discarded())
    with suppress(Exception):  # starting a process reports values that cannot be pickled
        finder.dump(data)
    if finder.found:
        raise InputError(
            f"{finder.found} is defined in a notebook or at a prompt, where worker processes cannot import it: put it "
            "into a .py file and import it, or leave out workers"
        )


class _Discarded:
    def write(self, part: Any) -> None:
        """Keep nothing."""


class _MainFinder(Pickler):
    """Find a class or function of `__main__` in what is pickled."""

    found = ""

    def reducer_override(self, value: Any) -> Any:
        """Look at a value, and leave it to the pickler."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.found = value.__name__
        return NotImplemented


_mine: list[Any] = []
"""In a worker: its copy of the data, and the names."""


def _begin(*mine: Any) -> None:
    _mine[:] = mine


def _work(index: list[int]) -> ArrayRows:
    data, names = _mine
    with blame("the data fails in a worker process"):  # here, where its line is known
        return stacked(_items(data, index), names)
