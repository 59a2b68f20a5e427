"""Real processes that are hosts of one program, four virtual devices each."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import randrange

from tests.processes import wait_for

SECRET = b"secret"


def free_port() -> int:
    """A port of loopback for what will listen there later.

    It is above those of Ray's workers and below those that Linux gives out, so that nothing takes it meanwhile.
    """
    while True:
        port = randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start_hosts(module: str, folder: Path, **about) -> list[subprocess.Popen[str]]:
    """Two processes of `python -m module`, host 0 first; they read `about`, and print to files in `folder`."""
    about = {"address": f"127.0.0.1:{free_port()}", "folder": str(folder), **about}
    flags = re.sub(r"device_count=\d+", "device_count=4", os.environ["XLA_FLAGS"])
    started = []
    for index in range(2):
        words = [sys.executable, "-m", module, str(index), json.dumps(about)]
        with out(folder, index).open("w") as stdout, err(folder, index).open("w") as stderr:
            started.append(
                subprocess.Popen(
                    words, stdout=stdout, stderr=stderr, text=True,
                    cwd=Path(__file__).parents[1], env={**os.environ, "XLA_FLAGS": flags},
                )
            )  # fmt: skip
    return started


def out(folder: Path, index: int) -> Path:
    """What a host prints."""
    return folder / f"host-{index}.out"


def err(folder: Path, index: int) -> Path:
    """What a host complains of."""
    return folder / f"host-{index}.err"


def finished(hosts: list[subprocess.Popen[str]], folder: Path, code: int = 0) -> list[str]:
    """What both printed, once both have ended with `code`."""
    try:
        for index, host in enumerate(hosts):
            assert host.wait(120) == code, err(folder, index).read_text()[-3000:]
    finally:
        for host in hosts:
            host.kill()
    return [out(folder, index).read_text() for index in range(2)]


def sentence_after(
    hosts: list[subprocess.Popen[str]], folder: Path, ready: Callable[[], bool], victim: int, how
) -> str:
    """What one host says, alone and at its end within 30 seconds, when the other gets a signal once it is `ready`."""
    other = 1 - victim
    try:
        wait_for(ready, hosts[other])
        hosts[victim].send_signal(how)
        assert hosts[other].wait(30) == 1, err(folder, other).read_text()[-3000:]
    finally:
        for host in hosts:
            host.kill()
    return err(folder, other).read_text()
