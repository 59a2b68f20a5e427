"""The process of a member that dialled in: it is admitted, trains, and reports to the gateway."""

import os
import platform as machine
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any, NoReturn

from pydantic import TypeAdapter

from tpuswarm.errors import InputError, TpuswarmError, message_of
from tpuswarm.swarm.anywhere.client import HttpsCalls, NoSwarm
from tpuswarm.swarm.anywhere.gateway import GATEWAY, Admitted, Reported
from tpuswarm.swarm.anywhere.member_arguments import MACHINE_TAKEN, MemberArguments, from_json
from tpuswarm.swarm.anywhere.progress import Progress
from tpuswarm.swarm.anywhere.reports import MAX_ROWS
from tpuswarm.swarm.core.messages import Refused
from tpuswarm.swarm.engines.notice import NOTICE_S, on_notice
from tpuswarm.swarm.member.member_process import MemberProcess, MemberSpec
from tpuswarm.swarm.processes.effects import Call, ProcessEnded, Unreachable
from tpuswarm.swarm.processes.run_plan import RunPlan
from tpuswarm.train.hosts.control_channel import ExitStatus
from tpuswarm.train.process import platform
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.trust import is_trusted

RETRY_INTERVAL_S = 1.0
REPORT_INTERVAL_S, URGENT_INTERVAL_S = 1.0, 0.1
"""The short one holds while a push waits until its metrics rows are stored."""
LAST_REPORT_S = 20.0
"""How long the last report is tried."""
SILENCE_S, SILENCE_TIMEOUT_S = 15.0, 300.0
"""The member says that the head is silent after the first; after the second its process ends, and its command goes on
searching for the head."""
LARGEST_FILE = 2**28
"""Bytes: of a larger text a member fetches only the rows that it trains on."""
CALLS_PER_SHARD = 8
"""A connection that loses 1% of its packets carries 1.4 Mbit/s at 100 ms, whatever the link could carry."""
PLAN: TypeAdapter[RunPlan] = TypeAdapter(RunPlan)


