"""What a keeper in the background says: a file that does not grow for ever."""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

MAX_LOG_BYTES = 10_000_000
"""Bytes: some hundred thousand lines."""


def rotate_log(log: Path, most: int = MAX_LOG_BYTES) -> None:
    """Where this process writes to `log`, and there is more in it than that: all of it goes to `log.1`.

    The file stays the same one, which whoever started the process has opened for it.
    """
    try:
        there, ours = log.stat(), os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):  # there is no log, or no output
        return
    if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino) or there.st_size <= most:
        return
    with suppress(OSError):  # on a full disk the older log stays as it is, and this one goes on
        sys.stdout.flush()
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
