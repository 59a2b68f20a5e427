"""Start an engine on this worker for a slice kernel that connects; end it with the connection.

Runs on every worker but the first. Both ends prove that they know the slice's secret.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import Any

FOLDER = Path.home().joinpath(".tpuswarm/notebook")
AUTHENTICATION_TIMEOUT_S = 10.0
END_TIMEOUT_S = 10.0
POLL_INTERVAL_MS = 100
PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
CHIPS = threading.Lock()
"""Held by the one engine that may run."""


def main() -> None:
    """Serve kernels at the address that is the first argument; write the port to the file that is the second."""
    secret = (FOLDER / "secret").read_bytes()
    listener = connection.Listener((sys.argv[1], 0))
    file = Path(sys.argv[2])
    new = file.with_suffix(".new")
    new.write_text(str(listener.address[1]))
    new.replace(file)
    while True:
        try:
            line = listener.accept()
        except OSError:  # the client left at once
            time.sleep(POLL_INTERVAL_MS / 1000)
        else:
            threading.Thread(target=serve, args=(line, secret), daemon=True).start()


def serve(line: Any, secret: bytes) -> None:
    """Serve one kernel until its connection ends."""
    timer = threading.Timer(AUTHENTICATION_TIMEOUT_S, shut_down, [line])
    timer.daemon = True
    timer.start()
    with suppress(OSError, EOFError, ValueError, AuthenticationError), line:
        connection.deliver_challenge(line, secret)
        connection.answer_challenge(line, secret)
        timer.cancel()
        tune(line)
        folder = json.loads(line.recv_bytes())["folder"]
        last = {"refused": "another notebook's kernel has this slice"}
        if CHIPS.acquire(timeout=END_TIMEOUT_S):
            try:
                last = {"ended": run_engine(line, Path.home() / folder)}
            finally:
                CHIPS.release()
        line.send_bytes(json.dumps(last).encode())
    timer.cancel()


def run_engine(line: Any, folder: Path) -> str:
    """Run an engine until it ends, or its connection; return how it ended."""
    with tempfile.TemporaryDirectory() as private:  # its sockets are files that only this user may open
        file = Path(private) / "engine.json"
        file.write_text(json.dumps({"transport": "ipc", "ip": f"{private}/socket", **dict.fromkeys(PORTS, 0)}))
        process = subprocess.Popen(
            [
                "/bin/bash",
                FOLDER / "begin",
                "python3",
                FOLDER / "code/run.py",
                "engine",
                str(line.fileno()),
                "-f",
                file,
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder if folder.is_dir() else Path.home(),
            env={**os.environ, "JPY_PARENT_PID": str(os.getpid())},
            pass_fds=[line.fileno()],
        )
        poll = select.poll()
        poll.register(line, select.POLLRDHUP)
        while process.poll() is None and not poll.poll(POLL_INTERVAL_MS):
            pass
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(END_TIMEOUT_S / 2)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also its children
        code = process.wait()
    return f"exit {code}" if code >= 0 else f"killed by signal {-code}, {signal.Signals(-code).name}"


def shut_down(line: Any) -> None:
    """End a connection; wakes the thread that reads from it."""
    with suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as connected:
        connected.shutdown(socket.SHUT_RDWR)


def tune(line: Any) -> None:
    """Send small messages at once; notice within 30 s that the other host is gone."""
    with socket.socket(fileno=os.dup(line.fileno())) as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("NODELAY", 1), ("KEEPIDLE", 10), ("KEEPINTVL", 5), ("KEEPCNT", 4)):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