class Reporter:
    """Sends the reports of one process until the last one has arrived."""

    def __init__(self, calls: HttpsCalls, arguments: MemberArguments, work: MemberProcess, progress: Progress):
        self._calls, self._arguments, self._work, self._progress = calls, arguments, work, progress
        self._stored = 0
        """Rows that the swarm has stored."""
        self._lock = threading.Lock()
        self.refusal = ""
        """Why the swarm wants no more of this process."""
        self.head_stops = False
        """Whether the head has asked all members to push their work and leave."""
        self._is_last = False

    def run(self) -> None:
        """Report until the end of the process, and end it if the swarm refuses it or is silent: nothing is stored."""
        heard, is_silent = time.monotonic(), False
        while not self.refusal:
            try:
                report = self._send("", "")
                if is_silent:
                    _say("the head answers again")
                heard, is_silent = time.monotonic(), False
            except Unreachable as error:
                report = {}
                if not is_silent and time.monotonic() - heard > SILENCE_S:
                    is_silent = True
                    _say(f"the head does not answer ({error}); waiting for it; Ctrl-C leaves")
                if time.monotonic() - heard > SILENCE_TIMEOUT_S:
                    _exit(ExitStatus.ABSENT, f"nothing answers ({error})")
            except InputError as error:
                report, self.refusal = {}, str(error)
            time.sleep(URGENT_INTERVAL_S if report.get("awaits_storage") else REPORT_INTERVAL_S)
        if not self._is_last:
            _exit(ExitStatus.WRONG_INPUT, self.refusal)

    def finish(self, how: str, reason: str) -> None:
        """Send the last rows, and how the process ended."""
        self._is_last = True
        end, has_arrived = time.monotonic() + LAST_REPORT_S, False
        while time.monotonic() < end and not self.refusal:
            try:
                if not self._send(how, reason)["rows"]:
                    return
                has_arrived = True
            except Unreachable:
                if has_arrived:
                    return  # the head has ended after reading it
            except InputError as error:
                self.refusal = str(error)
            time.sleep(URGENT_INTERVAL_S)

    def _send(self, how: str, reason: str) -> dict[str, Any]:
        with self._lock:
            report = self._work.report(self._stored)
            report.pop("trace")
            progress = {"rows": report["rows"], "rows_per_s": report["rows_per_s"]}
            report |= {"first": self._stored, "rows": tuple(map(_numbers, report["rows"][:MAX_ROWS]))}
            about = (self._arguments.member, self._arguments.instance, report, how, reason)
            answer = self._calls(Call(GATEWAY, "report", about))
            self._progress.update(progress, self._work.counted)
            if isinstance(answer, Unreachable):  # a new gateway
                _join(self._calls, self._arguments)
            elif isinstance(answer, Refused):
                self.refusal = answer.reason
            elif isinstance(answer, Reported):
                self._stored = max(self._stored, answer.rows)  # a new gateway begins at 0
                if answer.should_leave:
                    self.head_stops = True
                    self._work.leave()
            return report


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out pictures and texts, which the swarm takes from its own members only."""
    return {
        name: value for name, value in row.items() if name == "member" or isinstance(value, bool | int | float | None)
    }


def facts() -> dict[str, str]:
    """Return the versions of this machine's software; they may differ from the swarm's, and are recorded."""
    packages = {name: version(name) for name in ("tpuswarm", "jax", "numpy")}
    return {"python": machine.python_version(), **packages}


def _join(calls: HttpsCalls, arguments: MemberArguments) -> Admitted | None:
    """Ask for a place once; None if the swarm has not decided. Raise InputError if it refuses, Unreachable."""
    answer = calls(Call(GATEWAY, "join", (arguments.member, arguments.instance, os.getpid(), facts())))
    if isinstance(answer, Refused):
        raise InputError(answer.reason)
    return answer if isinstance(answer, Admitted) else None


def run(arguments: MemberArguments) -> bool:
    """Be a member until the run ends or this process is asked to leave; return whether it was asked.

    Raise NoSwarm if the head has stopped.
    """
    leaving = threading.Event()
    works: list[MemberProcess] = []

    def leave() -> None:
        leaving.set()
        for work in works:
            work.leave()

    on_notice(leave)
    calls = HttpsCalls(arguments.invitation)
    calls.connect()
    while (admitted := _join(calls, arguments)) is None:
        if leaving.wait(RETRY_INTERVAL_S):
            return True
    plan = PLAN.validate_json(admitted.plan)
    require_own_folder(plan)
    if not is_trusted(plan.target):
        raise InputError(
            f"the run executes code that is not part of tpuswarm: {plan.target} and what it imports. Get that file, "
            "read it, and if you trust it, name it once: `tpuswarm train` with it, or --trust of another command"
        )
    _say(f"{admitted.member} is admitted; it fetches the data and compiles, which takes minutes the first time")
    spec = MemberSpec(
        admitted.member, plan, admitted.shards, None, None, admitted.steps, admitted.evaluates, calls, _say,
        arguments.batch, platform.lower_priority, admitted.files_from, requires_code=False, largest_file=LARGEST_FILE,
        calls_per_shard=CALLS_PER_SHARD,
    )  # fmt: skip
    work = MemberProcess(spec)
    works.append(work)
    if leaving.is_set():
        work.leave()
    reporter = Reporter(calls, arguments, work, Progress(plan.tokens_per_row, _say, time.monotonic))
    threading.Thread(target=reporter.run, name="reports", daemon=True).start()
    try:
        how, reason = work.run(), ""
    except BaseException as error:
        kind = "wrong" if isinstance(error, InputError) else "over" if isinstance(error, ProcessEnded) else "failed"
        reporter.finish(kind, message_of(error))
        raise
    reporter.finish(how, reason)
    if reporter.refusal:
        raise InputError(reporter.refusal)
    if reporter.head_stops and not leaving.is_set():
        raise NoSwarm("the head has stopped the run")
    return how != "ended"


def require_own_folder(plan: RunPlan) -> None:
    """Raise InputError if the run's files would lie outside its folder on this machine: the head names them."""
    for name in plan.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise InputError(f"the swarm has a data file {name!r}, which would lie outside the run's folder here")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", plan.swarm.run):
        raise InputError(f"the swarm's run is called {plan.swarm.run!r}, which cannot name a folder here")


def _say(text: str) -> None:
    with suppress(OSError):  # its terminal or notebook has gone
        echo(text)


def main() -> NoReturn:
    """Run the process; its parent holds the other end of its stdin."""
    arguments = from_json(sys.stdin.readline())
    threading.Thread(target=_leave_without_parent, name="parent", daemon=True).start()
    try:
        was_asked = run(arguments)
    except (NoSwarm, Unreachable) as error:
        _exit(ExitStatus.ABSENT, str(error))
    except InputError as error:
        _exit(ExitStatus.WRONG_INPUT, str(error))
    except (TpuswarmError, ProcessEnded) as error:
        _exit(ExitStatus.FAILED, str(error))
    _exit(ExitStatus.LEFT, MACHINE_TAKEN if was_asked else "")


def _exit(status: int, sentence: str) -> NoReturn:
    with suppress(OSError):
        if sentence:
            sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(status)  # threads may wait for the network


def _leave_without_parent() -> None:
    """Push the last work once the command was killed, as a notebook does half a second after an interrupt."""
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(NOTICE_S)
    os._exit(ExitStatus.LOST)


if __name__ == "__main__":
    main()
