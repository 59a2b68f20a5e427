"""The kinds of places that a Store keeps files in, method by method as it says; errors come through as they are.

A bucket that does not answer is asked again for some minutes: a run outlives that.
"""
# ruff: noqa: D102

import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tpuswarm.train.process.atomic import google_storage, sync

PATIENCE, PAUSE = 600.0, 2.0
"""Seconds for which a bucket that does not answer is asked again, and between two tries."""
Answer = TypeVar("Answer")
Content = bytes | Sequence[bytes | memoryview]
"""Of a file: its bytes, or parts of it, one after the other."""


class Folder:
    """A local folder."""

    raised: type[Exception] = OSError

    def __init__(self, root: Path):
        self._root = root

    def path(self, name: str) -> Path:
        return self._root / name

    here = path

    def create(self, name: str, data: Content) -> bool:
        target, part = self.path(name), self.temporary(name)
        try:
            _write(part, data)
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

    def put(self, name: str, data: Content) -> None:
        part = self.temporary(name)
        try:
            _write(part, data)
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
        """By strings: a long run has hundreds of thousands."""
        root, below = str(self._root), prefix.rpartition("/")[0]
        for folder, _, files in os.walk(f"{root}/{below}" if below else root, onerror=_unless_absent):
            inside = folder[len(root) + 1 :]
            yield from (f"{inside}/{file}" for file in files) if inside else files


class Held(NamedTuple):
    """An object as a listing shows it."""

    size: int
    version: str
    """Another one for whatever is written in its place."""
    written: float
    """Unix seconds, by the bucket's clock."""


class Bucket:
    """A folder of a Google Cloud Storage bucket."""

    raised: type[Exception] = Exception  # each library behind it has its own types

    def __init__(self, url: str):
        self._fs = self._connect(url)
        self._root = self._fs._strip_protocol(url).rstrip("/")
        self._answered = False

    def _connect(self, url: str) -> Any:
        return google_storage(url)

    def path(self, name: str) -> Path | None:
        return None

    here = path

    def create(self, name: str, data: Content) -> bool:
        try:
            self._ask(lambda: self._fs.pipe_file(self._full(name), b"".join(_parts(data)), mode="create"))
        except FileExistsError:
            return False
        return True

    def put(self, name: str, data: Content) -> None:
        self._ask(lambda: self._fs.pipe_file(self._full(name), b"".join(_parts(data))))

    def put_file(self, name: str, part: Path) -> None:
        self._ask(lambda: self._fs.put_file(str(part), self._full(name)))

    def temporary(self, name: str) -> Path:
        handle, path = tempfile.mkstemp(prefix="tpuswarm-", suffix=".part")
        os.close(handle)
        return Path(path)

    def read(self, name: str) -> bytes:
        return self._ask(lambda: bytes(self._fs.cat_file(self._full(name))))

    def fetch(self, name: str, to: Path) -> None:
        """Bring a file to this disk, whole or not at all."""
        to.parent.mkdir(parents=True, exist_ok=True)
        part = to.with_name(f".{to.name}.{secrets.token_hex(8)}.part")
        try:
            self._ask(lambda: self._fs.get_file(self._full(name), str(part)))
            part.replace(to)
        finally:
            part.unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        return self._ask(lambda: bool(self._fs.isfile(self._full(name))))

    def find(self, prefix: str) -> dict[str, float]:
        return {name: about.written for name, about in self.listed(prefix).items()}

    def names(self, prefix: str) -> list[str]:
        return list(self.listed(prefix))

    def listed(self, prefix: str) -> dict[str, Held]:
        """All that begins with `prefix`, by name."""
        files = self._ask(lambda: self._fs.find(self._full(prefix.rpartition("/")[0]).rstrip("/"), detail=True))
        found = {full[len(self._root) + 1 :]: self._held(about) for full, about in files.items()}
        return {name: about for name, about in found.items() if name.startswith(prefix)}

    def _held(self, about: dict[str, Any]) -> Held:
        return Held(int(about["size"]), str(about.get("generation")), about["mtime"].timestamp())

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(lambda: self._fs.rm_file(self._full(name)))

    def sweep(self, seconds: float) -> None:
        """A bucket has no temporary files."""

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        """The answer. Where it has answered before, a bucket that cannot be reached is waited for.

        A call may so be carried out more than once.
        """
        end = time.monotonic() + (PATIENCE if self._answered else 0.0)
        while True:
            try:
                answer = call()
            except (FileNotFoundError, FileExistsError):
                self._answered = True
                raise
            except Exception as error:
                if not _passes(error) or time.monotonic() > end:
                    raise
            else:
                self._answered = True
                return answer
            time.sleep(PAUSE)


def _parts(data: Content) -> Sequence[bytes | memoryview]:
    return [data] if isinstance(data, bytes) else data


def _write(path: Path, data: Content) -> None:
    with path.open("wb") as file:
        file.writelines(_parts(data))


def _passes(error: Exception) -> bool:
    """Whether it may go well at another time: the network is cut, or a server has too much to do."""
    from gcsfs.retry import is_retriable  # type: ignore[import-untyped]

    return is_retriable(error) or isinstance(error, (ConnectionError, TimeoutError))


class Copied(Bucket):
    """A bucket's folder of files that never change, with a copy of each that was written or read on this disk."""

    def __init__(self, url: str, folder: Path):
        super().__init__(url)
        self._copies = Folder(folder)

    def path(self, name: str) -> Path:
        if not self._copies.exists(name):
            self.fetch(name, self._copies.path(name))
        return self._copies.path(name)

    def here(self, name: str) -> Path:
        return self._copies.path(name)

    def create(self, name: str, data: Content) -> bool:
        created = super().create(name, data)
        if created:
            self._copies.put(name, data)
        return created

    def put(self, name: str, data: Content) -> None:
        super().put(name, data)
        self._copies.put(name, data)

    def put_file(self, name: str, part: Path) -> None:
        super().put_file(name, part)
        self._copies.put_file(name, part)

    def temporary(self, name: str) -> Path:
        return self._copies.temporary(name)

    def read(self, name: str) -> bytes:
        with suppress(FileNotFoundError):
            return self._copies.read(name)
        data = super().read(name)
        self._copies.put(name, data)
        return data

    def delete(self, name: str) -> None:
        super().delete(name)
        self._copies.delete(name)

    def sweep(self, seconds: float) -> None:
        self._copies.sweep(seconds)


class Memory(Bucket):
    """The memory of this process. fsspec looks first and writes then, hence the lock."""

    _lock = threading.Lock()

    def _connect(self, url: str) -> Any:
        from fsspec.implementations.memory import MemoryFileSystem

        return MemoryFileSystem()

    def create(self, name: str, data: Content) -> bool:
        with self._lock:
            return super().create(name, data)

    def put_file(self, name: str, part: Path) -> None:
        self.put(name, part.read_bytes())  # all of it in one step

    def _held(self, about: dict[str, Any]) -> Held:
        return Held(about["size"], "", about["created"])


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
