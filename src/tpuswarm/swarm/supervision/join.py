"""`tpuswarm join`: make this machine a member of a running swarm, or one host of a member of several."""

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
from tpuswarm.swarm.engines.node import Role, be_node, connection_error, wait
from tpuswarm.swarm.engines.notice import NOTICE_S
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import BATCH, COMPILED
from tpuswarm.swarm.member.group import FIRST_STEP_LINE, Group
from tpuswarm.swarm.views.status import FILE as STATUS
from tpuswarm.swarm.views.status import FINISHED, STOPPED, SwarmStatus, parse_status
from tpuswarm.train.hosts.control_channel import ExitStatus
from tpuswarm.train.process.stop import StopSignals
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.storage.record import read_file

MAX_DEATHS = 4
"""A host is given up after this many deaths in a row without a step, as the supervisor does with host 0."""
HEAD_POLL_INTERVAL_S, HEAD_RETRY_S = 3.0, 1.0
"""Wait between two searches for a run's head, and after a head has ended."""
RECONNECT_PAUSE_S = 5.0
"""Added before each further attempt: host 0 may be slow to notice a loss."""

Say = Callable[[str], None]


def join_run(
    url: str,
    name: str | None,
    group: Group | None,
    token: Path,
    say: Say,
    ports: Ports | None = None,
    batch: int | None = None,
    role: Role = "member",
) -> None:
    """Take part in the run at a gs:// URL, wherever its head is, until the run ends or this machine leaves.

    After a head has died, follow the next one, which the run's folder names. Raise as `join` does.
    """
    os.environ[COMPILED] = f"{url.rstrip('/')}/compiled"
    bucket, told = Bucket(url), ""
    while True:
        status = _status(bucket)
        address = status.address if status else ""
        if status and status.phase in (FINISHED, STOPPED):
            say(f"{url} {status.phase.removeprefix('the run ')}")
            return
        if not address or connection_error(address):
            now = f"{url} has no head at the moment; waiting for one"
            if told != now:
                say(now)
            told = now
            time.sleep(HEAD_POLL_INTERVAL_S)
            continue
        told = ""
        try:
            if join(address, name, group, token, say, ports, batch, role):
                return
        except RunFailed as error:
            say(f"{error}; trying again")
        time.sleep(HEAD_RETRY_S)


def _status(bucket: Bucket) -> SwarmStatus | None:
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
    role: Role = "member",
) -> bool:
    """Take part until Ctrl-C, SIGTERM or the end of the swarm; return whether the user asked this machine to leave.

    name: by which the swarm recognizes this machine, by default its hostname; ports: of its Ray, None for any; batch:
    rows of its steps, by default the run's batch; role: what may run here.

    Raise InputError if nothing answers, for a wrong token, for hosts that cannot form a member, and if the swarm
    refuses; RunFailed if the swarm gives this machine up.
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
    if why := connection_error(address):
        raise InputError(f"nothing answers at {address} ({why.strerror or why}); is the run still alive?")
    if group and group.index:
        return _follow(group, address, say)
    if group:
        say(f"this is host 0 of {group.count}; waiting for the others at {group.at}")
    environment = {**(group.environment() if group else {}), **({BATCH: str(batch)} if batch else {})}
    return be_node(address, token, name, environment, say, ports, role)


class _HostEnd(NamedTuple):
    """How a process of this host ended."""

    status: int
    last_line: str
    """On stderr."""
    made_step: bool


def _follow(group: Group, address: str, say: Say) -> bool:
    """Keep a process for this host alive until host 0 says farewell; return whether this host was asked to leave."""
    say(f"this is host {group.index} of {group.count}; connecting to {group.at}; Ctrl-C leaves")
    lost, waiting_for_host_0, deaths = False, False, 0
    with StopSignals() as stop:
        while True:
            end = _run_host(group, stop, say)
            if stop.requested is not None:
                return True
            if end.status == ExitStatus.LEFT:
                say("host 0 has left the swarm, or the swarm has ended")
                return False
            is_refused = not lost and end.status in (ExitStatus.ABSENT, ExitStatus.REFUSED)
            if is_refused or end.status == ExitStatus.WRONG_INPUT:
                raise InputError(end.last_line)
            if end.status == ExitStatus.FAILED:
                raise RunFailed(end.last_line)
            if end.status == ExitStatus.ABSENT:
                if connection_error(address):
                    say("the swarm has ended")
                    return False
                if not waiting_for_host_0:
                    say(f"host 0 does not answer at {group.at}; waiting for it; Ctrl-C leaves")
                waiting_for_host_0 = True
                continue
            lost, waiting_for_host_0, deaths = True, False, 1 if end.made_step else deaths + 1
            why = "its process was killed" if end.status < 0 else end.last_line.partition(", so this host stops")[0]
            if deaths >= MAX_DEATHS:
                raise RunFailed(f"this host failed {deaths} times without a step: {why}; join again on all hosts")
            say(f"{why}; waiting for all hosts to reconnect")
            if wait(RECONNECT_PAUSE_S * (deaths - 1), stop):
                return True


def _run_host(group: Group, stop: StopSignals, say: Say) -> _HostEnd:
    """Run one process to its end."""
    command = [sys.executable, "-P", "-m", "tpuswarm.swarm.member.follower"]  # -P: import nothing from this folder
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), stderr=errors,
            env={**os.environ, **group.environment()}, start_new_session=True,
        )  # fmt: skip
        try:
            told = False
            while process.poll() is None:
                if stop.requested is not None and not told:
                    told = True
                    say(f"leaving when host 0 does, in at most {NOTICE_S:.0f} s; Ctrl-C again leaves at once")
                if stop.requested is not None and stop.seconds_since_request() > NOTICE_S:
                    break
                time.sleep(0.2)
        finally:
            process.kill()
            status = process.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return _HostEnd(status, lines[-1] if lines else "", FIRST_STEP_LINE in lines)
