"""Files of another machine, of which this one reads only the parts that it needs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

READ_AHEAD_ROWS = 512
"""Rows to fetch before they are asked for, so that a slow network delays no step."""
MAX_REQUEST_BYTES = 2**21
"""Bytes of rows in one request."""

Read = Callable[[np.ndarray, int], np.ndarray]
"""Return the bytes at positions int64[n], each of a length: uint8[n, length]."""


class RemoteFile:
    """A file that stands at `path` for its readers here."""

    def __init__(self, path: Path, read: Read, download: Callable[[], None]):
        """read: fetches parts; download: puts the whole file at `path`."""
        self.path, self._read, self._download = path, read, download

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return uint8[n, length], in requests of a moderate size."""
        count = max(1, MAX_REQUEST_BYTES // length)
        parts = [self._read(starts[first : first + count], length) for first in range(0, len(starts), count)]
        return np.concatenate(parts) if parts else np.empty((0, length), np.uint8)

    def whole(self) -> Path:
        """Return its path, downloading it first."""
        if not self.path.exists():
            self._download()
        _files.pop(self.path, None)
        return self.path


_files: dict[Path, RemoteFile] = {}


def provide(file: RemoteFile) -> None:
    """Let readers of this process find a file that is not on this machine."""
    _files[file.path] = file


def find_remote(path: Path) -> RemoteFile | None:
    return _files.get(path)


class RemoteArray:
    """A vector in a remote file. `windows` fetches rows; anything else that NumPy does with it downloads the file."""

    def __init__(self, file: RemoteFile, dtype: Any, first: int, stop: int):
        """first, stop: its elements in the file."""
        self._file, self.dtype, self._first, self._stop = file, np.dtype(dtype), first, stop
        self._ready: dict[int, np.ndarray] = {}
        """Rows that were fetched before they were asked for, by position."""
        self._ahead: Future[dict[int, np.ndarray]] | None = None
        self._reader = ThreadPoolExecutor(1, "read-ahead")

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __len__(self) -> int:
        return self._stop - self._first

    def __getitem__(self, part: slice) -> "RemoteArray":
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"a part of a remote array is contiguous, not every {step}th element")
        return RemoteArray(self._file, self.dtype, self._first + start, self._first + max(start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.memmap(self._file.whole(), self.dtype, "r")[self._first : self._stop]
        return whole if dtype is None else whole.astype(dtype)

    def windows(self, starts: np.ndarray, length: int, then: np.ndarray) -> np.ndarray:
        """Return the rows at positions int64[n], [n, length], and begin to fetch those that will follow."""
        wanted = starts.tolist()
        if self._ahead is not None and any(start not in self._ready for start in wanted):
            self._ready |= self._ahead.result()
            self._ahead = None
        if missing := [start for start in wanted if start not in self._ready]:
            self._ready |= self._fetch(missing, length)
        rows = np.stack([self._ready[start] for start in wanted])
        following = dict.fromkeys(then.tolist())
        self._ready = {start: row for start, row in self._ready.items() if start in following}
        if self._ahead is None and 2 * len(self._ready) <= len(following):
            soon = [start for start in following if start not in self._ready]
            self._ahead = self._reader.submit(self._fetch, soon, length)
        return rows

    def _fetch(self, starts: list[int], length: int) -> dict[int, np.ndarray]:
        size = self.dtype.itemsize
        found = self._file.read((np.array(starts, np.int64) + self._first) * size, length * size)
        return dict(zip(starts, found.view(self.dtype), strict=True))
