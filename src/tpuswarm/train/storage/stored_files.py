"""Read objects of a bucket as files, a few megabytes at a time."""

import base64
import io
from typing import Any, BinaryIO, cast

from typing_extensions import Buffer

from tpuswarm.errors import RunFailed
from tpuswarm.train.storage.bucket import WAY_OUT, Bucket, Listed

READ_BYTES = 2**24


class StoredFiles:
    """The object at a gs:// URL, or all objects below it, as they were when it was listed."""

    def __init__(self, url: str):
        """Raises FileNotFoundError if there is none, and BucketFailed."""
        self.root = url.partition("://")[2].strip("/")
        name, _, path = self.root.partition("/")
        if not name:
            raise FileNotFoundError(url)
        self._bucket = Bucket(f"gs://{name}")
        below = self._bucket.listed(f"{path}/" if path else "")
        objects = below or {one: found for one, found in self._bucket.listed(path).items() if one == path}
        if not objects:
            raise FileNotFoundError(url)
        self._objects = {f"{name}/{one}": found for one, found in objects.items()}

    @property
    def names(self) -> list[str]:
        """The files, as BUCKET/NAME."""
        return list(self._objects)

    def info(self, name: str) -> dict[str, Any]:
        """Return name, size and version of a file."""
        found = self._objects[name]
        return {"name": name, "size": found.size, "generation": found.generation, "crc32c": found.crc32c}

    def open(self, name: str, mode: str) -> BinaryIO:
        """Open a file for reading; others may be open meanwhile."""
        raw = _StoredFile(self._bucket, name.partition("/")[2], self._objects[name])
        return cast(BinaryIO, io.BufferedReader(raw, READ_BYTES))


class _StoredFile(io.RawIOBase):
    """An object. Raises RunFailed if it was read from beginning to end and has another checksum."""

    def __init__(self, bucket: Bucket, name: str, about: Listed):
        import google_crc32c

        self._bucket, self._name, self._about = bucket, name, about
        self._at = self._checked = 0
        self._checksum: Any = google_crc32c.Checksum()  # type: ignore[no-untyped-call]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._about.size}[whence]
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._about.size)
        if end <= self._at:
            return 0
        try:
            data = self._bucket.read_range(self._name, self._about.generation, self._at, end)
        except FileNotFoundError as error:
            raise self._failed("replaced or deleted while it was read") from error
        view[: len(data)] = data
        if self._at == self._checked:
            self._checksum.update(data)
            self._checked += len(data)
        self._at += len(data)
        is_whole = self._checked == self._about.size == self._at
        if is_whole and base64.b64encode(self._checksum.digest()).decode() != self._about.crc32c:
            raise self._failed("damaged in transit")
        return len(data)

    def _failed(self, how: str) -> RunFailed:
        return RunFailed(f"{self._bucket.url}/{self._name} was {how}; {WAY_OUT}")
