"""A store of a swarm's record in memory, for tests and measurements without a disk."""

import os
import tempfile
import threading
import time
from pathlib import Path

from tpuswarm.swarm.storage.places import parts
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.storage.bucket import Content


class Memory:
    """The files of a Store."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def path(self, name: str) -> Path | None:
        return None

    here = path

    def create(self, name: str, data: Content) -> bool:
        with self._lock:
            if self.exists(name):
                return False
            self._write(name, data)
            return True

    def put(self, name: str, data: Content) -> None:
        self._write(name, data)

    def _write(self, name: str, data: Content) -> None:
        self._files[name] = b"".join(parts(data)), time.time()

    def put_file(self, name: str, part: Path) -> None:
        self._write(name, part.read_bytes())

    def temporary(self, name: str) -> Path:
        handle, path = tempfile.mkstemp(suffix=".part")
        os.close(handle)
        return Path(path)

    def read(self, name: str) -> bytes:
        try:
            return self._files[name][0]
        except KeyError:
            raise FileNotFoundError(name) from None

    def fetch(self, name: str, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(self.read(name))

    def exists(self, name: str) -> bool:
        return name in self._files

    def find(self, prefix: str) -> dict[str, float]:
        return {name: written for name, (_, written) in list(self._files.items()) if name.startswith(prefix)}

    def names(self, prefix: str) -> list[str]:
        return list(self.find(prefix))

    def delete(self, name: str) -> None:
        self._files.pop(name, None)

    def sweep(self, seconds: float) -> None: ...


class MemoryStore(Store):
    """A Store in memory."""

    def __init__(self) -> None:
        self.root, self._back = "memory", Memory()  # type: ignore[assignment]
