"""Processes of machines, found by the machine's id in their environment: no other process is ever signalled."""

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

MACHINE = "TPUSWARM_REHEARSAL_MACHINE"
"""The variable with the machine's id. What a process starts inherits it."""
GONE_S = 10.0
"""Longer than the kernel needs to end a process that was killed, unless it hangs in the kernel."""


def find(machines: Collection[str]) -> list[int]:
    """Process ids of all that runs on these machines."""
    wanted = _entries(machines)
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and _carries(each, wanted)]


def send(machines: Collection[str], number: signal.Signals, only: Callable[[int], bool] = lambda pid: True) -> int:
    """Send a signal to what runs on machines, to those processes `only` is true of; to how many."""
    wanted = _entries(machines)
    sent = 0
    for pid in find(machines):
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                # Looked at again through the handle: the number may have become another process's meanwhile.
                if _carries(Path(f"/proc/{pid}"), wanted) and only(pid):
                    signal.pidfd_send_signal(handle, number)
                    sent += 1
            finally:
                os.close(handle)
    return sent


def kill(machines: Collection[str]) -> None:
    """End all that runs on machines, what it starts meanwhile as well."""
    deadline = time.monotonic() + GONE_S
    while send(machines, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)


def has_open(pid: int, file: os.stat_result) -> bool:
    """Whether a process has a file open."""
    with suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found = each.stat()
                if (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino):
                    return True
    return False


def _entries(machines: Collection[str]) -> set[bytes]:
    return {f"{MACHINE}={each}".encode() for each in machines}


def _carries(process: Path, wanted: set[bytes]) -> bool:
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        return not wanted.isdisjoint((process / "environ").read_bytes().split(b"\0"))
    except OSError:  # it has ended, or is none of ours
        return False
