"""Messages too long for one request: they travel in parts, and go on after a cut where they stopped.

Both directions name a message by its SHA-256. Parts lie in files: many members may send and fetch at once.
"""

import hashlib
import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

PART_BYTES = 2**20
"""A longer message is sent in parts of this size; a cut loses at most one."""
MAX_IDLE_S = 900.0
"""An unfinished upload is dropped after this time without a part."""
ANSWERS_PER_LARGEST = 32
"""Answers that are kept, in units of the largest: all members fetch the same fragments, one after the other."""
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass
class _Upload:
    path: Path
    size: int
    touched: float


class Uploads:
    """Messages that people are sending; any thread may use it."""

    def __init__(self, folder: Path, largest: int, uploads_per_person: int = 64):
        """largest: bytes of the largest message."""
        self._folder, self._largest, self._limit = folder, largest, uploads_per_person
        self._uploads: dict[tuple[str, str], _Upload] = {}
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, person: str, digest: str, start: int, part: bytes) -> int | None:
        """Append a part that begins where the upload stopped; return how much is there, None if that is too much."""
        with self._lock:
            self._drop_idle()
            upload = self._uploads.get((person, digest))
            if upload is None:
                if sum(owner == person for owner, _ in self._uploads) >= self._limit:
                    return None
                upload = _Upload(self._folder / f"{person}-{digest}", 0, 0.0)
                upload.path.write_bytes(b"")
                self._uploads[person, digest] = upload
            if start == upload.size and part:
                if upload.size + len(part) > self._largest:
                    return None
                with upload.path.open("ab") as file:
                    file.write(part)
                upload.size += len(part)
            upload.touched = time.monotonic()
            return upload.size

    def take(self, person: str, digest: str) -> bytes | None:
        """Return a whole message, None if it is not there; a damaged one is dropped."""
        with self._lock:
            upload = self._uploads.get((person, digest))
            content = upload.path.read_bytes() if upload else b""
            if upload is None or hashlib.sha256(content).hexdigest() == digest:
                return content if upload else None
            self._drop(person, digest)
            return None

    def drop(self, person: str, digest: str) -> None:
        """Forget a message that was executed."""
        with self._lock:
            self._drop(person, digest)

    def _drop(self, person: str, digest: str) -> None:
        if upload := self._uploads.pop((person, digest), None):
            upload.path.unlink(missing_ok=True)

    def _drop_idle(self) -> None:
        now = time.monotonic()
        for key, upload in list(self._uploads.items()):
            if now - upload.touched > MAX_IDLE_S:
                self._drop(*key)


class Answers:
    """Long answers, kept while members fetch them; the one unused for longest goes first. Any thread may use it."""

    def __init__(self, folder: Path, room: int):
        """room: bytes to keep, besides the newest answer."""
        self._folder, self._room = folder, room
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._requests: dict[object, str] = {}
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def keep(self, content: bytes, request: object = None) -> str:
        """Keep an answer and return its digest. request: whose answer it always is, if it never changes."""
        digest = hashlib.sha256(content).hexdigest()
        with self._lock:
            if digest not in self._sizes:
                (self._folder / digest).write_bytes(content)
            self._sizes[digest] = len(content)
            self._sizes.move_to_end(digest)
            if request is not None:
                self._requests[request] = digest
            while len(self._sizes) > 1 and sum(self._sizes.values()) - len(content) > self._room:
                oldest, _ = self._sizes.popitem(last=False)
                (self._folder / oldest).unlink(missing_ok=True)
            self._requests = {known: kept for known, kept in self._requests.items() if kept in self._sizes}
        return digest

    def known(self, request: object) -> tuple[str, int] | None:
        """Return the digest and size of a request's answer if it is kept."""
        with self._lock:
            digest = self._requests.get(request)
            return (digest, self._sizes[digest]) if digest else None

    def path(self, digest: str) -> Path | None:
        """Return the file of an answer, None if it is gone."""
        with self._lock:
            if digest not in self._sizes:
                return None
            self._sizes.move_to_end(digest)
            return self._folder / digest
