"""The notice before a machine is taken away: SIGTERM, and what Google's metadata server says of it."""

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
GOODBYE = 30.0
"""Seconds that a member has to hand in its work: what Google gives, and any other wish to stop as well."""
LOOK = 1.0
"""Seconds between two looks."""


def on_notice(leave: Callable[[], None]) -> None:
    """Have `leave` called, from a thread, at SIGTERM and when the metadata server announces a preemption.

    To be called in the main thread. GCE_METADATA_HOST names another metadata server, as for Google's own libraries;
    without it, one is looked for only on a machine that Google made.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    # The handler in C writes to the pipe whichever code the main thread is in: a host's may never come back to Python.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # Ray's processes begin without it (engines/node.py)

    def wait_for_signal() -> None:
        while os.read(read, 1) != bytes([signal.SIGTERM]):
            pass
        leave()

    threading.Thread(target=wait_for_signal, name="notice", daemon=True).start()
    host = os.environ.get("GCE_METADATA_HOST") or (METADATA if _made_by_google() else None)
    if host:
        threading.Thread(target=_watch, args=(host, leave), name="preemption", daemon=True).start()


class Here(NamedTuple):
    """What a machine of Google's knows of itself."""

    name: str
    """Of the TPU, or of the VM."""
    number: int
    """Which of its hosts this is."""
    hosts: tuple[str, ...]
    """Internal addresses of all of them; one or none for a machine of one host."""


def machine_here() -> Here:
    """This machine, by its metadata server; InputError where there is none."""
    host = os.environ.get("GCE_METADATA_HOST") or METADATA
    name = _ask(host, "attributes/instance-id") or _ask(host, "name")
    if name is None:
        raise InputError(
            f"no metadata server answers at {host}: this is no machine of Google's, so leave --of-machine out"
        )
    workers = _ask(host, "attributes/worker-network-endpoints") or ""
    addresses = tuple(each.rpartition(":")[2] for each in workers.split(",") if each)
    return Here(name, int(_ask(host, "attributes/agent-worker-number") or 0), addresses)


def _ask(host: str, what: str) -> str | None:
    request = urllib.request.Request(f"http://{host}{INSTANCE}{what}", headers={"Metadata-Flavor": "Google"})
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
            pass  # it restarts, or there is none: the next look tells
        time.sleep(LOOK)
