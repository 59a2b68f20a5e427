"""Data that can only be read in order as a source."""

import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.data.items import ArrayRows, joined, named, stacked
from tpuswarm.train.data.source import copied
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.user_code import line_of

REPORTED_ROWS = 10_000
"""Reading at least so many rows again is reported."""
MAX_POSITIONS = 8
"""Remembered positions of a stream: more than the batches that are read ahead of the step that is saved."""


@entry_point
class StreamSource:
    """A source of data that is read in order: a DataLoader, a streamed dataset, a function that makes one.

    data: an iterable that begins anew each time, or a function that makes an iterable or an iterator. batched: items
    are batches, whose first axis is the row, as those of a DataLoader; else they are rows. names: those of the parts of
    items that are tuples. rows_per_epoch: for `--epochs` and for evaluations.

    After its end the stream begins anew. A checkpoint holds its position if `data` is a function and makes an object
    with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader, Hugging Face's IterableDataset) or with
    `get_state` and `set_state` (grain's iterators). A resumed run then goes on there, without what a shuffle buffer
    held. Otherwise it reads the earlier rows again, and goes on exactly if they come in the same order.
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
        """Rows of a pass that ended before `rows_per_epoch`."""
        self._passed: int | None = None
        """Rows of this pass so far; None if it did not begin at the first."""
        self._items: Iterator[Any] = iter(())
        self._held: list[ArrayRows] = []
        self._last: tuple[int, ArrayRows] | None = None
        """The newest item and its first row: reading within it again needs no new pass."""
        self._next = 0

    def rows(self, start: int, count: int) -> ArrayRows:
        """Read rows start to start + count of the order."""
        if self._last and self._last[0] <= start < self._next:
            first, part = self._last
            self._held, self._next = [part], first
        elif start < self._next:
            self._items, self._held, self._last, self._next, self._positions = iter(()), [], None, 0, []
        if start - self._next > REPORTED_ROWS:
            with waiting(f"reading {start - self._next:,} rows of the stream again", short=0.0):
                self._skip(start - self._next)
        else:
            self._skip(start - self._next)
        return self._take(count)

    def position(self, row: int) -> dict[str, Any] | None:
        """Return the newest position at or before `row`, in plain values; None if `data` has no positions.

        `row` is one of the last few that were read; another thread may read on.
        """
        known = [each for each in self._positions if each["row"] <= row]
        return known[-1] if known else None

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Continue at a `position` of an earlier source of the same data."""
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
        """Begin a new pass over the data."""
        self._made = self._data() if callable(self._data) else self._data
        if not isinstance(self._made, Iterable):
            raise InputError(f"the stream's function returned {self._made!r}, not an iterable{line_of(self._data)}")
        self._items, self._passed = iter(self._made), 0

    def _remember(self, row: int) -> None:
        """Remember the position before the next item, which begins with `row`."""
        # An iterable that was set to a position may begin its next pass anywhere; a function makes a new one.
        methods = (_methods(self._made) or _methods(self._items)) if callable(self._data) else None
        if methods is not None:
            try:
                state = encoded(methods[0]())
            except TypeError:
                return  # it has no plain form: what came before is read again
            self._positions = [*self._positions[1 - MAX_POSITIONS :], {"row": row, "state": state}]

    def _skip(self, count: int) -> None:
        while count:
            count -= len(next(iter(self._take(min(count, REPORTED_ROWS)).values())))

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
        return joined(found)

    def _read(self) -> ArrayRows:
        """Read the next item as rows."""
        for _ in range(2):
            for item in self._items:
                if not self._batched:
                    return self._counted(stacked([item], self._names))
                # A copy: the data may fill the same arrays again for its next item.
                part = {name: copied(value) for name, value in named(item, self._names).items()}
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
"""The key under which `encoded` puts bytes and arrays."""
TUPLE = "tuple"
"""The key under which it puts tuples: some libraries refuse a position with lists in their place."""


def _methods(made: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return the methods that get and set the position of an iterable or iterator."""
    for get, set_ in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if hasattr(made, get) and hasattr(made, set_):
            return getattr(made, get), getattr(made, set_)
    return None


def encoded(state: Any) -> Any:
    """Return a stream's position as values of JSON; TypeError if it has no such form."""
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
    """Return what `encoded` was given."""
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
