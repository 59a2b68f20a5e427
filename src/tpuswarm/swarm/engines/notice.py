"""The notice before a machine is preempted: SIGTERM, or the announcement of Google's metadata server."""

import http.client
import os
import signal
import threading
import time
from collections.abc import Callable

from tpuswarm.train.process.metadata import metadata_host, read_metadata

PREEMPTED = "preempted"
"""Its value turns from FALSE to TRUE some 30 s before a preemption.

https://cloud.google.com/compute/docs/instances/create-use-preemptible
"""
NOTICE_S = 30.0
"""Time that a member has to push its work: Google's notice, also used for any other request to stop."""
POLL_INTERVAL_S = 1.0


def on_notice(leave: Callable[[], None]) -> None:
    """Call `leave` from a thread at SIGTERM, or when the metadata server announces a preemption.

    Must run in the main thread. Only machines made by Google are asked, unless GCE_METADATA_HOST names a server.
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
    if host := metadata_host():
        threading.Thread(target=_watch, args=(host, leave), name="preemption", daemon=True).start()


def _watch(host: str, leave: Callable[[], None]) -> None:
    while True:
        try:
            if read_metadata(host, PREEMPTED) == "TRUE":
                leave()
                return
        except (OSError, http.client.HTTPException):
            pass  # it restarts, or does not exist
        time.sleep(POLL_INTERVAL_S)
