"""Read data that comes in order only: loaders, streamed data sets."""

import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.data.items import ArrayRows, concatenate, item_arrays
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.user_code import blame, line_of

MIN_REPORTED_ROWS = 10_000
"""Rereading at least so many rows is reported."""
MAX_POSITIONS = 8
"""Positions to remember: more than the batches read ahead of the saved step."""


@entry_point
class StreamSource:
    """A source of data that is read in order: a DataLoader, a streamed dataset, a function that makes one.

    data: an iterable that starts again each time, or a function that makes an iterable or an iterator. batched: items
    are batches, whose first axis is the row, as in a DataLoader; otherwise items are rows. names: of the parts of items
    that are tuples. rows_per_epoch: for `--epochs` and for evaluations.

    After its end the stream starts again. A checkpoint holds its position if `data` is a function and makes an object
    with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader, Hugging Face's IterableDataset) or with
    `get_state` and `set_state` (grain's iterators). A resumed run continues there, without the content of a shuffle
    buffer. Otherwise it reads the earlier rows again, and continues exactly if they come in the same order.
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
                f"a {type(data).__name__} can be read only once, but resuming and evaluating start again; give a "
                "function that makes it"
            )
        if not (callable(data) or isinstance(data, Iterable)):
            raise InputError(f"StreamSource takes an iterable, or a function that makes one, not {data!r}")
        if rows_per_epoch is not None and not (isinstance(rows_per_epoch, Integral) and rows_per_epoch > 0):
            raise InputError(f"rows_per_epoch is a number of rows, 1 or more, not {rows_per_epoch!r}")
        self._data, self._names, self._batched = data, tuple(names), batched
        self.code_line = line_of(data if callable(data) else data.__iter__)
        """See `line_of_source`."""
        self._iterable: Any = None
        self._positions: list[dict[str, Any]] = []
        if rows_per_epoch is not None:
            self.rows_per_epoch = rows_per_epoch
        self.ended_after: int | None = None
        """Rows of a pass that ended before `rows_per_epoch`."""
        self._rows_in_pass: int | None = None
        """Rows of this pass so far; None if it did not start at the first row."""
        self._items: Iterator[Any] = iter(())
        self._buffer: list[ArrayRows] = []
        self._last_item: tuple[int, ArrayRows] | None = None
        """The newest item and its first row: going back within it needs no new pass."""
        self._next_row = 0

    def rows(self, start: int, count: int) -> ArrayRows:
        """Read rows start to start + count of the order."""
        try:
            with blame("the data source failed", every_error=True):
                return self._rows(start, count)
        except BaseException:
            self._restart()  # items were read that no batch has
            raise

    def _rows(self, start: int, count: int) -> ArrayRows:
        if self._last_item and self._last_item[0] <= start < self._next_row:
            first, part = self._last_item
            self._buffer, self._next_row = [part], first
        elif start < self._next_row:
            self._restart()
        if start - self._next_row > MIN_REPORTED_ROWS:
            with waiting(f"reading {start - self._next_row:,} rows of the stream again", delay_s=0.0):
                self._skip(start - self._next_row)
        else:
            self._skip(start - self._next_row)
        return self._take_rows(count)

    def position(self, row: int) -> dict[str, Any] | None:
        """Return the newest position at or before `row`, in plain values; None if `data` has no positions.

        `row` is one of the last few that were read; another thread may read on.
        """
        earlier = [position for position in self._positions if position["row"] <= row]
        return earlier[-1] if earlier else None

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Continue at a `position` of an earlier source of the same data."""
        iterable: Any = self._data() if callable(self._data) else None
        if _position_methods(iterable) is None and iterable is not None:
            iterable = iter(iterable)
        if (methods := _position_methods(iterable)) is None:
            raise InputError(
                "the run's checkpoint holds a position of its stream, and this stream has none: it is another kind of "
                "data; give the data of the run's start, or begin another run"
            )
        with blame("the stream cannot go to its saved position", every_error=True):
            methods[1](decode_state(position["state"]))
        self._iterable, self._items, self._rows_in_pass = iterable, iter(iterable), None
        self._buffer, self._last_item, self._next_row, self._positions = [], None, position["row"], []

    def _restart(self) -> None:
        """Begin with the first row again at the next read."""
        self._items, self._buffer, self._last_item = iter(()), [], None
        self._next_row, self._positions, self._rows_in_pass = 0, [], None

    def _start_pass(self) -> None:
        self._iterable = self._data() if callable(self._data) else self._data
        if not isinstance(self._iterable, Iterable):
            raise InputError(f"the stream's function returned {self._iterable!r}, not an iterable{line_of(self._data)}")
        self._items, self._rows_in_pass = iter(self._iterable), 0

    def _remember_position(self, row: int) -> None:
        """Remember the position before the next item, which starts with `row`."""
        if not callable(self._data):
            return  # after `go_to`, the same iterable may start its next pass anywhere; a function makes a new one
        if methods := _position_methods(self._iterable) or _position_methods(self._items):
            state = methods[0]()
            with suppress(TypeError):  # no plain form: a resumed run reads the earlier rows again
                position = {"row": row, "state": encode_state(state)}
                self._positions = [*self._positions[1 - MAX_POSITIONS :], position]

    def _skip(self, count: int) -> None:
        while count:
            count -= len(next(iter(self._take_rows(min(count, MIN_REPORTED_ROWS)).values())))

    def _take_rows(self, count: int) -> ArrayRows:
        parts: list[ArrayRows] = []
        missing, has_position = count, False  # one position for each batch: a state may be large
        while missing:
            if not self._buffer and not has_position:
                has_position = True
                self._remember_position(self._next_row + count - missing)
            if self._buffer:
                part = self._buffer.pop(0)
            else:
                part = self._read_item()
                self._last_item = (self._next_row + count - missing, part)
            size = len(next(iter(part.values())))
            if size > missing:
                self._buffer.insert(0, {name: array[missing:] for name, array in part.items()})
                part = {name: array[:missing] for name, array in part.items()}
            missing -= min(size, missing)
            parts.append(part)
        self._next_row += count
        return concatenate(parts, self.code_line)

    def _read_item(self) -> ArrayRows:
        """Read the next item as rows."""
        for _ in range(2):
            for item in self._items:
                # Copies, because the data may fill the same arrays again for its next item.
                part = item_arrays(item, self._names, lambda: "an item of the data", self.code_line)
                if not self._batched:
                    return self._count_rows({name: array[np.newaxis] for name, array in part.items()})
                sizes = {name: array.shape[:1] for name, array in part.items()}
                if len(set(sizes.values())) != 1 or () in sizes.values():
                    raise InputError(
                        f"a batch of the stream has arrays of different rows: {sizes}; use batched=False"
                        f"{self.code_line}"
                    )
                if sizes[next(iter(sizes))] != (0,):
                    return self._count_rows(part)
            if self._rows_in_pass and self._rows_in_pass < getattr(self, "rows_per_epoch", 0):
                self.ended_after = self._rows_in_pass
            self._start_pass()
        raise InputError("the stream has no rows: it ended as soon as it began")

    def _count_rows(self, part: ArrayRows) -> ArrayRows:
        if self._rows_in_pass is not None:
            self._rows_in_pass += len(next(iter(part.values())))
        return part


