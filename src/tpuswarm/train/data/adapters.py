"""Data of other libraries as sources: what has a length and an index, and what only comes one after the other."""

import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from copy import copy
from functools import cached_property
from multiprocessing import get_context
from numbers import Integral
from pickle import Pickler, PicklingError
from types import FunctionType
from typing import Any
from weakref import finalize

import numpy as np

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, first_line
from tpuswarm.train.data.source import copied, row_numbers
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.user_code import blame, line_of

ArrayRows = dict[str, np.ndarray]
AGAIN = 10_000
"""Rows from which on reading a stream again is worth a word."""
NO_NUMBERS = "OSUmM"
"""Kinds of arrays of objects, texts and times."""
POSITIONS = 8
"""Of a stream that are remembered: more than batches are read ahead of the step that is saved."""


@entry_point
class IndexedSource:
    """Whatever has `len(data)` and `data[i]`, or is called with lists of i by `__getitems__`, as a source.

    A torch Dataset, a Hugging Face dataset, a grain MapDataset, a list: every epoch is a new permutation of all rows,
    and a resumed run reads on exactly where it was. An item is a dict of arrays or numbers, or a tuple, whose parts
    `names` names. workers: processes that read and decode, each with a copy of `data`; 0: the process that trains.
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
        """Rows start to start + count of the order."""
        index = self.row_numbers(start, count).tolist()
        if not self._workers:
            return stacked(_items(self._data, index), self._names)
        each = -(-len(index) // self._workers)
        parts = [index[first : first + each] for first in range(0, len(index), each)]
        pool = self._pool
        try:
            try:
                found = pool.map(_work, parts)
            except (AttributeError, TypeError, ValueError, PicklingError) as error:  # as a process is started
                raise InputError(
                    f"the {type(self._data).__name__} cannot be sent to worker processes ({first_line(error)}): define "
                    "classes and functions at the top of a file, open files only where rows are read, or leave out "
                    "workers"
                ) from error
            return _joined(list(found))
        except BrokenProcessPool as error:
            raise InputError(
                "a process that reads rows has died; is the program's own code under `if __name__ == '__main__':`, and "
                "is there memory for all workers?"
            ) from error

    def row_numbers(self, start: int, count: int) -> np.ndarray:
        """int64[count]: which rows of the data have the positions start to start + count in the order."""
        return row_numbers(start, count, self.rows_per_epoch, self._seed)

    def seeded(self, seed: int) -> "IndexedSource":
        """The same rows in the order of a run's seed; itself where it was given one."""
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


