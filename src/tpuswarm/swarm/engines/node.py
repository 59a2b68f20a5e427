"""This machine as a node of a running swarm's Ray cluster; the swarm's supervisor then starts a member on it."""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.engines.notice import GOODBYE
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import (
    DISMISSED,
    ENVIRONMENT,
    MEMBER,
    NAMED,
    STORE_BYTES,
    private_folder,
    use_token,
)
from tpuswarm.train.process.stop import StopSignals
from tpuswarm.train.process.waiting import waiting

ANSWER = 5.0
"""Seconds for an address to answer."""
PAUSE, PAUSE_MAX = 1.0, 60.0
"""Seconds until a node that ended unasked is started again: doubled until one has lived for longer."""
SLOW = "timed out during startup"
"""What `ray start` says where its processes took more than 30 s to start, as on a busy machine."""
CUT = 120.0
"""Seconds without an answer, where nothing says that the address is closed, after which the swarm counts as ended."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets at its parent's end."""

Say = Callable[[str], None]


def be_node(
    address: str, token: Path, name: str | None, environment: Mapping[str, str], say: Say,
    ports: Ports | None = None,
) -> bool:  # fmt: skip
    """Be a node until Ctrl-C or SIGTERM, or until the swarm's cluster ends; whether it was asked to leave.

    name: of this machine, by which the swarm knows it again; None: what it calls itself.
    environment: of the member here, besides this process's own; ports: on which its Ray listens; None: any.
    Raises InputError for a wrong token and what the swarm refuses, RunFailed where it gives this machine up.
    """
    use_token(token)
    pause, joined = PAUSE, False
    with StopSignals() as stop:
        say(f"joining {address}; Ctrl-C leaves")
        while True:
            began = time.monotonic()
            said = _live(address, name, environment, stop, say, ports)
            if stop.asked is not None:
                return True
            slow = SLOW in said
            try:
                if not slow:
                    _explain(said, address, token)
                    joined = True
            except RunFailed:
                if not joined:
                    raise
            if _ended(address, stop, say):
                say("the swarm has ended")
                return False
            if time.monotonic() - began > PAUSE_MAX:
                pause = PAUSE
            what = "this machine was too busy to start Ray" if slow else "this machine dropped out"
            say(f"{what}, but the swarm is alive; {'trying again' if slow else 'rejoining'} in {pause:.0f} s")
            if wait(pause, stop):
                return True
            pause = min(2 * pause, PAUSE_MAX)


def silent(address: str) -> OSError | None:
    """Why nothing answers at `HOST:PORT`; None if something does."""
    name, _, port = address.rpartition(":")
    try:
        socket.create_connection((name, int(port)), timeout=ANSWER).close()
    except OSError as error:
        return error
    return None


def wait(seconds: float, stop: StopSignals) -> bool:
    """Wait; at once True when asked to stop."""
    end = time.monotonic() + seconds
    while stop.asked is None and time.monotonic() < end:
        time.sleep(min(0.2, seconds))
    return stop.asked is not None


def _ended(address: str, stop: StopSignals, say: Say) -> bool:
    """Whether the swarm has: its machine says that nobody listens, or is silent for long, as in a network that is cut.

    False when asked to stop as well, which the caller sees.
    """
    end, told = time.monotonic() + CUT, False
    while error := silent(address):
        if isinstance(error, ConnectionRefusedError) or time.monotonic() > end:
            return True
        if not told:
            say(f"{address} does not answer ({error.strerror or error}); waiting up to {CUT:.0f} s for it")
        told = True
        if wait(PAUSE, stop):
            return False
    return False


def _live(
    address: str, name: str | None, environment: Mapping[str, str], stop: StopSignals, say: Say, ports: Ports | None
) -> str:
    """One node, until it ends or this machine leaves; what `ray` said. Raises what the swarm dismisses it with."""
    parent = private_folder()
    for old in parent.iterdir():
        if old.name.isdigit() and not Path(f"/proc/{old.name}").exists():
            shutil.rmtree(old, ignore_errors=True)  # of a node that was killed
    with tempfile.TemporaryFile("w+") as output:
        node = _start(address, parent, name, environment, output.fileno(), ports)
        folder = parent / str(node.pid)
        try:
            with waiting(f"waiting for {address} to start a member here"):
                while not _members(node.pid) and _stays(node, folder, stop):
                    time.sleep(0.2)
            for pid in _members(node.pid):
                say(f"a member runs here, pid {pid}")
            while _stays(node, folder, stop):
                time.sleep(0.2)
            if stop.asked is not None:
                say("leaving: the member here pushes its work first")
                _say_goodbye(node)
        finally:
            _end(node)
            shutil.rmtree(folder, ignore_errors=True)
        output.seek(0)
        return output.read()


def _stays(node: "subprocess.Popen[bytes]", folder: Path, stop: StopSignals) -> bool:
    """Whether the node lives and nobody wants it to leave. Raises what the swarm dismisses it with."""
    if (letter := folder / DISMISSED).exists():
        outcome = json.loads(letter.read_text())
        raise (InputError if outcome["how"] == "wrong" else RunFailed)(outcome["reason"])
    return node.poll() is None and stop.asked is None


def _members(pid: int) -> list[int]:
    """Processes of members under a node's."""
    return [each for each in _descendants(pid) if _title(each).startswith("ray::Actor")]


def _start(
    address: str,
    parent: Path,
    name: str | None,
    environment: Mapping[str, str],
    output: int,
    ports: Ports | None = None,
) -> "subprocess.Popen[bytes]":
    """`ray start`, with a folder of its own for sockets and logs, named by its pid, which stays that of the shell.

    Ray's default is that of the swarm's machine, named by a pid there: it says nothing here of whether it is in use.
    """
    resources = {MEMBER: 1, **({f"{NAMED}{name}": 1} if name else {})}
    command = [
        "sh", "-c", 'exec "$@" --temp-dir "$0/$$"', str(parent),
        str(Path(sys.executable).with_name("ray")), "start", "--address", address, "--block", "--num-cpus", "0",
        "--include-log-monitor", "False",
        "--object-store-memory", str(STORE_BYTES), "--resources", json.dumps(resources),
        *(ports.of_node() if ports else ()),
    ]  # fmt: skip
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def before_it_begins() -> None:
        if prctl:  # who is killed can end nobody: the system does it
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # A machine that is taken away asks all of its processes to end, and the member here has work to hand in first.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})

    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, **ENVIRONMENT, **environment}, preexec_fn=before_it_begins,
    )  # fmt: skip


def _explain(output: str, address: str, token: Path) -> None:
    """Raise what `ray start` said of a cluster that it could not join, in one sentence."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("InvalidAuthToken" in line or "nauthenticated" in line.lower() for line in lines):
        raise InputError(f"the token in {token} does not match the run at {address}; copy the run's file `token`")
    if not any("Ray runtime started" in line for line in lines):
        raise RunFailed(f"could not join {address}: {lines[-1] if lines else 'ray start printed nothing'}")


def _say_goodbye(node: "subprocess.Popen[bytes]") -> None:
    """Give the member here its notice, and wait until the supervisor has let its process end."""
    members = _members(node.pid)
    for pid in members:
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + GOODBYE
    while time.monotonic() < end and any(_title(pid) for pid in members):
        time.sleep(0.2)


def _end(node: "subprocess.Popen[bytes]") -> None:
    """End the node and all that runs in it: they take no other signal."""
    rest = _descendants(node.pid)
    node.kill()
    node.wait()
    for pid in rest:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
