"""A folder of a bucket; errors come through as they are.

A bucket that does not answer is asked again for some minutes: a run outlives that.
"""
# ruff: noqa: D102

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tpuswarm.train.process.atomic import google_storage

PATIENCE, PAUSE = 600.0, 2.0
"""Seconds for which a bucket that does not answer is asked again, and between two tries."""
Answer = TypeVar("Answer")
Content = bytes | Sequence[bytes | memoryview]
"""Of a file: its bytes, or parts of it, one after the other."""


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
            self._ask(lambda: self._fs.pipe_file(self._full(name), b"".join(parts(data)), mode="create"))
        except FileExistsError:
            return False
        return True

    def put(self, name: str, data: Content) -> None:
        self._ask(lambda: self._fs.pipe_file(self._full(name), b"".join(parts(data))))

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


def parts(data: Content) -> Sequence[bytes | memoryview]:
    """Those of a file's content."""
    return [data] if isinstance(data, bytes) else data


def _passes(error: Exception) -> bool:
    """Whether it may go well at another time: the network is cut, or a server has too much to do."""
    from gcsfs.retry import is_retriable  # type: ignore[import-untyped]

    return is_retriable(error) or isinstance(error, (ConnectionError, TimeoutError))
