"""Make this machine a node of a running swarm's Ray cluster; the supervisor then starts processes on it."""

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
from typing import IO, Literal

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.engines.notice import NOTICE_S
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import (
    AGGREGATORS,
    DISMISSED,
    ENVIRONMENT,
    MEMBER,
    MIN_STORE_BYTES,
    NAMED,
    private_folder,
    require_room,
    use_token,
)
from tpuswarm.train.process.stop import StopSignals
from tpuswarm.train.process.waiting import waiting

CONNECT_TIMEOUT_S = 5.0
HEAD_CHECK_INTERVAL_S, HEAD_CHECK_TIMEOUT_S = 2.0, 1.0
"""A node leaves a head that refuses connections: Ray would try to reach it for 60 s, and cannot move to another."""
RESTART_PAUSE_S, MAX_RESTART_PAUSE_S = 1.0, 60.0
"""Pause before a node that ended by itself is started again; doubles until one has lived longer than the maximum."""
START_TIMEOUT_TEXT = "timed out during startup"
"""Printed by `ray start` if its processes took more than 30 s to start, as on a busy machine."""
INVALID_TOKEN = "InvalidAuthToken"
"""Printed by `ray start` with a wrong token, again and again for a minute."""
NODE_CHECK_INTERVAL_S = 1.0
SILENCE_TIMEOUT_S = 120.0
"""An address that is silent for this long, without refusing connections, counts as an ended swarm."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal to receive when the parent dies."""

Role = Literal["member", "aggregators", "both"]
"""What may run on a machine that joins."""
ROLES: dict[Role, tuple[str, ...]] = {
    "member": (MEMBER,),
    "aggregators": (AGGREGATORS,),
    "both": (MEMBER, AGGREGATORS),
}
"""The resources of each role."""

Say = Callable[[str], None]


def be_node(
    address: str, token: Path, name: str | None, environment: Mapping[str, str], say: Say,
    ports: Ports | None = None, role: Role = "member",
) -> bool:  # fmt: skip
    """Be a node until Ctrl-C, SIGTERM or the end of the swarm's cluster; return whether the user asked it to leave.

    name: by which the swarm recognizes this machine, by default its hostname; environment: for the member here; ports:
    for its Ray, None for any; role: what may run here. Raise InputError for a wrong token or a refusal by the swarm,
    RunFailed if the swarm gives this machine up.
    """
    use_token(token)
    resources = dict.fromkeys(ROLES[role], 1) | ({f"{NAMED}{name}": 1} if name else {})
    pause, joined = RESTART_PAUSE_S, False
    with StopSignals() as stop:
        say(f"joining {address}; Ctrl-C leaves")
        while True:
            began, secret = time.monotonic(), token.read_bytes()
            output = _run_node(address, resources, environment, stop, say, ports, joined)
            if stop.requested is not None:
                return True
            slow = START_TIMEOUT_TEXT in output
            has_new_token = INVALID_TOKEN in output and token.read_bytes() != secret  # of a new head at this address
            try:
                if not slow and not has_new_token:
                    _raise_start_error(output, address, token)
                    joined = True
            except RunFailed:
                if not joined and not _refuses(address):
                    raise
            if _swarm_ended(address, stop, say):
                say("the swarm has ended")
                return False
            if time.monotonic() - began > MAX_RESTART_PAUSE_S:
                pause = RESTART_PAUSE_S
            reason = "this machine was too busy to start Ray" if slow else "this machine dropped out"
            say(f"{reason}, but the swarm is alive; {'trying again' if slow else 'rejoining'} in {pause:.0f} s")
            if wait(pause, stop):
                return True
            pause = min(2 * pause, MAX_RESTART_PAUSE_S)


