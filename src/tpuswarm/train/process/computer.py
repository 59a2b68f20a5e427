"""Which computer this is, and whether a process of it still lives: a host name may be that of several."""

import fcntl
import os
import time
from pathlib import Path


def computer_id() -> str:
    """What no other computer has, nor this one after its next start, nor another container on it; empty: not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no Linux
        return ""


def read_lock_holder(path: Path) -> str | None:
    """What the process that holds a lock has written into it; None where none does."""
    if path.exists():
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip()
    return None


def is_process_alive(computer: str, pid: int) -> bool | None:
    """Whether a process of a computer, as `this_computer` called it, lives; None: that cannot be told from here."""
    if not computer or computer != computer_id():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def boot_time() -> float:
    """Return seconds that go on evenly, also while the computer sleeps, where the system can tell."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
