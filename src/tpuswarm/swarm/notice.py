"""The notice before a machine is taken away: SIGTERM, and what Google's metadata server says of it."""

import http.client
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

METADATA = "metadata.google.internal"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
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

    def wait_for_signal() -> None:
        while os.read(read, 1) != bytes([signal.SIGTERM]):
            pass
        leave()

    threading.Thread(target=wait_for_signal, name="notice", daemon=True).start()
    host = os.environ.get("GCE_METADATA_HOST") or (METADATA if _made_by_google() else None)
    if host:
        threading.Thread(target=_watch, args=(host, leave), name="preemption", daemon=True).start()


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
