"""`tpuswarm join`: this machine as a member of a running swarm, or as one host of a member of several."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tpuswarm.errors import InputError
from tpuswarm.swarm.engines.node import GOODBYE, be_node
from tpuswarm.swarm.runtime.group import ABSENT, LEFT, WRONG, Group
from tpuswarm.train.stop import StopSignals

ANSWER = 5.0
"""Seconds for the address to answer."""

Say = Callable[[str], None]


def join(address: str, group: Group | None, token: Path, say: Say) -> None:
    """Take part until Ctrl-C or SIGTERM, or until the swarm has ended.

    Raises InputError for an address where nothing answers, a wrong token, and hosts that cannot be one member.
    """
    name, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise InputError(f"{address!r} is no address: give HOST:PORT, as `tpuswarm train --members` says it")
    try:
        secret = token.read_text().strip()
    except OSError as error:
        raise InputError(
            f"{token} cannot be read ({error.strerror}): copy the file `token` of the run to it"
        ) from error
    if not secret:
        raise InputError(f"{token} is empty: copy the file `token` of the run to it")
    if group:
        group.check()
    if silent := _silent(name, int(port)):
        raise InputError(f"nothing answers at {address} ({silent}): is the run alive?")
    if group and group.index:
        _follow(group, lambda: _silent(name, int(port)), say)
        return
    if group:
        say(f"this is host 0 of {group.count}: the others come to {group.at}")
    be_node(address, token, group.environment() if group else {}, say)


def _silent(name: str, port: int) -> str | None:
    """Why nothing answers there; None if something does."""
    try:
        socket.create_connection((name, port), timeout=ANSWER).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _follow(group: Group, swarm_silent: Callable[[], str | None], say: Say) -> None:
    """Keep a process that is this host, until host 0 says farewell to it."""
    say(f"this is host {group.index} of {group.count}: it comes to {group.at}; Ctrl-C leaves")
    lost = False
    with StopSignals() as stop:
        while True:
            status, last = _live(group, stop, say)
            if stop.asked is not None:
                return
            if status == LEFT:
                say("host 0 has left the swarm, or the swarm has ended")
                return
            if status == WRONG or (status == ABSENT and not lost):
                raise InputError(last)
            if status == ABSENT:
                if swarm_silent():
                    say("the swarm has ended")
                    return
                continue
            lost = True
            why = "its process was killed" if status < 0 else last.partition(", so this host ends")[0]
            say(f"{why}; this host waits for all of them to come together again")


def _live(group: Group, stop: StopSignals, say: Say) -> tuple[int, str]:
    """One process, to its end: exit status, and the last line on stderr."""
    command = [sys.executable, "-m", "tpuswarm.swarm.runtime.follower"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), stderr=errors,
            env={**os.environ, **group.environment()}, start_new_session=True,
        )  # fmt: skip
        try:
            told = False
            while process.poll() is None:
                if stop.asked is not None and not told:
                    told = True
                    say(f"leaving when host 0 does, in at most {GOODBYE:.0f} s; Ctrl-C again leaves at once")
                if stop.asked is not None and stop.since() > GOODBYE:
                    break
                time.sleep(0.2)
        finally:
            process.kill()
            status = process.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return status, lines[-1] if lines else ""
