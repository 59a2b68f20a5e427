"""A member that dialled in: what it does when the head is away, and when the swarm wants it no more."""

from dataclasses import replace
from itertools import count

import pytest

from tests.swarm.anywhere.test_gateway import REPORT, ROW
from tests.swarm.supervision.fake_cluster import PLAN
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.anywhere import join, remote_member
from tpuswarm.swarm.anywhere.client import HttpsCalls
from tpuswarm.swarm.anywhere.gateway import Admitted, Reported
from tpuswarm.swarm.anywhere.invites import Invitation
from tpuswarm.swarm.anywhere.member_arguments import MemberArguments
from tpuswarm.swarm.anywhere.remote_member import PLAN as PLAN_AS_JSON
from tpuswarm.swarm.anywhere.remote_member import Reporter
from tpuswarm.swarm.anywhere.reports import MAX_ROWS
from tpuswarm.swarm.core.messages import Refused
from tpuswarm.swarm.processes.effects import Unreachable
from tpuswarm.swarm.processes.run_plan import DataFile
from tpuswarm.train.hosts.control_channel import ExitStatus
from tpuswarm.train.process.stop import StopSignals

INVITATION = Invitation("127.0.0.1:1", "", "ada", "00" * 16)
ERRAND = MemberArguments(INVITATION, "ada-colab", "1", None)


class Work:
    rows = (ROW,)

    def report(self, since):
        return {**REPORT, "rows": self.rows, "trace": None}


class Exit(Exception):
    pass


@pytest.fixture
def exits(monkeypatch):
    """Let no time pass in waits, and raise Exit where the process would end."""
    seen, now = [], count(0, 10.0)

    def leave(status, sentence):
        seen.append((status, sentence))
        raise Exit

    monkeypatch.setattr(remote_member, "_exit", leave)
    for module in (remote_member, join):
        monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    return seen


def reporter_of(answer) -> Reporter:
    def calls(call):
        if isinstance(answer, Exception):
            raise answer
        return answer(call) if callable(answer) else answer

    return Reporter(calls, ERRAND, Work())


@pytest.mark.parametrize(
    ("run", "name"), [("run", "../x"), ("run", "a/../../x"), ("run", "/x"), ("../x", "x"), ("/x", "x"), ("", "x")]
)
def test_head_cannot_write_outside_the_folder_of_its_run(monkeypatch, run, name):
    plan = replace(PLAN, swarm=replace(PLAN.swarm, run=run), files={name: DataFile(1, "0" * 64)})
    admitted = Admitted("ada-colab", PLAN_AS_JSON.dump_json(plan).decode(), (), "", 0, False)
    monkeypatch.setattr(HttpsCalls, "connect", lambda calls: None)
    monkeypatch.setattr(HttpsCalls, "__call__", lambda calls, call: admitted)
    monkeypatch.setattr(remote_member, "on_notice", lambda leave: None)
    monkeypatch.setattr(remote_member, "is_trusted", lambda target: False)
    with pytest.raises(InputError, match=r"outside the run's folder|cannot name a folder"):
        remote_member.run(ERRAND)
    plan = replace(PLAN, files={"a/b.bin": DataFile(1, "0" * 64)})
    remote_member.require_own_folder(plan)


@pytest.mark.parametrize("answer", [InputError("it was revoked"), Refused("it was revoked")])
def test_member_whose_reports_are_refused_ends(exits, answer):
    with pytest.raises(Exit):
        reporter_of(answer).run()
    assert exits == [(ExitStatus.WRONG_INPUT, "it was revoked")]


def test_member_without_a_head_ends_some_day(exits):
    with pytest.raises(Exit):
        reporter_of(Unreachable("connection refused")).run()
    assert exits == [(ExitStatus.ABSENT, "nothing answers (connection refused)")]


def test_long_list_of_rows_travels_in_several_reports():
    seen = []

    def answer(call):
        seen.append(len(call.arguments[2]["rows"]))
        return Reported(0, False)

    reporter = reporter_of(answer)
    reporter._work.rows = (ROW,) * (MAX_ROWS + 1)
    reporter._send("", "")
    assert seen == [MAX_ROWS]


def test_command_searches_for_a_head_that_went_away_after_a_long_time(exits, monkeypatch):
    """As long as if it had never been there."""
    processes = []

    def process(*arguments):
        processes.append(arguments)
        for _ in range(1000 * (len(processes) in (1, 50))):
            join.time.monotonic()  # it trained for hours
        return ExitStatus.ABSENT, "nothing answers"

    monkeypatch.setattr(join, "_run_process", process)
    monkeypatch.setattr(join, "wait", lambda seconds, stop: False)
    monkeypatch.setattr(join, "SILENCE_TIMEOUT_S", 2000.0)
    with StopSignals() as stop, pytest.raises(RunFailed, match="is the run still alive"):
        join._keep_alive(INVITATION, "ada-colab", None, stop, lambda text: None)
    assert len(processes) > 90