@entry_point
class StreamSource:
    """What only comes one after the other, as a source: a DataLoader, a streamed dataset, a function that makes one.

    data: an iterable that begins anew each time, or a function that makes one, or an iterator. batched: its items are
    batches, whose first axis is the row, as those of a DataLoader; else they are rows. names: of the parts of items
    that are tuples. rows_per_epoch: where it is known and needed, for `--epochs` and for evaluations.

    After its end it begins anew. Where `data` is a function, and what it makes has a position (`state_dict` and
    `load_state_dict`, as torchdata's StatefulDataLoader and Hugging Face's IterableDataset, or `get_state` and
    `set_state`, as grain's iterators), a checkpoint holds it, and a run that resumes goes on there, as exactly as its
    position is: a shuffle buffer is not in it. Else it reads what came before again and throws it away, and goes on
    exactly where it was if the same rows come in the same order.
    """

    def __init__(
        self,
        data: Iterable[Any] | Callable[[], Iterable[Any]],
        names: Sequence[str] = (),
        batched: bool = True,
        rows_per_epoch: int | None = None,
    ):
        if isinstance(data, Iterator):
            raise InputError(
                f"a {type(data).__name__} can be read only once: a run that resumes, or evaluates, begins anew; give a "
                "function that makes it"
            )
        if not (callable(data) or isinstance(data, Iterable)):
            raise InputError(f"StreamSource takes an iterable, or a function that makes one, not {data!r}")
        if rows_per_epoch is not None and not (isinstance(rows_per_epoch, Integral) and rows_per_epoch > 0):
            raise InputError(f"rows_per_epoch is a number of rows, 1 or more, not {rows_per_epoch!r}")
        self._data, self._names, self._batched = data, tuple(names), batched
        self._made: Any = None
        self._positions: list[dict[str, Any]] = []
        if rows_per_epoch is not None:
            self.rows_per_epoch = rows_per_epoch
        self.ended_after: int | None = None
        """Rows of a pass over the data that ended before `rows_per_epoch`."""
        self._passed: int | None = None
        """Rows of this pass so far; None where it did not begin at the first."""
        self._items: Iterator[Any] = iter(())
        self._held: list[ArrayRows] = []
        self._last: tuple[int, ArrayRows] | None = None
        """The item that was read last, and its first row: to go back within it nothing is read again."""
        self._next = 0

    def rows(self, start: int, count: int) -> ArrayRows:
        """Rows start to start + count of the order."""
        if self._last and self._last[0] <= start < self._next:
            first, part = self._last
            self._held, self._next = [part], first
        elif start < self._next:
            self._items, self._held, self._last, self._next, self._positions = iter(()), [], None, 0, []
        if start - self._next > AGAIN:
            with waiting(f"reading {start - self._next:,} rows of the stream again", short=0.0):
                self._skip(start - self._next)
        else:
            self._skip(start - self._next)
        return self._take(count)

    def position(self, row: int) -> dict[str, Any] | None:
        """Where to begin in order to read on from `row` soon: plain values; None where `data` has no positions.

        For a row of the last few that were read; another thread may read on.
        """
        known = [each for each in self._positions if each["row"] <= row]
        return known[-1] if known else None

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Begin where `position` of an earlier source of the same data says."""
        made: Any = self._data() if callable(self._data) else None
        if _methods(made) is None and made is not None:
            made = iter(made)
        if (methods := _methods(made)) is None:
            raise InputError(
                "the run's checkpoint holds a position of its stream, and this stream has none: it is another kind of "
                "data; give what the run was begun with, or begin another run"
            )
        methods[1](decoded(position["state"]))
        self._made, self._items, self._passed = made, iter(made), None
        self._held, self._last, self._next, self._positions = [], None, position["row"], []

    def _begin(self) -> None:
        """A new pass over the data."""
        self._made = self._data() if callable(self._data) else self._data
        if not isinstance(self._made, Iterable):
            raise InputError(f"the stream's function returned {self._made!r}, not an iterable{line_of(self._data)}")
        self._items, self._passed = iter(self._made), 0

    def _remember(self, row: int) -> None:
        """The position before the next item, which begins with `row`."""
        # Of what is no function it is not known where it begins anew once it was set somewhere.
        methods = (_methods(self._made) or _methods(self._items)) if callable(self._data) else None
        if methods is not None:
            try:
                state = encoded(methods[0]())
            except TypeError:
                return  # it has no plain form: what came before is read again
            self._positions = [*self._positions[1 - POSITIONS :], {"row": row, "state": state}]

    def _skip(self, count: int) -> None:
        while count:
            count -= len(next(iter(self._take(min(count, AGAIN)).values())))

    def _take(self, count: int) -> ArrayRows:
        found: list[ArrayRows] = []
        wanted, remembered = count, False  # once for each batch: a state may be large
        while wanted:
            if not self._held and not remembered:
                remembered = True
                self._remember(self._next + count - wanted)
            if self._held:
                part = self._held.pop(0)
            else:
                part = self._read()
                self._last = (self._next + count - wanted, part)
            size = len(next(iter(part.values())))
            if size > wanted:
                self._held.insert(0, {name: array[wanted:] for name, array in part.items()})
                part = {name: array[:wanted] for name, array in part.items()}
            wanted -= min(size, wanted)
            found.append(part)
        self._next += count
        return _joined(found)

    def _read(self) -> ArrayRows:
        """The next item as rows."""
        for _ in range(2):
            for item in self._items:
                if not self._batched:
                    return self._counted(stacked([item], self._names))
                # A copy: the data may fill the same arrays again for its next item.
                part = {name: copied(value) for name, value in _named(item, self._names).items()}
                sizes = {name: array.shape[:1] for name, array in part.items()}
                if len(set(sizes.values())) != 1 or () in sizes.values():
                    raise InputError(f"a batch of the stream has arrays of different rows: {sizes}; use batched=False")
                if sizes[next(iter(sizes))] != (0,):
                    return self._counted(part)
            if self._passed and self._passed < getattr(self, "rows_per_epoch", 0):
                self.ended_after = self._passed
            self._begin()
        raise InputError("the stream has no rows: it ended as soon as it began")

    def _counted(self, part: ArrayRows) -> ArrayRows:
        if self._passed is not None:
            self._passed += len(next(iter(part.values())))
        return part


BYTES = "base64"
"""The key of what `encoded` makes of bytes and arrays."""
TUPLE = "tuple"
"""That of tuples: what a position is set to is often compared with what it was."""


def _methods(made: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """What tells the position of an iterable or iterator, and sets it."""
    for get, set_ in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if hasattr(made, get) and hasattr(made, set_):
            return getattr(made, get), getattr(made, set_)
    return None


def encoded(state: Any) -> Any:
    """A stream's position as values of JSON; TypeError for what has no such form."""
    if isinstance(state, np.generic):
        state = state.item()
    if isinstance(state, bytes):
        return {BYTES: b64encode(state).decode()}
    if isinstance(state, np.ndarray) or hasattr(state, "detach"):  # torch's, of a sampler's generator
        array = np.asarray(state)
        form = {"dtype": array.dtype.str, "shape": list(array.shape), "torch": not isinstance(state, np.ndarray)}
        return {BYTES: b64encode(array.tobytes()).decode(), **form}
    if isinstance(state, Mapping):
        if not all(isinstance(name, str) for name in state) or state.keys() & {BYTES, TUPLE}:
            raise TypeError("a position whose names are no texts, or the keys of this form")
        return {name: encoded(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return {TUPLE: [encoded(value) for value in state]}
    if isinstance(state, list):
        return [encoded(value) for value in state]
    if state is None or isinstance(state, str | int | float | bool):
        return state
    raise TypeError(f"a position with a {type(state).__name__}")


def decoded(state: Any) -> Any:
    """What `encoded` was given."""
    if isinstance(state, Mapping):
        if state.keys() == {BYTES}:
            return b64decode(state[BYTES])
        if state.keys() == {TUPLE}:
            return tuple(decoded(value) for value in state[TUPLE])
        if state.keys() == {BYTES, "dtype", "shape", "torch"}:
            flat = np.frombuffer(bytearray(b64decode(state[BYTES])), state["dtype"]).reshape(state["shape"])
            return sys.modules["torch"].from_numpy(flat) if state["torch"] else flat
        return {name: decoded(value) for name, value in state.items()}
    return [decoded(value) for value in state] if isinstance(state, list) else state


def stacked(items: Iterable[Any], names: Sequence[str]) -> ArrayRows:
    """Stack items to one batch; each is copied before the next is read, which may fill the same arrays again.

    Raises InputError unless they are arrays of numbers of one shape.
    """
    columns: dict[str, list[np.ndarray]] = {}
    types: dict[str, str] = {}
    for number, item in enumerate(items):
        row = _named(item, names)
        if number == 0:
            types = {name: type(value).__name__ for name, value in row.items()}
            columns = {name: [] for name in row}
        for name, column in columns.items():
            with _one_shape(name):
                column.append(copied(row[name]))
    rows = {}
    for name, column in columns.items():
        with _one_shape(name):
            rows[name] = np.stack(column)
        if rows[name].dtype.kind in NO_NUMBERS:
            raise InputError(
                f"{name} of the data is a {types[name]}: items are dicts of arrays and numbers; name the others with "
                "names=[…]"
            )
    return rows


def _joined(parts: Sequence[ArrayRows]) -> ArrayRows:
    """One batch from parts of one; InputError where one lacks an array, or has rows of another shape."""
    first = parts[0]
    for part in parts[1:]:
        for name in first.keys() | part.keys():
            if name not in first or name not in part:
                raise InputError(f"some items of the data have {name}, others do not: give each of them the same names")
            shape, other = first[name].shape[1:], part[name].shape[1:]
            if shape != other:
                raise InputError(
                    f"{name} of the data has rows of shape {shape} and of {other}, and a batch has rows of one: pad or "
                    "cut them to one shape"
                )
    return {name: np.concatenate([part[name] for part in parts]) for name in first}


@contextmanager
def _one_shape(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:
        raise InputError(f"{name} of the data cannot be one array: {error}; pad or cut it to one shape") from error


def _named(item: Any, names: Sequence[str]) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        for name in names:
            if name not in item:
                raise InputError(f"an item of the data has no {name}; {did_you_mean(name, list(item))}")
        return {name: item[name] for name in names} if names else item
    parts = tuple(item) if isinstance(item, tuple | list) else (item,)
    if len(parts) != len(names):
        raise InputError(
            f"an item of the data is a {type(item).__name__} of {len(parts)} parts, and {len(names)} names are given: "
            "say what they are, as in names=['image', 'label']"
        )
    return dict(zip(names, parts, strict=True))


def _items(data: Any, index: list[int]) -> Iterable[Any]:
    return data.__getitems__(index) if hasattr(data, "__getitems__") else (data[row] for row in index)


def _refuse_notebook_classes(data: Any) -> None:
    """Raise InputError if data needs what is defined in a notebook: worker processes have no file to import it from."""
    if hasattr(sys.modules["__main__"], "__file__"):
        return
    finder = _MainFinder(_Discarded())
    with suppress(Exception):  # what cannot be pickled is found as a process starts
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
