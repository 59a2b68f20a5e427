"""Lock files that the processes of this computer share."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tpuswarm.errors import InputError


def lock(file: IO[Any], way_out: str, wait: bool = False) -> None:
    """Lock an open file. Raise BlockingIOError if another process holds it, InputError on a file system without locks.

    way_out: where the file could be instead.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        path = Path(file.name)
        with suppress(OSError):
            path.unlink()
        raise InputError(
            f"{path.parent} is on a file system without locks ({error.strerror}): {way_out}, or mount it with locks"
        ) from error


@contextmanager
def locked(path: Path, way_out: str) -> Iterator[None]:
    """Hold the lock of a file, which is created; wait for other processes. Raise InputError as `lock`."""
    with path.open("a") as file:
        lock(file, way_out, wait=True)
        yield


def read_lock_holder(path: Path) -> str | None:
    """Return the text that the holder of a file lock wrote into the file; None if nobody holds it."""
    with suppress(FileNotFoundError, NotADirectoryError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip()
        except OSError:  # a file system without locks, where nobody can hold one
            pass
    return None