BYTES_KEY = "base64"
TUPLE_KEY = "tuple"
"""Marks tuples, because some libraries refuse a position with lists instead."""


def _position_methods(iterable: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Return the methods that get and set the position of an iterable or iterator."""
    for getter, setter in (("state_dict", "load_state_dict"), ("get_state", "set_state")):
        if hasattr(iterable, getter) and hasattr(iterable, setter):
            return getattr(iterable, getter), getattr(iterable, setter)
    return None


def encode_state(state: Any) -> Any:
    """Return a stream's state as JSON values; raise TypeError if that is impossible."""
    if isinstance(state, np.generic):
        state = state.item()
    if isinstance(state, bytes):
        return {BYTES_KEY: b64encode(state).decode()}
    if isinstance(state, np.ndarray) or hasattr(state, "detach"):  # a torch tensor, of a sampler's generator
        array = np.asarray(state)
        form = {"dtype": array.dtype.str, "shape": list(array.shape), "torch": not isinstance(state, np.ndarray)}
        return {BYTES_KEY: b64encode(array.tobytes()).decode(), **form}
    if isinstance(state, Mapping):
        if not all(isinstance(name, str) for name in state) or state.keys() & {BYTES_KEY, TUPLE_KEY}:
            raise TypeError("a position with names that are not strings, or that this form reserves")
        return {name: encode_state(value) for name, value in state.items()}
    if isinstance(state, tuple):
        return {TUPLE_KEY: [encode_state(value) for value in state]}
    if isinstance(state, list):
        return [encode_state(value) for value in state]
    if state is None or isinstance(state, str | int | float | bool):
        return state
    raise TypeError(f"a position with a {type(state).__name__}")


def decode_state(state: Any) -> Any:
    """Return the argument of `encode_state`."""
    if isinstance(state, Mapping):
        if state.keys() == {BYTES_KEY}:
            return b64decode(state[BYTES_KEY])
        if state.keys() == {TUPLE_KEY}:
            return tuple(decode_state(value) for value in state[TUPLE_KEY])
        if state.keys() == {BYTES_KEY, "dtype", "shape", "torch"}:
            flat = np.frombuffer(bytearray(b64decode(state[BYTES_KEY])), state["dtype"]).reshape(state["shape"])
            return sys.modules["torch"].from_numpy(flat) if state["torch"] else flat
        return {name: decode_state(value) for name, value in state.items()}
    return [decode_state(value) for value in state] if isinstance(state, list) else state
