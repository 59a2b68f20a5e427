"""A supervisor passes on requests for traces and writes the traces of its members."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tpuswarm.swarm.member.trace import TracePart
from tpuswarm.swarm.supervision import traces as module
from tpuswarm.swarm.supervision.supervised_process import SupervisedProcess
from tpuswarm.swarm.supervision.traces import TraceCollector
from tpuswarm.train.look.profile import TENSORBOARD_FOLDER, TRACE_EVENT, request_trace
from tpuswarm.train.run.directory import append_event, read_rows

XPLANE = "plugins/profile/now/host.xplane.pb"


def fake_process():
    requested = []
    return SimpleNamespace(requested_steps=requested, trace=requested.append)


class Swarm:
    """One member that trains, and the traces of its run."""

    def __init__(self, folder):
        self.folder = folder
        self.member = SupervisedProcess("m1", "entry:member", {}, actor=fake_process(), report={"incarnation": "a"})
        self.traces = TraceCollector(folder, lambda event, **facts: append_event(folder, event, **facts))

    def request(self, steps):
        made = request_trace(self.folder, steps, "m1")
        self.update()
        return made

    def update(self):
        self.traces.update({"m1": self.member})

    def send(self, files, steps=3, problem=""):
        """Send a whole trace, two bytes at a time; returns the message about it."""
        for name, data in files.items():
            for at in range(0, len(data), 2):
                self.traces.add_part(self.member, TracePart(steps, "", name, data[at : at + 2], last=False))
                self.update()
        self.traces.add_part(self.member, TracePart(steps, problem))
        return self.messages()[-1]

    def messages(self):
        return [row["message"] for row in read_rows(self.folder / "events.jsonl") if row["event"] == TRACE_EVENT]


@pytest.fixture
def swarm(tmp_path, monkeypatch):
    """Its run's folder is a relative path with `..`."""
    monkeypatch.setattr(module, "REQUEST_POLL_INTERVAL_S", 0.0)
    (tmp_path / "runs").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Swarm(Path("../runs"))


def test_trace_is_written_to_the_boards_folder_and_nowhere_else(swarm, tmp_path):
    outside = {"../../out": b"x", str(tmp_path / "out"): b"x", "a/../../../out": b"x"}
    swarm.request(3)
    assert swarm.send({XPLANE: b"trace", **outside}) == "trace of 3 steps of m1"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "events.jsonl"]
    assert files == [tmp_path / "runs" / TENSORBOARD_FOLDER / "m1" / XPLANE] and files[0].read_bytes() == b"trace"


@pytest.mark.parametrize(
    ("files", "problem", "reported"),
    [
        ({}, "could not start: in use", "could not start: in use"),
        ({"../out": b"x"}, "", "came without a file"),
        ({}, "", "came without a file"),
    ],
)
def test_trace_without_a_file_is_reported(swarm, files, problem, reported):
    swarm.request(3)
    assert swarm.send(files, 0, problem) == f"the trace of m1 {reported}; training continues without it"


def test_full_disk_leaves_nothing_of_a_trace(swarm):
    part = swarm.folder / TENSORBOARD_FOLDER / "m1" / f"{XPLANE}.part"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    swarm.request(3)
    message = swarm.send({"plugins/profile/now/host.trace.json.gz": b"1", XPLANE: b"trace"})
    assert message == "the trace of m1 could not be written: No space left on device; training continues without it"
    assert not [path for path in (swarm.folder / TENSORBOARD_FOLDER).rglob("*") if path.is_file()]


def test_request_during_a_trace_is_refused(swarm):
    first, second = swarm.request(3), swarm.request(4)
    assert swarm.member.actor.requested_steps == [3]
    swarm.send({XPLANE: b"trace"})
    answers = {row["request"]: row["message"] for row in read_rows(swarm.folder / "events.jsonl")}
    assert answers == {
        first: "trace of 3 steps of m1",
        second: "m1 is traced already; ask again when that trace is done",
    }
    swarm.request(5)
    assert swarm.member.actor.requested_steps == [3, 5]


def test_trace_ends_with_the_process_of_its_member(swarm):
    swarm.request(3)
    swarm.member.actor = fake_process()
    swarm.update()
    assert swarm.messages() == ["m1 ended before its trace was taken; ask again once it trains"]
    swarm.request(3)
    assert swarm.member.actor.requested_steps == [3]
