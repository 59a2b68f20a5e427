"""Which files need not be hashed again: those that this process has hashed or written, and that nobody has touched."""

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

MOST = 20_000
"""Files that are remembered; the oldest are forgotten."""
SETTLED = 1.0
"""Seconds. A file system's clock ticks in milliseconds: a change within the tick of the last one does not show in a
file's time. So a file counts only once its time is this old, and one of our own gets a time that old."""


class _Stamp(NamedTuple):
    inode: int
    size: int
    written: int
    """Nanoseconds."""


class Stamps:
    """Digests of files by name. Methods may be called from several threads."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Stamp, str]] = {}
        self._lock = threading.Lock()

    def holds(self, name: str, path: Path, digest: str) -> bool:
        """Whether the file is known to have this digest. Raises OSError where it cannot be looked at."""
        return self._known.get(name) == (_stamp(path), digest)

    def wrote(self, name: str, path: Path | None, digest: str) -> None:
        """Of a file that this process has just put there whole; None: it is not on this disk."""
        if path is not None:
            now = time.time_ns()
            os.utime(path, ns=(now, now - int(SETTLED * 1e9)))
            self._keep(name, _stamp(path), digest)

    def read(self, name: str, before: os.stat_result, path: Path, digest: str) -> None:
        """Of a file that has been hashed; before: what it was when it was opened."""
        stamp = _stamp(path)
        if stamp == _of(before) and time.time_ns() - stamp.written > SETTLED * 1e9:
            self._keep(name, stamp, digest)

    def _keep(self, name: str, stamp: _Stamp, digest: str) -> None:
        with self._lock:
            self._known.pop(name, None)
            if len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            self._known[name] = stamp, digest


def _stamp(path: Path) -> _Stamp:
    return _of(path.stat())


def _of(found: os.stat_result) -> _Stamp:
    return _Stamp(found.st_ino, found.st_size, found.st_mtime_ns)
