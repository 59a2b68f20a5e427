"""A member that dialled in: what it does when the head is away, and when the swarm wants it no more."""

import fcntl
import shutil
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.swarm.anywhere.test_gateway import REPORT, ROW
from tests.swarm.supervision.fake_cluster import PLAN
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.anywhere import join, remote_member
from tpuswarm.swarm.anywhere.client import HttpsCalls
from tpuswarm.swarm.anywhere.gateway import Admitted, Reported
from tpuswarm.swarm.anywhere.invites import Invitation
from tpuswarm.swarm.anywhere.member_arguments import MACHINE_TAKEN, MemberArguments
from tpuswarm.swarm.anywhere.progress import Progress
from tpuswarm.swarm.anywhere.remote_member import PLAN as PLAN_AS_JSON
from tpuswarm.swarm.anywhere.remote_member import Reporter
from tpuswarm.swarm.anywhere.reports import MAX_ROWS
from tpuswarm.swarm.anywhere.session import Session, container_start
from tpuswarm.swarm.core.messages import Refused
from tpuswarm.swarm.member import data_files
from tpuswarm.swarm.processes.effects import Unreachable
from tpuswarm.swarm.processes.run_plan import DataFile
from tpuswarm.train.hosts.control_channel import ExitStatus
from tpuswarm.train.process.stop import StopSignals

INVITATION = Invitation("127.0.0.1:1", "", "ada", "00" * 16)
ERRAND = MemberArguments(INVITATION, "ada-colab", "1", None)
NO_SESSION = Session(None, {}, float)


class Work:
    rows, counted = (ROW,), (32, 64)

    def report(self, since):
        return {**REPORT, "rows": self.rows, "trace": None}


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setattr(join, "cache_folder", lambda name: tmp_path)
    with join._find_place(INVITATION, "colab") as place:
        yield place


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
    clock = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: next(now))
    for module in (remote_member, join):
        monkeypatch.setattr(module, "time", clock)  # not in `time` itself: servers of other tests run in threads
    return seen


def reporter_of(answer) -> Reporter:
    def calls(call):
        if isinstance(answer, Exception):
            raise answer
        return answer(call) if callable(answer) else answer

    return Reporter(calls, ERRAND, Work(), Progress(32, lambda text: None, lambda: 0.0))


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


def test_member_without_a_head_says_so_once_and_ends_some_day(exits, monkeypatch):
    said = []
    monkeypatch.setattr(remote_member, "_say", said.append)
    with pytest.raises(Exit):
        reporter_of(Unreachable("connection refused")).run()
    assert exits == [(ExitStatus.ABSENT, "nothing answers (connection refused)")]
    assert said == ["the head does not answer (connection refused); waiting for it; Ctrl-C leaves"]


def test_member_without_room_for_the_data_says_so_before_it_fetches_any(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=2**30)
    monkeypatch.setattr(data_files.shutil, "disk_usage", lambda folder: usage)
    data_files.require_room(tmp_path / "new", [DataFile(2**29, ""), DataFile(2**29, "")])
    with pytest.raises(
        InputError, match=r"needs 1\.5 GiB more, .* has 1\.0 GiB free: make room, or set TPUSWARM_CACHE"
    ):
        data_files.require_room(tmp_path, [DataFile(2**30, ""), DataFile(2**29, "")])


def test_long_list_of_rows_travels_in_several_reports():
    seen = []

    def answer(call):
        seen.append(len(call.arguments[2]["rows"]))
        return Reported(0, False)

    reporter = reporter_of(answer)
    reporter._work.rows = (ROW,) * (MAX_ROWS + 1)
    reporter._send("", "")
    assert seen == [MAX_ROWS]


def test_command_searches_for_a_head_that_went_away_after_a_long_time(exits, place, monkeypatch):
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
        join._keep_alive(INVITATION, place, None, stop, NO_SESSION, lambda text: None)
    assert len(processes) > 90


@pytest.mark.parametrize("preempted", [True, False])
def test_command_says_why_its_member_has_left(exits, place, monkeypatch, preempted):
    monkeypatch.setattr(
        join, "_run_process", lambda *arguments: (ExitStatus.LEFT, MACHINE_TAKEN if preempted else "a warning")
    )
    said = []
    with StopSignals() as stop:
        join._keep_alive(INVITATION, place, None, stop, NO_SESSION, said.append)
    assert said == [MACHINE_TAKEN if preempted else "the run has ended"]


def test_new_command_waits_for_a_process_that_pushes_its_last_work(place, monkeypatch):
    said = []
    with StopSignals() as stop, Path(place.process_lock.name).open("w") as orphan:
        fcntl.flock(orphan, fcntl.LOCK_EX)
        monkeypatch.setattr(join, "wait", lambda seconds, stop: fcntl.flock(orphan, fcntl.LOCK_UN))
        join._await_earlier_process(place, stop, said.append)
        assert said == [f"an earlier process of {place.member} is pushing its last work; waiting for it"]
        fcntl.flock(place.process_lock, fcntl.LOCK_UN)
        fcntl.flock(orphan, fcntl.LOCK_EX)
        monkeypatch.setattr(join, "LAST_PUSH_TIMEOUT_S", -1.0)
        with pytest.raises(RunFailed, match="does not end"):
            join._await_earlier_process(place, stop, said.append)


def test_second_command_takes_another_number_until_the_first_one_leaves(place):
    with join._find_place(INVITATION, "colab") as second:
        assert (place.member, second.member) == ("ada-colab", "ada-colab-2")
    place.leave()
    with join._find_place(INVITATION, "colab") as second:
        assert second.member == "ada-colab"


def test_member_with_a_stated_time_warns_and_leaves_before_its_end():
    now = [1000.0]
    session = Session(2.0, {"COLAB_RELEASE_TAG": "1"}, float, lambda: now[0])
    assert session.due_warning() is None and not session.must_leave
    now[0] += 7200 - 600
    assert session.due_warning() == "the 2 hours of --hours end in 10 min; the last work is pushed before"
    assert session.due_warning() is None and not session.must_leave
    now[0] += 560
    assert session.must_leave


def test_member_in_a_notebook_warns_before_each_limit_of_the_service_and_goes_on():
    now = [8.8 * 3600]
    session = Session(None, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, float, lambda: now[0])
    assert session.due_warning() == (
        "Kaggle may end this session in 11 min, 9 h after its start: interrupt the cell first"
    )
    now[0] = 10 * 3600
    assert session.due_warning() is None
    now[0] = 11.9 * 3600
    assert "12 h after its start" in session.due_warning()
    now[0] = 13 * 3600
    assert session.due_warning() is None and not session.must_leave
    assert Session(None, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, float, lambda: 10 * 3600).due_warning() is None
    assert 0 < container_start() < time.time()


def test_progress_is_a_line_now_and_then_with_an_estimate():
    said, now = [], [0.0]
    progress = Progress(32, said.append, lambda: now[0])
    report = {"rows": (), "rows_per_s": None}
    progress.update(report, (0, 64_000))
    assert said == [], "there is no step yet"
    progress.update({**report, "rows": ({"step": 1, "loss": 4.25},)}, (0, 64_000))
    for second in range(1, 300):
        now[0] = second
        row = {"step": second, "loss": 2.0}
        progress.update({"rows": (row, {"eval_loss": 1.0}), "rows_per_s": 10.0}, (32 * second, 64_000))
    assert said[0] == "step 1: loss 4.250, 0% of the run"
    assert said[-1].endswith("320 tokens/s here, 13% of the run, about 29 min to its end")
    assert len(said) < 12
