"""Compute the digest of a file, and cache it until the file changes."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.waiting import waiting


def contents_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal; raise OSError if it cannot be read.

    The user's cache stores it with the file's size, inode and times; any change of the file changes one of these.
    """
    path = path.resolve()
    identity = _identity(path)
    cached = cache_folder("digests") / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged: read the file again
        entry = json.loads(cached.read_text())
        if entry["state"] == identity:
            return str(entry["digest"])
    with waiting(f"checking {path.name}"), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _identity(path) == identity:
        with suppress(OSError):  # a full or read-only cache only costs time
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cached, json.dumps({"path": str(path), "state": identity, "digest": digest}))
    return digest


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
