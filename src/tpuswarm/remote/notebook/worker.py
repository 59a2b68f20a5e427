"""On each worker of a slice: starts an engine, which is IPython's own kernel, for whoever runs cells on all workers.

This file is sent to the host and needs nothing but Python 3.10 and ipykernel there. A kernel of the slice (`kernel.py`,
on worker 0) connects and has an engine for as long as the connection lasts: however the kernel ends, its engines end.
Both ends prove that they know the slice's secret, which also signs what is said to the engine.

    worker.py ADDRESS FILE        listens at that address, on a port that it writes to FILE
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parent
ENDS_S = 10.0
"""Seconds that an engine which was asked to end has, and a kernel that comes for the next one waits."""
LOOK_S = 0.02
PROVES_S = 10.0
"""Seconds that whoever connects has to prove that it knows the secret."""
PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
BUSY = threading.Lock()
"""One engine at a time: chips serve one process."""


def main(address: str, file: Path) -> None:
    """Serve kernels for ever."""
    secret = (OURS / "secret").read_bytes()
    listener = connection.Listener((address, 0))
    new = file.with_suffix(".new")
    new.write_text(str(listener.address[1]))
    new.replace(file)
    while True:
        try:
            line = listener.accept()
        except OSError:  # whoever it was has gone again
            time.sleep(LOOK_S)
            continue
        threading.Thread(target=serve, args=(line, secret, address), daemon=True).start()


def serve(line: Any, secret: bytes, address: str) -> None:
    """One kernel, until its connection ends."""
    late = threading.Timer(PROVES_S, shut, [line])
    late.daemon = True
    late.start()
    try:
        connection.deliver_challenge(line, secret)
        connection.answer_challenge(line, secret)
        late.cancel()
        keep_alive(line.fileno())
        asked = json.loads(line.recv_bytes())
        if not BUSY.acquire(timeout=ENDS_S):
            line.send_bytes(json.dumps({"refused": "another notebook's kernel has this slice"}).encode())
            return
        try:
            run(line, asked["folder"], secret.decode(), address)
        finally:
            BUSY.release()
    except (OSError, EOFError, ValueError, AuthenticationError):
        return  # whoever it was has gone, or is nobody of ours
    finally:
        late.cancel()
        line.close()


def shut(line: Any) -> None:
    """Wake the thread that reads from it, to its end."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line.fileno())) as held:
        held.shutdown(socket.SHUT_RDWR)


def keep_alive(number: int) -> None:
    """Notice within half a minute that the other host is gone."""
    with socket.socket(fileno=os.dup(number)) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def run(line: Any, folder: str, key: str, address: str) -> None:
    """An engine, in a folder below the home where there is one, for as long as the line holds."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "engine.json"
        about = {"ip": address, "key": key, "transport": "tcp", "signature_scheme": "hmac-sha256"}
        file.touch(0o600)
        file.write_text(json.dumps({**about, **dict.fromkeys(PORTS, 0)}))
        there = Path.home() / folder
        process = subprocess.Popen(
            ["/bin/bash", OURS / "begin", "python3", "-m", "ipykernel_launcher", "-f", file],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=there if there.is_dir() else Path.home(),
            env={**os.environ, "JPY_PARENT_PID": str(os.getpid())},  # it ends where we are killed
        )
        watching = threading.Thread(target=watch, args=(process, line, file), daemon=True)
        watching.start()
        try:
            while line.recv_bytes() == b"interrupt":
                send(process, signal.SIGINT)
        except (OSError, EOFError):
            pass
        send(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S / 2)
        send(process, signal.SIGKILL)  # also what it has left
        process.wait()
        watching.join()


def send(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    """A signal to an engine and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def watch(process: "subprocess.Popen[bytes]", line: Any, file: Path) -> None:
    """Say where the engine listens, and later how it ended."""
    try:
        while process.poll() is None:
            found = load(file)
            if all(found.get(each) for each in PORTS):
                line.send_bytes(json.dumps({"engine": found}).encode())
                break
            time.sleep(LOOK_S)
        code = process.wait()
        how = f"exit {code}" if code >= 0 else f"killed by signal {-code}, {signal.Signals(-code).name}"
        line.send_bytes(json.dumps({"ended": how}).encode())
    except OSError:
        pass  # nobody listens any more


def load(file: Path) -> "dict[str, Any]":
    """What an engine has written so far; it may be at it."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
