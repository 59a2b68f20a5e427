"""A run's storage: whole files in one folder or bucket, which outlive every process.

Files never change in place. A name appears with all of its bytes or not at all, even after a power failure.
"""

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.storage.places import Copied, Folder, Remote
from tpuswarm.train.storage.bucket import Content
from tpuswarm.train.storage.folders import is_url, origin

Key = TypeVar("Key")
Found = TypeVar("Found")
READER_COUNT = 16
"""Files read in parallel: each takes tens of milliseconds from a bucket."""
READ_AHEAD_COUNT = 8 * READER_COUNT
"""Files read ahead of their use; all records of a run may not fit memory."""


class Missing(RunFailed):
    """No file of this name is stored."""

    def __init__(self, name: str, place: str):
        super().__init__(
            f"{name} is missing from {place}; restore a copy; `tpuswarm ledger verify` lists all that is missing"
        )
        self.name = name


class Corrupt(RunFailed):
    """The stored file has other bytes than were written."""

    def __init__(self, name: str, place: str, why: str):
        super().__init__(
            f"{name} in {place} is damaged: {why}; restore a copy; `tpuswarm ledger verify` lists all damage"
        )
        self.name = name


class Conflict(RunFailed):
    """Other bytes are stored under a name that may have only one content."""


class Store:
    """The files under one root: a local folder, or a URL gs://bucket/folder.

    A local folder that stands for a run in a bucket (train/storage/copy.py) is that run, with copies on this disk.

    Names are relative, with / between their parts. Errors of the outside world are raised as RunFailed. Methods may be
    called from several threads and processes at once.
    """

    def __init__(self, root: str | Path):
        """Raise InputError for a URL of another kind; accesses nothing."""
        self.root = str(root)
        self._back: Folder | Remote | Copied
        if is_url(self.root):
            self._back = Remote(self.root)
        elif url := origin(Path(root)):
            self.root, self._back = url, Copied(Remote(url), Path(root))
        else:
            self._back = Folder(Path(root))

    def create(self, name: str, data: Content) -> bool:
        """Create a file; return False, without any change, if the name exists.

        A caller without an answer calls again and compares the stored bytes with its own.
        """
        with self.translate_errors(name, "written"):
            return self._back.create(_checked(name), data)

    def put(self, name: str, data: Content) -> None:
        """Write a file whose name follows from its content, replacing an existing one."""
        with self.translate_errors(name, "written"):
            self._back.put(_checked(name), data)

    def put_file(self, name: str, part: Path) -> None:
        """Do the same as `put` with a file from `temporary`."""
        with self.translate_errors(name, "written"):
            self._back.put_file(_checked(name), part)

    @contextmanager
    def temporary(self, name: str) -> Iterator[Path]:
        """Yield an empty local file for what will be stored as `name` or beside it; remove it afterwards."""
        with self.translate_errors(name, "written"):
            part = self._back.temporary(_checked(name))
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """Return the whole file. Raise Missing if there is none."""
        with self.translate_errors(name, "read"):
            return self._back.read(_checked(name))

    def path(self, name: str) -> Path | None:
        """Return the local path of a file for memory maps; None if the root is not a local folder.

        For a run in a bucket, fetch the file first. Raise Missing if there is none.
        """
        with self.translate_errors(name, "read"):
            return self._back.path(_checked(name))

    def local_path(self, name: str) -> Path | None:
        """Return where the file is or would be on this disk; None if files are not stored on it."""
        return self._back.here(_checked(name))

    def exists(self, name: str) -> bool:
        with self.translate_errors(name, "looked for"):
            return self._back.exists(_checked(name))

    def names(self, prefix: str) -> list[str]:
        """Return all names that begin with `prefix`, sorted."""
        with self.translate_errors(prefix, "listed"):
            return sorted(self._back.names(prefix))

    def ages(self, prefix: str) -> dict[str, float]:
        """Return the age of each file in seconds, by this machine's clock, for names that begin with `prefix`."""
        now = time.time()
        with self.translate_errors(prefix, "listed"):
            return {name: now - written for name, written in self._back.find(prefix).items()}

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        with self.translate_errors(name, "deleted"):
            self._back.delete(_checked(name))

    def drop_copy(self, name: str) -> None:
        """Remove this disk's copy of a file in a bucket; the next read fetches it again."""
        if isinstance(self._back, Copied):
            with self.translate_errors(name, "deleted"):
                self._back.drop_copy(_checked(name))

    def sweep(self, seconds: float) -> None:
        """Remove temporary files older than this, which killed processes leave."""
        with self.translate_errors("a temporary file", "deleted"):
            self._back.sweep(seconds)

    def read_each(self, read: Callable[[Key], Found], keys: Iterable[Key]) -> Iterator[Found]:
        """Yield what `read` returns for each key, in order: from a bucket many at once, and some ahead."""
        if isinstance(self._back, Folder):  # threads would only wait for each other
            yield from map(read, keys)
            return
        with ThreadPoolExecutor(READER_COUNT) as pool:
            while part := list(islice(keys := iter(keys), READ_AHEAD_COUNT)):
                yield from pool.map(read, part)

    @contextmanager
    def translate_errors(self, name: str, verb: str) -> Iterator[None]:
        """Translate errors of the outside world into RunFailed, and an absent file that is "read" into Missing."""
        try:
            yield
        except RunFailed:
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError) and verb == "read":
                raise Missing(name, self.root) from error
            raise RunFailed(f"{name} in {self.root} could not be {verb}: {_reason(error)}") from error


def _checked(name: str) -> str:
    if "//" in (parts := f"/{name}/") or "/." in parts:
        raise ValueError(f"{name!r} is not a name for a stored file: its parts must not be empty or start with a dot")
    return name


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; make room and start the same command again"
    if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EOPNOTSUPP) and error.filename2:
        return "its file system has no hard links; use a folder on another one"
    return f"{' '.join(str(error).split())[:300] or type(error).__name__}; start the same command again"
