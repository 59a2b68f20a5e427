"""What is in a file, by its digest; a large file is read once for each state that it is in."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.waiting import waiting


def contents_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; raises OSError where it cannot be read.

    Remembered in the user's cache with the file's size, inode and times: whoever changes a file changes one of these.
    """
    path = path.resolve()
    state = _state(path)
    note = cache_folder("digests") / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged: read the file again
        known = json.loads(note.read_text())
        if known["state"] == state:
            return str(known["digest"])
    with waiting(f"checking {path.name}"), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _state(path) == state:
        with suppress(OSError):  # a cache that is full or read-only only costs time
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps({"path": str(path), "state": state, "digest": digest}))
    return digest


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
