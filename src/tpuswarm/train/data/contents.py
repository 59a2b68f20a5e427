"""Tell whether a file has changed; compute its digest, and cache it until then."""

import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.waiting import waiting

CLOCK_TICK_S = 0.02
"""Resolution of a file system's clock: a second change within a tick does not change the times."""


def stat_identity(found: os.stat_result) -> list[int]:
    """Return numbers that change with every change of a file.

    `cp -p` and `rsync -t` keep size and modification time. They cannot set the time of change (ctime).
    """
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def file_identity(path: Path) -> list[int]:
    """Return the `stat_identity` of a file for the content that is read afterwards."""
    found = path.stat()
    age_s = time.time() - found.st_ctime
    if 0 <= age_s < CLOCK_TICK_S:
        time.sleep(CLOCK_TICK_S - age_s)
    return stat_identity(found)


def contents_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal; raise OSError if it cannot be read.

    The user's cache stores it with the file's identity.
    """
    path = path.absolute()
    identity = file_identity(path)
    cached = cache_folder("digests") / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged: read the file again
        entry = json.loads(cached.read_text())
        if entry["state"] == identity:
            return str(entry["digest"])
    with waiting(f"checking {path.name}"), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stat_identity(path.stat()) == identity:
        with suppress(OSError):  # a full or read-only cache only costs time
            cached.parent.mkdir(parents=True, exist_ok=True)
            new = {"path": str(path), "state": identity, "digest": digest}
            write_atomically(cached, json.dumps(new), is_shared=True)
    return digest


def report_open(path: Path) -> None:
    """Raise Python's audit event for a file that a library opens without Python; a plan tracks what it depends on."""
    sys.audit("open", str(path), "r", os.O_RDONLY)
