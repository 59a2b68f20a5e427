"""Identify this computer and its processes; several computers may share a host name."""

import os
import time
from contextlib import suppress
from pathlib import Path


def computer_id() -> str:
    """Return a text that is unique for this boot of this computer or container; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        return ""


def is_process_alive(computer: str, pid: int) -> bool | None:
    """computer: of `computer_id`. Return None for another computer."""
    if not computer or computer != computer_id():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def process_start(pid: int) -> str:
    """Return when a process began, which tells it from a later one with its number; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def boot_time() -> float:
    """Return seconds since boot, on Linux including sleep."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def state_folder() -> Path:
    """Return this user's private folder on this computer: fleets, trusted recipes, logs.

    Raise OSError for a user without a home.
    """
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tpuswarm"
    except RuntimeError as error:
        raise FileNotFoundError("this user has no home folder: let XDG_STATE_HOME name a private one") from error
    with suppress(OSError):  # the next write reports the reason
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    return folder
