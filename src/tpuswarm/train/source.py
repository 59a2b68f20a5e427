"""Seeded infinite orders: the row at a position is a pure function of the position."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from mmap import ALLOCATIONGRANULARITY
from pathlib import Path

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.contents import contents_digest


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


def _first_byte(array: np.memmap) -> int:
    """Where in its file a memory map, or a part of one, begins."""
    mapped = array.offset - array.offset % ALLOCATIONGRANULARITY
    start = np.frombuffer(array._mmap, np.uint8).__array_interface__["data"][0]  # type: ignore[attr-defined]
    return int(array.__array_interface__["data"][0]) - int(start) + mapped


class ArraySource:
    """Arrays with a common first axis; every epoch is a new permutation of all rows, drawn from `seed`.

    `digest` covers names, shapes, dtypes and contents; of a memory map that of its whole file, which is read once for
    each state of it.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], seed: int = 0):
        sizes = {name: len(array) for name, array in arrays.items()}
        if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise InputError(f"data arrays need the same, non-zero number of rows, not {sizes}")
        # asanyarray keeps a memory map what it is: read row by row, and known as one to the digest.
        self._arrays = {name: np.asanyarray(array) for name, array in arrays.items()}
        self._seed = seed
        self.rows_per_epoch = next(iter(sizes.values()))
        self.digest = self._digest()

    def _digest(self) -> str:
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
        index = np.concatenate([rows for _, rows in shuffled(start, count, self.rows_per_epoch, self._seed)])
        return {name: array[index] for name, array in self._arrays.items()}
