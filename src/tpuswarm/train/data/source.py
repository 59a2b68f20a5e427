"""Read rows in seeded infinite orders: each row is a pure function of its position."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cached_property, lru_cache
from mmap import ALLOCATIONGRANULARITY
from pathlib import Path
from typing import Any

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.data.contents import contents_digest
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.recipe import Recipe, Source
from tpuswarm.train.user_code import describe_failure, line_of, require_call, user_line

SPLITS = ("train", "validation", "test", "all")
POLL_INTERVAL_S = 0.2
NON_NUMERIC_KINDS = "OSUmM"
"""NumPy's kinds of objects, texts and times."""
_reader_lock = threading.RLock()


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the order of `size` rows in one epoch: uint32, from 4 billion rows on int64."""
    dtype = np.uint32 if size <= 2**32 else np.int64
    return np.random.default_rng([seed, epoch]).permutation(np.arange(size, dtype=dtype))


def shuffled_epochs(start: int, count: int, rows_per_epoch: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each epoch with its rows (int64) at positions start to start + count.

    Every epoch has each row once, in its own order.
    """
    stop = start + count
    while start < stop:
        epoch, first = divmod(start, rows_per_epoch)
        length = min(stop - start, rows_per_epoch - first)
        yield epoch, permutation(seed, epoch, rows_per_epoch)[first : first + length].astype(np.int64)
        start += length


def row_numbers(start: int, count: int, rows_per_epoch: int, seed: int) -> np.ndarray:
    """Return int64[count]: the rows at positions start to start + count."""
    return np.concatenate([rows for _, rows in shuffled_epochs(start, count, rows_per_epoch, seed)])


def _offset_in_file(array: np.memmap) -> int:
    mapped = array.offset - array.offset % ALLOCATIONGRANULARITY
    start = np.frombuffer(array._mmap, np.uint8).__array_interface__["data"][0]  # type: ignore[attr-defined]
    return int(array.__array_interface__["data"][0]) - int(start) + mapped


def _to_rows(name: str, data: Any) -> np.ndarray:
    """Return data as an array of rows; keep a memory map, which is read row by row and digested as a file."""
    try:
        array = np.asanyarray(data)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{name} of the data is not an array: {error}") from error
    if array.dtype.kind in NON_NUMERIC_KINDS or not array.ndim:
        raise InputError(
            f"{name} of the data is a {type(data).__name__} ({array.dtype}): a batch is one dict of arrays of numbers "
            "whose first axis is the row"
        )
    return array


@entry_point
class ArraySource:
    """Arrays with a common first axis; every epoch is a new permutation of all rows, drawn from `seed`.

    Without a seed, training uses the run's seed. `digest` covers names, shapes, dtypes and contents; for a memory map
    it reads the whole file once, and again when the file changes.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], seed: int | None = None):
        self._arrays = {name: _to_rows(name, array) for name, array in arrays.items()}
        sizes = {name: len(array) for name, array in self._arrays.items()}
        if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise InputError(f"data arrays need the same, non-zero number of rows, not {sizes}")
        self._has_seed, self._seed = seed is not None, seed or 0
        self.rows_per_epoch = next(iter(sizes.values()))

    @property
    def in_memory(self) -> bool:
        """Whether no row is read from a file."""
        return not any(isinstance(array, np.memmap) for array in self._arrays.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the seed and the arrays."""
        digest = hashlib.sha256(str(self._seed).encode())
        for name, array in self._arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            if isinstance(array, np.memmap) and array.filename:  # may be larger than memory
                file = contents_digest(Path(array.filename))
                digest.update(f"{file} {_offset_in_file(array)} {array.strides}".encode())
            else:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)  # a view; tobytes would copy
        return digest.hexdigest()

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Read rows start to start + count of the order."""
        index = self.row_numbers(start, count)
        return {name: array[index] for name, array in self._arrays.items()}

    def row_numbers(self, start: int, count: int) -> np.ndarray:
        """Return int64[count]: the rows of the arrays at positions start to start + count of the order."""
        return row_numbers(start, count, self.rows_per_epoch, self._seed)

    def seeded(self, seed: int) -> "ArraySource":
        """Return the same rows in the order of a run's seed, unless the source has a seed."""
        if self._has_seed:
            return self
        other = copy(self)  # keeps a subclass
        other._has_seed, other._seed = True, seed
        other.__dict__.pop("digest", None)
        return other


