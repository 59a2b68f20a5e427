"""Seeded infinite orders: the row at a position is a pure function of the position."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from tpuswarm.train.user_code import line_of, require_call

SPLITS = ("train", "validation", "test", "all")
POLL_S = 0.2
_reading = threading.RLock()


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of `size` rows in one epoch: int64 (uint32 up to 4 billion rows)."""
    dtype = np.uint32 if size <= 2**32 else np.int64
    return np.random.default_rng([seed, epoch]).permutation(np.arange(size, dtype=dtype))


def shuffled(start: int, count: int, rows_per_epoch: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """The rows (int64) at positions start to start + count, epoch by epoch.

    Each epoch has every row once, in its own order.
    """
    stop = start + count
    while start < stop:
        epoch, first = divmod(start, rows_per_epoch)
        length = min(stop - start, rows_per_epoch - first)
        yield epoch, permutation(seed, epoch, rows_per_epoch)[first : first + length].astype(np.int64)
        start += length


def row_numbers(start: int, count: int, rows_per_epoch: int, seed: int) -> np.ndarray:
    """int64[count]: the rows at positions start to start + count, as `shuffled` gives them."""
    return np.concatenate([rows for _, rows in shuffled(start, count, rows_per_epoch, seed)])


def _first_byte(array: np.memmap) -> int:
    """Where in its file a memory map, or a part of one, begins."""
    mapped = array.offset - array.offset % ALLOCATIONGRANULARITY
    start = np.frombuffer(array._mmap, np.uint8).__array_interface__["data"][0]  # type: ignore[attr-defined]
    return int(array.__array_interface__["data"][0]) - int(start) + mapped


def _numbers(name: str, data: Any) -> np.ndarray:
    """An array of rows; InputError for what is none."""
    try:
        array = np.asanyarray(data)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{name} of the data is no array: {error}") from error
    if array.dtype.kind in "OSUMm" or not array.ndim:
        raise InputError(
            f"{name} of the data is a {type(data).__name__} ({array.dtype}): a batch is one dict of arrays of numbers "
            "whose first axis is the row"
        )
    return array


@entry_point
class ArraySource:
    """Arrays with a common first axis; every epoch is a new permutation of all rows, drawn from `seed`.

    Without a seed of their own, rows a run trains on come in the order of the run's seed.

    `digest` covers names, shapes, dtypes and contents; of a memory map that of its whole file, which is read once for
    each state of it.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], seed: int | None = None):
        # asanyarray keeps a memory map what it is: read row by row, and known as one to the digest.
        self._arrays = {name: _numbers(name, array) for name, array in arrays.items()}
        sizes = {name: len(array) for name, array in self._arrays.items()}
        if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise InputError(f"data arrays need the same, non-zero number of rows, not {sizes}")
        self._given, self._seed = seed, seed or 0
        self.rows_per_epoch = next(iter(sizes.values()))

    @property
    def in_memory(self) -> bool:
        """Whether no row is read from a file."""
        return not any(isinstance(array, np.memmap) for array in self._arrays.values())

    @cached_property
    def digest(self) -> str:
        """Of the order and of everything in it."""
        digest = hashlib.sha256(str(self._seed).encode())
        for name, array in self._arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            if isinstance(array, np.memmap) and array.filename:  # may be larger than memory
                file = contents_digest(Path(array.filename))
                digest.update(f"{file} {_first_byte(array)} {array.strides}".encode())
            else:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)  # a view: tobytes would hold it twice
        return digest.hexdigest()

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Rows start to start + count of the order."""
        index = self.row_numbers(start, count)
        return {name: array[index] for name, array in self._arrays.items()}

    def row_numbers(self, start: int, count: int) -> np.ndarray:
        """int64[count]: which rows of the arrays have the positions start to start + count in the order."""
        return row_numbers(start, count, self.rows_per_epoch, self._seed)

    def seeded(self, seed: int) -> "ArraySource":
        """The same rows in the order of a run's seed; itself where it was given one."""
        if self._given is not None:
            return self
        other = copy(self)  # of the same class, which may read rows in a way of its own
        other._given = other._seed = seed
        other.__dict__.pop("digest", None)
        return other


class Repeated:
    """The first rows of a source again and again, in their order: what a model should be able to learn by heart.

    They are read once, at the first use, and held: a source whose order changes would give others the next time.
    """

    in_memory = True

    def __init__(self, source: Source, rows: int):
        self._source, self.rows_per_epoch = source, rows

    @cached_property
    def _held(self) -> dict[str, np.ndarray]:
        return rows_of(self._source, 0, self.rows_per_epoch)

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Rows start to start + count of the order."""
        index = np.arange(start, start + count) % self.rows_per_epoch
        return {name: array[index] for name, array in self._held.items()}


def source_of(recipe: Recipe, split: str) -> Source:
    """The recipe's rows of one split; InputError for what is no source. Raises NoSuchSplit."""
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
    """Read rows start to start + count of a source; InputError unless they are arrays by name.

    One thread at a time reads what is not in memory, of whatever source: splits may share a data set, which need not
    bear two at once. The arrays are copies, for a source may fill its own again at the next call.
    """
    with nullcontext() if getattr(source, "in_memory", False) else reading():
        rows = source.rows(start, count)
        if isinstance(rows, Mapping):
            return {name: copied(array) for name, array in rows.items()}
    raise InputError(
        f"rows({start}, {count}) of the data returns a {type(rows).__name__}, not a dict of arrays by name"
        f"{line_of(source.rows)}"
    )


def copied(array: Any) -> np.ndarray:
    """A copy of an array of any library as NumPy's."""
    return np.array(np.asarray(array))  # in two steps: torch's tensors refuse to be copied by NumPy


@contextmanager
def reading(leave: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Wait until no other thread reads data, and hold others back; False if told to leave while waiting."""
    while not (is_alone := _reading.acquire(timeout=POLL_S)):
        if leave():
            break
    try:
        yield is_alone
    finally:
        if is_alone:
            _reading.release()


def training_rows(recipe: Recipe, seed: int) -> Source:
    """What a run with this seed trains on."""
    source = source_of(recipe, "train")
    seeded = getattr(source, "seeded", None)
    return source if seeded is None else seeded(seed)


def by_split(data: Any) -> Callable[[str], Any]:
    """What a recipe was given as its data, as a function of the split."""
    if callable(data):
        require_call(data, "data", "split")
        return data
    if isinstance(data, Mapping) and data and data.keys() <= set(SPLITS):
        return data.get
    for name, each in data.items() if isinstance(data, Mapping) else ():
        if isinstance(each, Mapping) or hasattr(each, "rows"):
            raise InputError(
                f"data has a {type(each).__name__} under {name}: a batch is one dict of arrays, without dicts in it; "
                f"a dict of splits has the keys {', '.join(SPLITS)}"
            )
    return {"train": data}.get
