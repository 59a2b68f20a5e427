"""Every row of a member that dialled in is stored once, whichever process restarts."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.swarm.anywhere.test_gateway import EVALUATION, REPORT, ROW
from tests.swarm.supervision.fake_cluster import PLAN
from tpuswarm.swarm.anywhere.gateway import GATEWAY, Admitted, Gateway, Reported
from tpuswarm.swarm.processes.coordinator import Wait
from tpuswarm.swarm.processes.effects import Call
from tpuswarm.swarm.supervision import remote_members
from tpuswarm.swarm.supervision.remote_members import RemoteMembers
from tpuswarm.swarm.supervision.supervised_process import SupervisedProcess

NAME = "ada-colab"


class Head:
    """A supervisor with a gateway, and the one process of a member that dialled in."""

    def __init__(self):
        self.rows: list[int] = []
        """Steps whose rows are stored."""
        self.made, self.stored, self.now, self.is_open = 0, 0, 0.0, True
        """Rows that the member's process made, and those that it knows to be stored; the supervisor's clock."""
        self.lost: list[str] = []
        self.evaluates = False
        self.start()

    def start(self):
        """Start as a new supervisor."""
        self.processes: dict[str, SupervisedProcess] = {}
        self.remote = RemoteMembers(self, PLAN, ("aggregator-0",), "aggregator-0")
        self.start_gateway()

    def start_gateway(self):
        self.gateway = Gateway(lambda call: None, lambda: self.now)

    def begin_member(self, process):
        return max(self.rows, default=0), self.evaluates

    def change_remote(self, name, instance, change):
        self.gateway.update(name, instance, change)

    def report_dialled_in(self, name, facts):
        pass

    def report_lost(self, process, reason):
        self.lost.append(reason)

    def request(self, method: str, *arguments: Any) -> Any:
        return self.gateway.serve("ada", Call(GATEWAY, method, (NAME, "m.1", *arguments)))

    def member_reports(self, steps: int = 0) -> Any:
        """The member makes some steps and reports."""
        self.made += steps
        rows = tuple({**ROW, "step": number + 1} for number in range(self.stored, self.made))
        answer = self.request("report", {**REPORT, "first": self.stored, "rows": rows}, "", "")
        if isinstance(answer, Reported):
            self.stored = max(self.stored, answer.rows)
        else:
            self.request("join", 7, {})
        return answer

    def look(self):
        """A round of the supervisor."""
        self.remote.update(self.gateway.state(), self.now, self.is_open)
        if (process := self.processes.get(NAME)) and process.actor:
            if (answer := process.actor.report(process.rows)) is not None:
                rows = answer[1]["rows"]
                process.rows += len(rows)
                self.rows += [row["step"] for row in rows]
            if process.actor.outcome():
                process.actor = None

    def all_rows_are_stored_once(self) -> bool:
        for _ in range(4):
            self.member_reports()
            self.look()
        return self.rows == [*range(1, self.made + 1)] and self.stored == self.made


@pytest.fixture
def head(monkeypatch):
    head = Head()
    monkeypatch.setattr(remote_members, "time", SimpleNamespace(monotonic=lambda: head.now))
    head.member_reports()
    head.look()
    assert isinstance(head.request("join", 7, {}), Admitted)
    head.member_reports(steps=3)
    head.look()
    assert head.all_rows_are_stored_once()
    return head


def test_new_gateway_learns_which_rows_are_stored(head):
    head.member_reports(steps=2)
    head.look()
    head.look()
    head.start_gateway()  # before the old one could tell the member
    assert head.all_rows_are_stored_once()


def test_new_gateway_tells_members_to_leave(head):
    head.processes[NAME].actor.leave()
    head.start_gateway()
    head.all_rows_are_stored_once()
    assert head.member_reports().should_leave


@pytest.mark.parametrize("has_new_gateway", [False, True])
def test_member_that_was_believed_lost_goes_on(head, has_new_gateway):
    head.member_reports(steps=2)
    head.look()
    head.processes[NAME].actor.kill()
    head.look()
    assert head.processes[NAME].actor is None
    if has_new_gateway:
        head.start_gateway()
    head.made += 2
    assert head.all_rows_are_stored_once() and head.processes[NAME].actor


def test_member_goes_on_with_a_new_supervisor(head):
    head.member_reports(steps=2)
    head.look()  # its rows are stored, and it does not know
    head.start()
    head.made += 2
    assert head.all_rows_are_stored_once()
    head.made += 2
    assert head.all_rows_are_stored_once()


@pytest.mark.parametrize("evaluates", [False, True])
def test_only_the_member_that_was_asked_to_evaluate_does(monkeypatch, evaluates):
    head = Head()
    monkeypatch.setattr(remote_members, "time", SimpleNamespace(monotonic=lambda: head.now))
    head.evaluates = evaluates
    head.member_reports()
    head.look()
    for first in (0, 1):
        rows = ({**EVALUATION, "version": first},)
        head.request("report", {**REPORT, "first": first, "rows": rows}, "", "")
        head.look()
        head.look()
        assert head.member_reports().rows == first + 1, "it may forget the row"
    assert head.rows == [1, 1] * evaluates


def test_run_that_stops_admits_no_new_process_of_a_member(head):
    """It has left, and its command looks for the head: were it admitted, the run would go on."""
    head.is_open = False
    for _ in range(2):
        assert isinstance(head.gateway.serve("ada", Call(GATEWAY, "join", (NAME, "m.2", 8, {}))), Wait)
        head.look()


def test_member_that_returns_while_the_run_stops_is_asked_to_push_its_last_work(head):
    head.processes[NAME].actor.kill()
    head.look()
    head.is_open = False
    head.member_reports(steps=1)
    head.look()
    assert head.all_rows_are_stored_once() and head.member_reports().should_leave