class Repeated:
    """The first rows of a source, repeated in their order: a model should learn them by heart.

    Reads them once and keeps them, because the order of a source may change.
    """

    in_memory = True

    def __init__(self, source: Source, rows: int):
        self._source, self.rows_per_epoch = source, rows

    @cached_property
    def _rows(self) -> dict[str, np.ndarray]:
        return rows_of(self._source, 0, self.rows_per_epoch)

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Return rows start to start + count of the order."""
        index = np.arange(start, start + count) % self.rows_per_epoch
        return {name: array[index] for name, array in self._rows.items()}


def source_of(recipe: Recipe, split: str) -> Source:
    """Return the recipe's rows of a split; raise InputError unless they are a source, or NoSuchSplit."""
    require_call(recipe.data, "Recipe.data", "split")
    source = recipe.data(split)
    if not hasattr(source, "rows"):
        raise InputError(
            f"the {split} data of {recipe.name} is a {type(source).__name__}: give a Source, an object with rows(start,"
            f" count) such as ArraySource(arrays), or raise NoSuchSplit{line_of(recipe.data)}"
        )
    require_call(source.rows, "rows", "start", "count")
    return source


def rows_of(source: Source, start: int, count: int) -> dict[str, np.ndarray]:
    """Read rows start to start + count of a source as copies; raise InputError unless they are arrays by name.

    Only one thread at a time reads: splits may share a data set. A source may fill the same arrays again at the next
    call.
    """
    with reader_lock(source):
        rows = source.rows(start, count)
        if not isinstance(rows, Mapping):
            raise InputError(
                f"rows({start}, {count}) of the data returns a {type(rows).__name__}, not a dict of arrays by name"
                f"{line_of_source(source)}"
            )
        return copy_arrays(rows, lambda: f"rows {start} to {start + count} of the data", line_of_source(source))


def line_of_source(source: Source) -> str:
    """Return the line of the user's code that reads rows, to end a sentence; empty without one."""
    return str(getattr(source, "code_line", "")) or line_of(source.rows)


def copy_arrays(values: Mapping[str, Any], label: Callable[[], str], line: str) -> dict[str, np.ndarray]:
    """Copy arrays of any library to NumPy arrays; raise InputError for one that is no array of numbers.

    label, line: what they are and where they come from, for the error.
    """
    arrays = {}
    for name, value in values.items():
        try:
            array = np.array(np.asarray(value))  # in two steps, because NumPy cannot copy a torch tensor
        except Exception as error:
            place = "" if user_line(error) else line
            failure = describe_failure(f"{name} of {label()} is not an array", error)
            raise InputError(f"{failure}; pad or cut it to one shape{place}") from error
        if array.dtype.kind in NON_NUMERIC_KINDS:
            raise InputError(
                f"{name} of {label()} is a {type(value).__name__} ({array.dtype}), not an array of numbers: leave "
                f"it out (names=[…] of IndexedSource and StreamSource chooses){line}"
            )
        arrays[name] = array
    return arrays


@contextmanager
def reader_lock(source: Source, should_leave: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold the lock for reading a source; yield False, without the lock, if `should_leave` returns True meanwhile.

    Our own sources need no lock: they never wait for a thread that hangs in the data of an earlier run.
    """
    if type(source) in (ArraySource, Repeated):
        yield True
        return
    while not (has_lock := _reader_lock.acquire(timeout=POLL_INTERVAL_S)):
        if should_leave():
            break
    try:
        yield has_lock
    finally:
        if has_lock:
            _reader_lock.release()


def training_source(recipe: Recipe, seed: int) -> Source:
    """Return the rows that a run with this seed trains on."""
    source = source_of(recipe, "train")
    seeded = getattr(source, "seeded", None)
    return source if seeded is None else seeded(seed)


def by_split(data: Any) -> Callable[[str], Any]:
    """Return a recipe's data as a function of the split."""
    if callable(data):
        require_call(data, "data", "split")
        return data
    if isinstance(data, Mapping) and data and data.keys() <= set(SPLITS):
        return data.get
    for name, value in data.items() if isinstance(data, Mapping) else ():
        if isinstance(value, Mapping) or hasattr(value, "rows"):
            raise InputError(
                f"data has a {type(value).__name__} under {name}: a batch is one dict of arrays, without dicts in it; "
                f"a dict of splits has the keys {', '.join(SPLITS)}"
            )
    return {"train": data}.get
