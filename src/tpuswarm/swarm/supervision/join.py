"""`tpuswarm join`: this machine as a member of a running swarm, or as one host of a member of several."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from tpuswarm.config.units import parse_address
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.engines.node import be_node, silent, wait
from tpuswarm.swarm.engines.notice import GOODBYE
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import BATCH, COMPILED
from tpuswarm.swarm.member.group import STEPPED, Group
from tpuswarm.swarm.views.status import FILE as STATUS
from tpuswarm.swarm.views.status import FINISHED, STOPPED, SwarmStatus, parse_status
from tpuswarm.train.hosts.line import ABSENT, FAILED, LEFT, TAKEN, WRONG
from tpuswarm.train.process.stop import StopSignals
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.storage.record import read_file

TRIES = 4
"""Ends of a host's process in a row without a step until it is given up, as the swarm's supervisor does with host 0."""
SEARCH, PAUSE_SHORT = 3.0, 1.0
"""Seconds between two looks for where a run's head is, and after one has ended."""
PAUSE = 5.0
"""Seconds until the second of these tries, and more before each later one: host 0 may be slow to see what it lost."""

Say = Callable[[str], None]


def join_run(
    url: str,
    name: str | None,
    group: Group | None,
    token: Path,
    say: Say,
    ports: Ports | None = None,
    batch: int | None = None,
) -> None:
    """Take part in the run at a gs:// URL, wherever its head is, until it is over or this machine leaves.

    A head that dies is followed to the next one: the run's folder says where it is. Raises as `join` does.
    """
    os.environ[COMPILED] = f"{url.rstrip('/')}/compiled"
    bucket, told = Bucket(url), ""
    while True:
        status = _status(bucket)
        address = status.address if status else ""
        if status and status.phase in (FINISHED, STOPPED):
            say(f"{url} {status.phase.removeprefix('the run ')}")
            return
        if not address or silent(address):
            now = f"{url} has no head at the moment; waiting for one"
            if told != now:
                say(now)
            told = now
            time.sleep(SEARCH)
            continue
        told = ""
        try:
            if join(address, name, group, token, say, ports, batch):
                return
        except RunFailed as error:
            say(f"{error}; trying again")
        time.sleep(PAUSE_SHORT)


def _status(bucket: Bucket) -> SwarmStatus | None:
    """What the head has said last; None before the first."""
    found = read_file(bucket.read_if_there, STATUS)
    try:
        return None if found is None else parse_status(found)
    except ValidationError:
        return None


def join(
    address: str,
    name: str | None,
    group: Group | None,
    token: Path,
    say: Say,
    ports: Ports | None = None,
    batch: int | None = None,
) -> bool:
    """Take part until Ctrl-C or SIGTERM, or until the swarm has ended; whether it was asked to leave.

    name: of this machine, by which the swarm knows it again; None: what it calls itself. ports: on which its Ray
    listens; None: any. batch: rows of one of its steps; None: the run's batch.

    Raises InputError for an address where nothing answers, a wrong token, hosts that cannot be one member, and what the
    swarm refuses; RunFailed where this machine is given up.
    """
    parse_address(address, "the address that `tpuswarm train --members` prints")
    try:
        secret = token.read_text().strip()
    except OSError as error:
        raise InputError(f"{token} cannot be read ({error.strerror}); copy the run's file `token` there") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{token} is not a token; copy the run's file `token` there") from error
    if not secret:
        raise InputError(f"{token} is empty; copy the run's file `token` there")
    if group:
        group.check()
    if why := silent(address):
        raise InputError(f"nothing answers at {address} ({why.strerror or why}); is the run still alive?")
    if group and group.index:
        return _follow(group, address, say)
    if group:
        say(f"this is host 0 of {group.count}; waiting for the others at {group.at}")
    environment = {**(group.environment() if group else {}), **({BATCH: str(batch)} if batch else {})}
    return be_node(address, token, name, environment, say, ports)


class _Life(NamedTuple):
    """How a process of this host ended."""

    status: int
    last: str
    """Its last line on stderr."""
    stepped: bool


def _follow(group: Group, address: str, say: Say) -> bool:
    """Keep a process that is this host, until host 0 says farewell to it; whether this host was asked to leave."""
    say(f"this is host {group.index} of {group.count}; connecting to {group.at}; Ctrl-C leaves")
    lost, alone, tries = False, False, 0
    with StopSignals() as stop:
        while True:
            life = _live(group, stop, say)
            if stop.asked is not None:
                return True
            if life.status == LEFT:
                say("host 0 has left the swarm, or the swarm has ended")
                return False
            if life.status == WRONG or (life.status in (ABSENT, TAKEN) and not lost):
                raise InputError(life.last)
            if life.status == FAILED:
                raise RunFailed(life.last)
            if life.status == ABSENT:
                if silent(address):
                    say("the swarm has ended")
                    return False
                if not alone:
                    say(f"host 0 does not answer at {group.at}; waiting for it; Ctrl-C leaves")
                alone = True
                continue
            lost, alone, tries = True, False, 1 if life.stepped else tries + 1
            why = "its process was killed" if life.status < 0 else life.last.partition(", so this host stops")[0]
            if tries >= TRIES:
                raise RunFailed(f"this host failed {tries} times without a step: {why}; join again on all hosts")
            say(f"{why}; waiting for all hosts to reconnect")
            if wait(PAUSE * (tries - 1), stop):
                return True


def _live(group: Group, stop: StopSignals, say: Say) -> _Life:
    """One process, to its end."""
    command = [sys.executable, "-P", "-m", "tpuswarm.swarm.member.follower"]  # -P: what lies here is no library
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
    return _Life(status, lines[-1] if lines else "", STEPPED in lines)
