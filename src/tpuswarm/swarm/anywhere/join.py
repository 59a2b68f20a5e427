"""`tpuswarm join tps1-…`: keep a member on this machine alive that reaches its swarm by HTTPS."""

import fcntl
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.anywhere.invites import Invitation, parse_invitation
from tpuswarm.swarm.anywhere.member_arguments import MACHINE_TAKEN, MemberArguments, to_json
from tpuswarm.swarm.anywhere.session import Session, container_start
from tpuswarm.swarm.engines.node import wait
from tpuswarm.swarm.engines.notice import NOTICE_S
from tpuswarm.train.hosts.control_channel import ExitStatus
from tpuswarm.train.process.atomic import create_atomically
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.stop import Interrupted, StopSignals

MAX_DEATHS = 4
"""The machine gives up after its process has died this often in a row without living a minute."""
MIN_LIFE_S = 60.0
RESTART_PAUSE_S, MAX_RESTART_PAUSE_S = 1.0, 60.0
ABSENT_PAUSE_S = 5.0
"""Wait between two searches for a head that does not answer."""
LAST_PUSH_TIMEOUT_S = 2 * NOTICE_S
SILENCE_TIMEOUT_S = 600.0
"""The command ends after searching for the head for this long."""
NOTEBOOK_KILL_S = 2.0
"""A notebook interrupts `!tpuswarm join`, interrupts it again, and kills it, all within half a second."""
MAX_MACHINE_CHARS = 32
MAX_MEMBERS_HERE = 64

Say = Callable[[str], None]


def join_by_invite(text: str, name: str | None, batch: int | None, hours: float | None, say: Say) -> None:
    """Take part until Ctrl-C, SIGTERM or the end of the run.

    text: the invite; name: of this machine, by default its hostname; batch: rows of a step here, by default the run's;
    hours: that this machine stays. Raise InputError for an invite that does not hold and for a refusal, RunFailed if
    the member cannot live here.
    """
    invitation, session = parse_invitation(text), Session(hours, os.environ, container_start)
    with _find_place(invitation, name) as place, StopSignals() as stop:
        say(f"joining {invitation.address} as {place.member}; Ctrl-C leaves")
        _await_earlier_process(place, stop, say)
        if stop.requested is None:
            _keep_alive(invitation, place, batch, stop, session, say)


@dataclass(frozen=True)
class _Place:
    """A member of this machine, which one command keeps alive at a time."""

    member: str
    name_lock: TextIO
    """Held by the command until it leaves."""
    process_lock: TextIO
    """Held by the command and by the member's process, which may outlive it to push its last work."""

    def leave(self) -> None:
        """Let the next command take the member's name already; it waits for this one's process."""
        fcntl.flock(self.name_lock, fcntl.LOCK_UN)


@contextmanager
def _find_place(invitation: Invitation, name: str | None) -> Iterator[_Place]:
    """Yield the same member at each start on this machine, or one with a number if that member is at work."""
    machine = re.sub(r"[^A-Za-z0-9._]+", "-", name or socket.gethostname())[:MAX_MACHINE_CHARS].strip("-") or "machine"
    folder = cache_folder("anywhere")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, MAX_MEMBERS_HERE + 1):
        member = f"{invitation.person}-{machine}{f'-{number}' * (number > 1)}"
        with (folder / f"{member}.lock").open("w") as lock, (folder / f"{member}.process").open("w") as process_lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield _Place(member, lock, process_lock)
            return
    raise InputError(f"{MAX_MEMBERS_HERE} members of {invitation.person} are at work on this machine already")


def _machine_id() -> str:
    """Return a random word that stays the same on this machine."""
    path = cache_folder("anywhere") / "machine"
    if not path.exists():
        create_atomically(path, secrets.token_hex(8).encode())  # another command may be first
    return path.read_text()


def _await_earlier_process(place: _Place, stop: StopSignals, say: Say) -> None:
    end, told = time.monotonic() + LAST_PUSH_TIMEOUT_S, False
    while stop.requested is None:
        try:
            fcntl.flock(place.process_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise RunFailed(f"an earlier process of {place.member} does not end on this machine; kill it") from None
            if not told:
                say(f"an earlier process of {place.member} is pushing its last work; waiting for it")
            told = True
            wait(1.0, stop)


def _keep_alive(
    invitation: Invitation, place: _Place, batch: int | None, stop: StopSignals, session: Session, say: Say
) -> None:
    deaths, silent_since, told = 0, None, ""
    while True:
        began = time.monotonic()
        status, last_line = _run_process(invitation, place, batch, stop, session, say)
        if stop.requested is not None or status == ExitStatus.LEFT:
            is_taken = last_line == MACHINE_TAKEN
            say("left" if stop.requested is not None else MACHINE_TAKEN if is_taken else "the run has ended")
            return
        if status == ExitStatus.WRONG_INPUT:
            raise InputError(last_line)
        if status == ExitStatus.ABSENT:
            if silent_since is None or time.monotonic() - began > MIN_LIFE_S:
                silent_since = time.monotonic()
            if time.monotonic() - silent_since > SILENCE_TIMEOUT_S:
                raise RunFailed(f"{last_line} for {SILENCE_TIMEOUT_S / 60:.0f} minutes; is the run still alive?")
            if told != last_line:
                say(f"{last_line}; waiting up to {SILENCE_TIMEOUT_S / 60:.0f} minutes; Ctrl-C leaves")
            told = last_line
            if wait(ABSENT_PAUSE_S, stop):
                say("left")
                return
            continue
        silent_since, told = None, ""
        deaths = 1 if time.monotonic() - began > MIN_LIFE_S else deaths + 1
        why = f"its process was killed by signal {-status}" if status < 0 else last_line or f"it ended with {status}"
        if deaths >= MAX_DEATHS:
            raise RunFailed(f"{place.member} failed {deaths} times in a row: {why}")
        pause = min(RESTART_PAUSE_S * 2 ** (deaths - 1), MAX_RESTART_PAUSE_S)
        say(f"{place.member} stopped: {why}; starting again in {pause:.0f} s")
        if wait(pause, stop):
            return


def _run_process(
    invitation: Invitation, place: _Place, batch: int | None, stop: StopSignals, session: Session, say: Say
) -> tuple[int, str]:
    """Run one process to its end; return its exit status and the last line that it wrote on stderr."""
    command = [sys.executable, "-P", "-m", "tpuswarm.swarm.anywhere.remote_member"]  # -P: import nothing from here
    arguments = to_json(MemberArguments(invitation, place.member, f"{_machine_id()}.{secrets.token_hex(8)}", batch))
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), stderr=errors, start_new_session=True,
            text=True, pass_fds=[place.process_lock.fileno()],
        )  # fmt: skip
        assert process.stdin is not None
        try:
            try:
                process.stdin.write(f"{arguments}\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its end says why
            told = False
            while process.poll() is None:
                if warning := session.due_warning():
                    say(warning)
                if session.must_leave and stop.requested is None:
                    stop.request(signal.SIGTERM)
                if stop.requested is not None and not told:
                    told = True
                    place.leave()
                    say(f"pushing the last work, in at most {NOTICE_S:.0f} s; Ctrl-C again leaves at once")
                    os.kill(process.pid, signal.SIGTERM)
                if stop.requested is not None and stop.seconds_since_request() > NOTICE_S:
                    break
                time.sleep(0.2)
        except Interrupted:
            if stop.seconds_since_request() > NOTEBOOK_KILL_S:
                process.kill()
            raise  # else the process pushes without this command
        except BaseException:
            process.kill()
            raise
        process.kill()
        status = process.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return status, lines[-1] if lines else ""
