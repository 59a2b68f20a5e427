"""Find and signal the processes of machines, known by the machine's id in their environment."""

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

MACHINE_VARIABLE = "TPUSWARM_REHEARSAL_MACHINE"
"""Has the machine's id; child processes inherit it."""
KILL_TIMEOUT_S = 10.0


def find(machines: Collection[str]) -> list[int]:
    """Return the ids of all processes of these machines."""
    marks = _marks(machines)
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _is_marked(path, marks)]


def send(machines: Collection[str], number: signal.Signals, only: Callable[[int], bool] = lambda pid: True) -> int:
    """Send a signal to processes of machines for which `only` is true; return how many got it."""
    marks = _marks(machines)
    sent = 0
    for pid in find(machines):
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                # Check again with an open handle: the pid may belong to a new process.
                if _is_marked(Path(f"/proc/{pid}"), marks) and only(pid):
                    signal.pidfd_send_signal(handle, number)
                    sent += 1
            finally:
                os.close(handle)
    return sent


def kill(machines: Collection[str]) -> None:
    """Kill all processes of machines, also those that start meanwhile."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while send(machines, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)


def has_open(pid: int, file: os.stat_result) -> bool:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(descriptor.stat(), file):
                    return True
    return False


def _marks(machines: Collection[str]) -> set[bytes]:
    return {f"{MACHINE_VARIABLE}={machine}".encode() for machine in machines}


def _is_marked(process: Path, marks: set[bytes]) -> bool:
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        return not marks.isdisjoint((process / "environ").read_bytes().split(b"\0"))
    except OSError:  # it has ended, or belongs to another user
        return False
