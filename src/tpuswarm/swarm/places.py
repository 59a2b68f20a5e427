"""The kinds of places that a Store keeps files in, method by method as it says; errors come through as they are."""
# ruff: noqa: D102

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpuswarm.train.files import google_storage, sync


class Folder:
    """A local folder."""

    raised: type[Exception] = OSError

    def __init__(self, root: Path):
        self._root = root

    def path(self, name: str) -> Path:
        return self._root / name

    def create(self, name: str, data: bytes) -> bool:
        target, part = self.path(name), self.temporary(name)
        try:
            part.write_bytes(data)
            sync(part)
            try:
                os.link(part, target)
                created = True
            except FileExistsError:
                created = False
        finally:
            part.unlink(missing_ok=True)
        sync(target.parent)  # also where another process was first: it may not have come to this yet
        return created

    def put(self, name: str, data: bytes) -> None:
        part = self.temporary(name)
        try:
            part.write_bytes(data)
            self.put_file(name, part)
        finally:
            part.unlink(missing_ok=True)

    def put_file(self, name: str, part: Path) -> None:
        sync(part)
        part.replace(self.path(name))
        sync(self.path(name).parent)

    def temporary(self, name: str) -> Path:
        target = self.path(name)
        missing = [folder for folder in target.parents if not folder.is_dir()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            sync(folder.parent)
        part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        part.touch()
        return part

    def read(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def exists(self, name: str) -> bool:
        return self.path(name).is_file()

    def find(self, prefix: str) -> dict[str, float]:
        written = {path.relative_to(self._root).as_posix(): at for path, at in self._files(prefix)}
        return {name: at for name, at in written.items() if name.startswith(prefix) and "/." not in f"/{name}"}

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def sweep(self, seconds: float) -> None:
        for path, at in self._files(""):
            if path.name.startswith(".") and path.suffix == ".part" and time.time() - at > seconds:
                path.unlink(missing_ok=True)

    def _files(self, prefix: str) -> Iterator[tuple[Path, float]]:
        for folder, _, files in os.walk(self._root / prefix.rpartition("/")[0], onerror=_unless_absent):
            for path in (Path(folder, file) for file in files):
                with suppress(FileNotFoundError):  # deleted since it was listed
                    yield path, path.stat().st_mtime


class Bucket:
    """A folder of a Google Cloud Storage bucket."""

    raised: type[Exception] = Exception  # each library behind it has its own types

    def __init__(self, url: str):
        self._fs = self._connect(url)
        self._root = self._fs._strip_protocol(url).rstrip("/")

    def _connect(self, url: str) -> Any:
        return google_storage(url)

    def path(self, name: str) -> None:
        return None

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._full(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._full(name), data)

    def put_file(self, name: str, part: Path) -> None:
        self._fs.put_file(str(part), self._full(name))

    def temporary(self, name: str) -> Path:
        handle, path = tempfile.mkstemp(prefix="tpuswarm-", suffix=".part")
        os.close(handle)
        return Path(path)

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._full(name))

    def exists(self, name: str) -> bool:
        return self._fs.isfile(self._full(name))

    def find(self, prefix: str) -> dict[str, float]:
        files = self._fs.find(self._full(prefix.rpartition("/")[0]).rstrip("/"), detail=True)
        written = {full[len(self._root) + 1 :]: self._written(about) for full, about in files.items()}
        return {name: at for name, at in written.items() if name.startswith(prefix)}

    def _written(self, about: dict[str, Any]) -> float:
        return about["mtime"].timestamp()

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._full(name))

    def sweep(self, seconds: float) -> None:
        """A bucket has no temporary files."""

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}"


class Memory(Bucket):
    """The memory of this process. fsspec looks first and writes then, hence the lock."""

    _lock = threading.Lock()

    def _connect(self, url: str) -> Any:
        from fsspec.implementations.memory import MemoryFileSystem

        return MemoryFileSystem()

    def create(self, name: str, data: bytes) -> bool:
        with self._lock:
            return super().create(name, data)

    def put_file(self, name: str, part: Path) -> None:
        self.put(name, part.read_bytes())  # all of it in one step

    def _written(self, about: dict[str, Any]) -> float:
        return about["created"]


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
