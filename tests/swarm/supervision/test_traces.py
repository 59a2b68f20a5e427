"""What a supervisor makes of requests for traces, and of what members hand over."""

from pathlib import Path

import pytest

from tests.train.look.test_profile import told
from tpuswarm.swarm.member.trace import Traced
from tpuswarm.swarm.supervision import traces as module
from tpuswarm.swarm.supervision.kept import KeptProcess
from tpuswarm.swarm.supervision.traces import Traces
from tpuswarm.train.look.profile import BOARD, request
from tpuswarm.train.run.directory import append_event, read_rows

XPLANE = "plugins/profile/now/host.xplane.pb"


class Process:
    """A member's, which does as it is told."""

    def __init__(self):
        self.asked = []

    def trace(self, steps):
        self.asked.append(steps)


class Swarm:
    """One member that trains, and the traces of its run."""

    def __init__(self, folder):
        self.folder = folder
        self.member = KeptProcess("m1", "entry:member", {}, process=Process(), seen={"incarnation": "a"})
        self.traces = Traces(folder, lambda event, **facts: append_event(folder, event, **facts))

    def ask(self, steps):
        """Returns the request's id."""
        made = request(self.folder, steps, "m1")
        self.keep()
        return made

    def keep(self):
        self.traces.keep({"m1": self.member})

    def hand_over(self, files, steps=3, problem=""):
        """All of a trace, two bytes at a time. What came of it, in words."""
        for name, data in files.items():
            for at in range(0, len(data), 2):
                self.traces.took(self.member, Traced(steps, "", name, data[at : at + 2], last=False))
                self.keep()
        self.traces.took(self.member, Traced(steps, problem))
        return told(self.folder)[-1]


@pytest.fixture
def swarm(tmp_path, monkeypatch):
    """Its run's folder is as somebody types it who stands beside it."""
    monkeypatch.setattr(module, "LOOK", 0.0)
    (tmp_path / "runs").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Swarm(Path("../runs"))


def test_files_come_to_the_boards_folder_and_nowhere_else(swarm, tmp_path):
    outside = {"../../out": b"x", str(tmp_path / "out"): b"x", "a/../../../out": b"x"}
    swarm.ask(3)
    assert swarm.hand_over({XPLANE: b"trace", **outside}) == "trace of 3 steps of m1"
    made = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "events.jsonl"]
    assert made == [tmp_path / "runs" / BOARD / "m1" / XPLANE] and made[0].read_bytes() == b"trace"


@pytest.mark.parametrize(
    ("files", "problem", "why"),
    [
        ({}, "could not begin: in use", "could not begin: in use"),
        ({"../out": b"x"}, "", "came without a file"),
        ({}, "", "came without a file"),
    ],
)
def test_without_a_file_there_is_no_trace(swarm, files, problem, why):
    swarm.ask(3)
    assert swarm.hand_over(files, 0, problem) == f"the trace of m1 {why}; training continues without it"


def test_of_a_trace_that_finds_no_room_nothing_is_left(swarm, monkeypatch):
    write = module.Path.write_bytes

    def full(path, data):
        write(path, data[:1])
        if path.name.endswith(".pb"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "write_bytes", full)
    swarm.ask(3)
    message = swarm.hand_over({"plugins/profile/now/host.trace.json.gz": b"1", XPLANE: b"trace"})
    assert message == "the trace of m1 could not be written: No space left on device; training continues without it"
    assert not [path for path in (swarm.folder / BOARD).rglob("*") if path.is_file()]


def test_who_asks_while_one_is_awaited_is_refused_and_nobody_else(swarm):
    first, second = swarm.ask(3), swarm.ask(4)
    assert swarm.member.process.asked == [3]
    swarm.hand_over({XPLANE: b"trace"})
    answers = {row["request"]: row["message"] for row in read_rows(swarm.folder / "events.jsonl")}
    assert answers == {
        first: "trace of 3 steps of m1",
        second: "m1 is traced already; ask again once that trace is there",
    }
    swarm.ask(5)
    assert swarm.member.process.asked == [3, 5]


def test_a_member_that_is_another_process_by_now_has_no_trace_to_give(swarm):
    swarm.ask(3)
    swarm.member.process = Process()
    swarm.keep()
    assert told(swarm.folder) == ["m1 ended before its trace was taken; ask again once it trains"]
    swarm.ask(3)
    assert swarm.member.process.asked == [3]
