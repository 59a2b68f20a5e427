"""This machine as a node of a running swarm's Ray cluster; the swarm's supervisor then starts a member on it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.engines.ray import MEMBER, STORE_BYTES, use_token
from tpuswarm.train.stop import StopSignals

GOODBYE = 30.0
"""Seconds that the member here has to hand in its work."""


def be_node(address: str, token: Path, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Be a node until Ctrl-C or SIGTERM, or until the swarm's cluster ends.

    environment: of the member here, besides this process's own. Raises InputError for a wrong token.
    """
    use_token(token)
    with tempfile.TemporaryFile("w+") as output, StopSignals() as stop:
        node = _start(address, environment, output.fileno())
        try:
            say(f"joining {address}; Ctrl-C leaves")
            while node.poll() is None and stop.asked is None:
                time.sleep(0.2)
            if stop.asked is None:
                output.seek(0)
                _explain(output.read(), address, token)
                say("the swarm has ended")
                return
            say("leaving: the member here hands in what it has done")
            _say_goodbye(node)
        finally:
            _end(node)


def _start(address: str, environment: Mapping[str, str], output: int) -> "subprocess.Popen[bytes]":
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--address", address, "--block", "--num-cpus", "0",
        "--object-store-memory", str(STORE_BYTES), "--resources", json.dumps({MEMBER: 1}),
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def _explain(output: str, address: str, token: Path) -> None:
    """Raise what `ray start` said of a cluster that it could not join, in one sentence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("InvalidAuthToken" in line or "nauthenticated" in line.lower() for line in lines):
        raise InputError(f"the token in {token} is not that of the run at {address}: copy the file `token` of the run")
    if not any("Ray runtime started" in line for line in lines):
        raise RunFailed(f"{address} could not be joined: {lines[-1] if lines else 'ray start said nothing'}")


def _say_goodbye(node: "subprocess.Popen[bytes]") -> None:
    """Give the member here its notice, and wait until the supervisor has let its process end."""
    members = [pid for pid in _descendants(node.pid) if _title(pid).startswith("ray::Actor")]
    for pid in members:
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + GOODBYE
    while time.monotonic() < end and any(_title(pid) for pid in members):
        time.sleep(0.2)


def _end(node: "subprocess.Popen[bytes]") -> None:
    """End the node and all that runs in it."""
    node.terminate()
    try:
        node.wait(GOODBYE)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *_descendants(child))]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
    except OSError:
        return ""