def connection_error(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> OSError | None:
    """Try to connect to `HOST:PORT`; return the error, None on success."""
    name, _, port = address.rpartition(":")
    try:
        socket.create_connection((name, int(port)), timeout=timeout_s).close()
    except OSError as error:
        return error
    return None


def wait(seconds: float, stop: StopSignals) -> bool:
    """Wait; return at once with True when asked to stop."""
    end = time.monotonic() + seconds
    while stop.requested is None and time.monotonic() < end:
        time.sleep(min(0.2, seconds))
    return stop.requested is not None


def _refuses(address: str) -> bool:
    return isinstance(connection_error(address, HEAD_CHECK_TIMEOUT_S), ConnectionRefusedError)


def _swarm_ended(address: str, stop: StopSignals, say: Say) -> bool:
    """Whether the swarm's machine refuses connections, or stays silent, as in a network that is cut.

    Also False when asked to stop, which the caller checks.
    """
    end, told = time.monotonic() + SILENCE_TIMEOUT_S, False
    while error := connection_error(address):
        if isinstance(error, ConnectionRefusedError) or time.monotonic() > end:
            return True
        if not told:
            reason = error.strerror or error
            say(f"{address} does not answer ({reason}); waiting up to {SILENCE_TIMEOUT_S:.0f} s for it")
        told = True
        if wait(RESTART_PAUSE_S, stop):
            return False
    return False


def _run_node(
    address: str,
    resources: Mapping[str, int],
    environment: Mapping[str, str],
    stop: StopSignals,
    say: Say,
    ports: Ports | None,
    joined: bool,
) -> str:
    """Run a node until it ends, its head refuses connections, or this machine leaves; return `ray`'s output.

    Raise if the swarm dismisses it.
    """
    parent = private_folder()
    for old in parent.iterdir():
        if old.name.isdigit() and not Path(f"/proc/{old.name}").exists():
            shutil.rmtree(old, ignore_errors=True)  # its node was killed
    require_room(MIN_STORE_BYTES)
    with tempfile.TemporaryFile("w+") as output:
        node = _start(address, parent, resources, environment, output.fileno(), ports)
        folder, checked_at, was_refused = parent / str(node.pid), time.monotonic(), False

        def should_stay() -> bool:
            nonlocal checked_at, was_refused
            if not _should_stay(node, folder, stop):
                return False
            if time.monotonic() < checked_at + HEAD_CHECK_INTERVAL_S:
                return True
            checked_at, before, was_refused = time.monotonic(), was_refused, _refuses(address)
            return not (before and was_refused)  # a forwarded port may refuse once

        try:
            process = "a member" if MEMBER in resources else "an aggregator"
            with waiting(f"waiting for {address} to start {process} here"):
                while not _processes(node.pid) and should_stay():
                    # A machine that had joined may get the token of a new head while Ray tries.
                    if not joined and INVALID_TOKEN in (printed := _printed(output)):
                        return printed
                    time.sleep(0.2)
            announced: set[int] = set()
            while should_stay():
                for pid, is_member in _processes(node.pid).items():
                    if pid not in announced:
                        say(f"{'a member' if is_member else 'an aggregator'} runs here, pid {pid}")
                    announced.add(pid)
                wait(NODE_CHECK_INTERVAL_S, stop)
            if stop.requested is not None:
                say("leaving" + ": the member here pushes its work first" * (MEMBER in resources))
                _give_notice(node)
        finally:
            _kill(node)
            shutil.rmtree(folder, ignore_errors=True)
        output.seek(0)
        return output.read()


def _printed(output: IO[str]) -> str:
    return os.pread(output.fileno(), 2**16, 0).decode(errors="replace")


def _should_stay(node: "subprocess.Popen[bytes]", folder: Path, stop: StopSignals) -> bool:
    if (dismissal := folder / DISMISSED).exists():
        outcome = json.loads(dismissal.read_text())
        raise (InputError if outcome["how"] == "wrong" else RunFailed)(outcome["reason"])
    return node.poll() is None and stop.requested is None


def _processes(pid: int) -> dict[int, bool]:
    """Return the pids of the swarm's processes on this node, and whether each is a member."""
    titles = {child: _title(child) for child in _descendants(pid)}
    kinds = {child: title.startswith("ray::Actor") for child, title in titles.items()}
    return {child: kinds[child] for child, title in titles.items() if kinds[child] or title.startswith("ray::Server")}


def _start(
    address: str,
    parent: Path,
    resources: Mapping[str, int],
    environment: Mapping[str, str],
    output: int,
    ports: Ports | None = None,
) -> "subprocess.Popen[bytes]":
    """Run `ray start` with its own folder for sockets and logs, named by the shell's pid, which it keeps.

    Ray's default folder has the name of a pid on the swarm's machine, which says nothing about this one.
    """
    command = [
        "sh", "-c", 'exec "$@" --temp-dir "$0/$$"', str(parent),
        str(Path(sys.executable).with_name("ray")), "start", "--address", address, "--block", "--num-cpus", "0",
        "--include-log-monitor", "False",
        "--object-store-memory", str(MIN_STORE_BYTES), "--resources", json.dumps(resources),
        *(ports.node_flags() if ports else ()),
    ]  # fmt: skip
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def before_exec() -> None:
        if prctl:  # a killed parent cannot end its children; the system does
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # A preempted machine sends SIGTERM to every process, but the member here must push its work first.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})

    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, **ENVIRONMENT, **environment}, preexec_fn=before_exec,
    )  # fmt: skip


def _raise_start_error(output: str, address: str, token: Path) -> None:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any(INVALID_TOKEN in line or "nauthenticated" in line.lower() for line in lines):
        raise InputError(f"the token in {token} does not match the run at {address}; copy the run's file `token`")
    if not any("Ray runtime started" in line for line in lines):
        raise RunFailed(f"could not join {address}: {lines[-1] if lines else 'ray start printed nothing'}")


def _give_notice(node: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to the processes here and wait until the supervisor has ended them."""
    processes = _processes(node.pid)
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + NOTICE_S
    while time.monotonic() < end and any(_title(pid) for pid in processes):
        time.sleep(0.2)


def _kill(node: "subprocess.Popen[bytes]") -> None:
    """Kill the node and everything in it; these processes block other signals."""
    rest = _descendants(node.pid)
    node.kill()
    node.wait()
    for pid in rest:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [pid for child in children for pid in (child, *_descendants(child))]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
    except OSError:
        return ""
