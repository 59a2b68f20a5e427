"""The notice before a machine is preempted: SIGTERM, or the announcement of Google's metadata server."""

import http.client
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tpuswarm.errors import InputError

METADATA = "metadata.google.internal"
INSTANCE = "/computeMetadata/v1/instance/"
PREEMPTED = f"{INSTANCE}preempted"
"""Its value turns from FALSE to TRUE some 30 s before a preemption.

https://cloud.google.com/compute/docs/instances/create-use-preemptible
"""
NOTICE_S = 30.0
"""Time that a member has to push its work: Google's notice, also used for any other request to stop."""
POLL_INTERVAL_S = 1.0


def on_notice(leave: Callable[[], None]) -> None:
    """Call `leave` from a thread at SIGTERM, or when the metadata server announces a preemption.

    Must run in the main thread. GCE_METADATA_HOST names another metadata server, as for Google's own libraries;
    otherwise only machines made by Google are asked.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    # The handler in C writes to the pipe whatever the main thread does: its code may never return to Python.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # Ray's processes start with it blocked (node.py)

    def wait_for_signal() -> None:
        while os.read(read, 1) != bytes([signal.SIGTERM]):
            pass
        leave()

    threading.Thread(target=wait_for_signal, name="notice", daemon=True).start()
    host = os.environ.get("GCE_METADATA_HOST") or (METADATA if _made_by_google() else None)
    if host:
        threading.Thread(target=_watch, args=(host, leave), name="preemption", daemon=True).start()


class LocalMachine(NamedTuple):
    """This machine, as Google's metadata server describes it."""

    name: str
    """Name of the TPU or of the VM."""
    number: int
    """Number of this host."""
    hosts: tuple[str, ...]
    """Internal addresses of all hosts; at most one for a machine of one host."""


def read_local_machine() -> LocalMachine:
    """Describe this machine by its metadata server. Raise InputError if there is none."""
    host = os.environ.get("GCE_METADATA_HOST") or METADATA
    name = _read(host, "attributes/instance-id") or _read(host, "name")
    if name is None:
        raise InputError(f"no metadata server answers at {host}: this machine is not Google's, so omit --of-machine")
    workers = _read(host, "attributes/worker-network-endpoints") or ""
    addresses = tuple(worker.rpartition(":")[2] for worker in workers.split(",") if worker)
    return LocalMachine(name, int(_read(host, "attributes/agent-worker-number") or 0), addresses)


def _read(host: str, name: str) -> str | None:
    request = urllib.request.Request(f"http://{host}{INSTANCE}{name}", headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.read().decode().strip()) or None
    except (OSError, http.client.HTTPException):
        return None


def _made_by_google() -> bool:
    try:
        return "Google" in Path("/sys/class/dmi/id/product_name").read_text()
    except OSError:
        return False


def _watch(host: str, leave: Callable[[], None]) -> None:
    request = urllib.request.Request(f"http://{host}{PREEMPTED}", headers={"Metadata-Flavor": "Google"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                if answer.read().strip() == b"TRUE":
                    leave()
                    return
        except (OSError, http.client.HTTPException):
            pass  # it restarts, or does not exist
        time.sleep(POLL_INTERVAL_S)
