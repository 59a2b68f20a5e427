"""Where a run keeps what must outlive every process: whole files in one folder or bucket, named once.

Nothing here is ever changed in place. A name appears with all of its bytes or not at all, also after a power cut.
"""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.storage.places import Copied, Folder, Remote
from tpuswarm.train.storage.bucket import Content
from tpuswarm.train.storage.folders import origin


class Missing(RunFailed):
    """Nothing of this name is stored."""

    def __init__(self, name: str, place: str):
        super().__init__(
            f"{name} is missing from {place}; restore a copy; `tpuswarm ledger verify` lists all that is missing"
        )
        self.name = name


class Corrupt(RunFailed):
    """What is stored under this name is not what was written."""

    def __init__(self, name: str, place: str, why: str):
        super().__init__(
            f"{name} in {place} is damaged: {why}; restore a copy; `tpuswarm ledger verify` lists all damage"
        )
        self.name = name


class Conflict(RunFailed):
    """Other bytes are stored under a name that may have only one content for ever."""


class Store:
    """The files under one root: a local folder, or a URL gs://bucket/folder.

    A local folder that stands for a run in a bucket (train/storage/copy.py) is that run, with copies on this disk.

    Names are relative, with / between their parts. What goes wrong outside is raised as RunFailed. Methods may be
    called from several threads and processes at once.
    """

    def __init__(self, root: str | Path):
        """Raises InputError for a root that cannot hold a run; touches nothing."""
        self.root = str(root)
        self._back: Folder | Remote | Copied
        protocol, apart, _ = self.root.partition("://")
        if not apart and (url := origin(Path(root))):
            self.root, self._back = url, Copied(Remote(url), Path(root))
        elif not apart:
            self._back = Folder(Path(root))
        elif protocol == "file":
            self._back = Folder(Path(self.root.removeprefix("file://")))
        elif protocol in ("gs", "gcs"):
            self._back = Remote(self.root)
        else:
            raise InputError(
                f"{self.root} cannot hold a run: only local folders and gs:// were tested for creating a file only if "
                "it does not exist; use one of these"
            )

    def create(self, name: str, data: Content) -> bool:
        """Write a new file; False, and nothing done, if one of that name is there.

        A caller who got no answer calls again, and compares what it then finds with its own bytes.
        """
        with self._failing(name, "written"):
            return self._back.create(_checked(name), data)

    def put(self, name: str, data: Content) -> None:
        """Write a file whose name follows from its content; what is there under that name is replaced."""
        with self._failing(name, "written"):
            self._back.put(_checked(name), data)

    def put_file(self, name: str, part: Path) -> None:
        """As `put`, from a file that `temporary` gave."""
        with self._failing(name, "written"):
            self._back.put_file(_checked(name), part)

    @contextmanager
    def temporary(self, name: str) -> Iterator[Path]:
        """A local file, empty, to write what will be called `name`, or a name beside it; it is gone afterwards."""
        with self._failing(name, "written"):
            part = self._back.temporary(_checked(name))
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """The whole file; raises Missing if there is none."""
        with self._failing(name, "read"):
            return self._back.read(_checked(name))

    def path(self, name: str) -> Path | None:
        """Where a file is or would be, for memory maps; None where the root is not a local folder.

        Of a run in a bucket it is brought first: raises Missing where there is none.
        """
        with self._failing(name, "read"):
            return self._back.path(_checked(name))

    def here(self, name: str) -> Path | None:
        """Where on this disk something may lie beside the run's files; None where they are not on it."""
        return self._back.here(_checked(name))

    def exists(self, name: str) -> bool:
        """Whether a file of that name is there."""
        with self._failing(name, "looked for"):
            return self._back.exists(_checked(name))

    def names(self, prefix: str) -> list[str]:
        """All names that begin with `prefix`, sorted."""
        with self._failing(prefix, "listed"):
            return sorted(self._back.names(prefix))

    def ages(self, prefix: str) -> dict[str, float]:
        """Of each name that begins with `prefix`, seconds since the file was written, by this machine's clock."""
        now = time.time()
        with self._failing(prefix, "listed"):
            return {name: now - written for name, written in self._back.find(prefix).items()}

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""
        with self._failing(name, "deleted"):
            self._back.delete(_checked(name))

    def sweep(self, seconds: float) -> None:
        """Remove temporary files that are older than this: killed processes leave them."""
        with self._failing("a temporary file", "deleted"):
            self._back.sweep(seconds)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turn what can go wrong while the file at `path` is read into Missing and RunFailed."""
        with self._failing(name, "read"):
            yield

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Turn what can go wrong while a temporary file is written into RunFailed."""
        with self._failing(name, "written"):
            yield

    @contextmanager
    def _failing(self, name: str, verb: str) -> Iterator[None]:
        try:
            yield
        except RunFailed:
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError) and verb == "read":
                raise Missing(name, self.root) from error
            raise RunFailed(f"{name} in {self.root} could not be {verb}: {_reason(error)}") from error


def _checked(name: str) -> str:
    if not all(part and not part.startswith(".") for part in name.split("/")):
        raise ValueError(f"{name!r} is not a name for a stored file: its parts must not be empty or begin with a dot")
    return name


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; make room and start the same command again"
    if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EOPNOTSUPP) and error.filename2:
        return "its file system has no hard links; use a folder on another one"
    return f"{' '.join(str(error).split())[:300] or type(error).__name__}; start the same command again"
