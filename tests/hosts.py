"""Real processes that are hosts of one program, four virtual devices each."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from random import Random

from tests.processes import Forked, wait_for

SECRET = b"secret"
TIMEOUT_S = 300
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
PORTS = range(20_000 + WORKER, 32_000, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
"""Each parallel worker has its own, above the ports of Ray's workers and below those of Linux."""
_ports = cycle(Random(os.getpid()).sample(PORTS, len(PORTS)))


def free_port() -> int:
    """Return a free port of loopback that this process has not used before."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", port := next(_ports))):
            return port


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        return server.accept()[0], far


def start_hosts(program: str, folder: Path, **about) -> list[subprocess.Popen[str]]:
    """Start two processes of a Python file, host 0 first, which read `about` and write to files in `folder`."""
    about = {"address": f"127.0.0.1:{free_port()}", "folder": str(folder), **about}
    flags = re.sub(r"device_count=\d+", "device_count=4", os.environ["XLA_FLAGS"])
    started = []
    for index in range(2):
        command = [program, str(index), json.dumps(about)]
        with err(folder, index).open("w") as stderr:
            started.append(Forked(command, stderr=stderr, text=True, env={**os.environ, "XLA_FLAGS": flags}))
    return started


def err(folder: Path, index: int) -> Path:
    return folder / f"host-{index}.err"


def finished(hosts: list[subprocess.Popen[str]], folder: Path, code: int = 0) -> None:
    try:
        for index, host in enumerate(hosts):
            assert host.wait(TIMEOUT_S) == code, err(folder, index).read_text()[-3000:]
    finally:
        for host in hosts:
            host.kill()


def signal_host(
    hosts: list[subprocess.Popen[str]], folder: Path, ready: Callable[[], bool], victim: int, number: int
) -> str:
    """Send one host a signal once the other is `ready`; return the other's stderr after its failure."""
    other = 1 - victim
    try:
        try:
            wait_for(ready, hosts[other])
        except AssertionError as error:
            raise AssertionError([err(folder, index).read_text()[-3000:] for index in range(2)]) from error
        hosts[victim].send_signal(number)
        assert hosts[other].wait(TIMEOUT_S) == 1, err(folder, other).read_text()[-3000:]
    finally:
        for host in hosts:
            host.kill()
    return err(folder, other).read_text()
