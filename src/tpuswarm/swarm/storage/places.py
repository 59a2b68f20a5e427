"""The other kinds of places that a Store keeps files in, method by method as it says; errors come through as they are.

The first is a bucket, train/storage/bucket.py.
"""

import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tpuswarm.train.process.atomic import fsync_path
from tpuswarm.train.storage.bucket import Bucket, Content


class Folder:
    """A local folder."""

    def __init__(self, root: Path):
        self._root = root

    def path(self, name: str) -> Path:
        return self._root / name

    here = path

    def create(self, name: str, data: Content) -> bool:
        target, part = self.path(name), self.temporary(name)
        try:
            _write(part, data)
            fsync_path(part)
            try:
                os.link(part, target)
                created = True
            except FileExistsError:
                created = False
        finally:
            part.unlink(missing_ok=True)
        fsync_path(target.parent)  # also where another process was first: it may not have come to this yet
        return created

    def put(self, name: str, data: Content) -> None:
        part = self.temporary(name)
        try:
            _write(part, data)
            self.put_file(name, part)
        finally:
            part.unlink(missing_ok=True)

    def put_file(self, name: str, part: Path) -> None:
        fsync_path(part)
        part.replace(self.path(name))
        fsync_path(self.path(name).parent)

    def temporary(self, name: str) -> Path:
        target = self.path(name)
        missing = [folder for folder in target.parents if not folder.is_dir()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            fsync_path(folder.parent)
        part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        part.touch()
        return part

    def read(self, name: str) -> bytes:
        with open(f"{self._root}/{name}", "rb") as file:  # noqa: PTH123 (a Path takes longer than a small file)
            return file.read()

    def exists(self, name: str) -> bool:
        return self.path(name).is_file()

    def find(self, prefix: str) -> dict[str, float]:
        found = {}
        for name in self.names(prefix):
            with suppress(FileNotFoundError):  # deleted since it was listed
                found[name] = self.path(name).stat().st_mtime
        return found

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._files(prefix) if name.startswith(prefix) and "/." not in f"/{name}"]

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def sweep(self, seconds: float) -> None:
        for path in (self._root / name for name in self._files("") if name.endswith(".part")):
            with suppress(FileNotFoundError):
                if path.name.startswith(".") and time.time() - path.stat().st_mtime > seconds:
                    path.unlink()

    def _files(self, prefix: str) -> Iterator[str]:
        root, below = str(self._root), prefix.rpartition("/")[0]
        for folder, _, files in os.walk(f"{root}/{below}" if below else root, onerror=_unless_absent):
            inside = folder[len(root) + 1 :]
            yield from (f"{inside}/{file}" for file in files) if inside else files


class Remote(Bucket):
    """A bucket's folder."""

    def path(self, name: str) -> Path | None:
        """Return None: an object is no local file."""
        return None

    here = path

    def temporary(self, name: str) -> Path:
        """Return a new empty local file."""
        handle, path = tempfile.mkstemp(prefix="tpuswarm-", suffix=".part")
        os.close(handle)
        return Path(path)

    def find(self, prefix: str) -> dict[str, float]:
        """Return when each object was written, in Unix seconds, by name."""
        return {name: about.written for name, about in self.listed(prefix).items()}

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with `prefix`."""
        return list(self.listed(prefix))

    def sweep(self, seconds: float) -> None:
        """Do nothing: a bucket has no temporary files."""


class Copied:
    """A bucket's folder of files that never change, with a copy of each that was written or read on this disk."""

    def __init__(self, bucket: Remote, folder: Path):
        self._bucket, self._copies = bucket, Folder(folder)

    def path(self, name: str) -> Path:
        if not self._copies.exists(name):
            self._bucket.fetch(name, self._copies.path(name))
        return self._copies.path(name)

    def here(self, name: str) -> Path:
        return self._copies.path(name)

    def create(self, name: str, data: Content) -> bool:
        is_new = self._bucket.create(name, data)
        if is_new:
            self._copies.put(name, data)
        return is_new

    def put(self, name: str, data: Content) -> None:
        self._bucket.put(name, data)
        self._copies.put(name, data)

    def put_file(self, name: str, part: Path) -> None:
        self._bucket.put_file(name, part)
        self._copies.put_file(name, part)

    def temporary(self, name: str) -> Path:
        return self._copies.temporary(name)

    def read(self, name: str) -> bytes:
        with suppress(FileNotFoundError):
            return self._copies.read(name)
        data = self._bucket.read(name)
        self._copies.put(name, data)
        return data

    def exists(self, name: str) -> bool:
        return self._bucket.exists(name)

    def find(self, prefix: str) -> dict[str, float]:
        return self._bucket.find(prefix)

    def names(self, prefix: str) -> list[str]:
        return self._bucket.names(prefix)

    def delete(self, name: str) -> None:
        self._bucket.delete(name)
        self._copies.delete(name)

    def drop_copy(self, name: str) -> None:
        self._copies.delete(name)

    def sweep(self, seconds: float) -> None:
        self._copies.sweep(seconds)


def parts(data: Content) -> Sequence[bytes | memoryview]:
    """Return the parts of a file's content."""
    return [data] if isinstance(data, bytes) else data


def _write(path: Path, data: Content) -> None:
    with path.open("wb") as file:
        file.writelines(parts(data))


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
