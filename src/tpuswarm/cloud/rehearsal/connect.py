"""The way to a local cloud: its server is found, or started as a process of its own."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.rehearsal.machines.processes import MACHINE
from tpuswarm.cloud.rehearsal.place import Place, default_place
from tpuswarm.errors import RunFailed

SERVER = "tpuswarm.cloud.rehearsal.server"
START_S = 120.0
"""A server that is not ready by then never will be."""


def connect(folder: Path | None = None) -> Endpoints:
    """The cloud in `folder` (default: $TPUSWARM_REHEARSAL, else a folder of this user's), started if it is not running.

    Raises RunFailed if it does not start, with what it said.
    """
    place = Place(folder.absolute()) if folder else default_place()
    place.make()
    if not is_running(place):
        _start(place)
    return _endpoints(place)


def running(place: Place) -> Endpoints | None:
    """The cloud in a folder; None if its server does not run."""
    return _endpoints(place) if is_running(place) else None


def is_running(place: Place) -> bool:
    """Whether a server holds the folder, and is ready."""
    if not place.lock.exists():
        return False
    with place.lock.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # While a server starts, the address is still that of the one before it, which has ended.
            return _serves(place.read_address())
    return False


def _serves(address: dict[str, Any] | None) -> bool:
    try:
        return SERVER.encode() in Path(f"/proc/{(address or {})['pid']}/cmdline").read_bytes()
    except (OSError, KeyError):
        return False


def stop(place: Place) -> bool:
    """End the server of a folder, and wait until it has ended; whether there was one. The state stays."""
    address = place.read_address()
    if address is None or not is_running(place):
        return False
    with suppress(ProcessLookupError):
        os.kill(address["pid"], signal.SIGTERM)
    with place.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    return True


def _endpoints(place: Place) -> Endpoints:
    address = place.read_address() or {}
    return Endpoints(f"127.0.0.1:{address['rpc']}", f"http://127.0.0.1:{address['http']}", place.token())


def _start(place: Place) -> None:
    # A server that is started from a machine of the cloud is not a process of that machine.
    environment = {name: value for name, value in os.environ.items() if name != MACHINE}
    with place.log.open("a") as log:
        begun = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", SERVER, str(place.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
            cwd=place.folder,
        )
    deadline = time.monotonic() + START_S
    while not is_running(place):
        code = process.poll()
        if code:  # 0: another process has begun to serve
            with place.log.open() as said:
                said.seek(begun)
                lines = said.read().strip().splitlines() or ["it said nothing"]
            raise RunFailed(lines[-1].removeprefix("error: "))
        if time.monotonic() > deadline:
            raise RunFailed(f"the local cloud was not ready after {START_S:.0f} s; {place.log} may say why")
        time.sleep(0.02)
