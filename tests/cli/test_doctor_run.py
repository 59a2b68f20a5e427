"""`tpuswarm doctor RUN`: each thing that can be wrong with a run, and one with which nothing is."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.processes import start, wait_for
from tests.swarm.views.test_drawing import status
from tpuswarm.doctor import run as doctor
from tpuswarm.swarm.views.status import MemberStatus, write_status
from tpuswarm.train.run.directory import Run, append_event

NOW = 1_800_000_000.0


def member(name, speed=1000.0, state="alive"):
    return MemberStatus(name, state, 1, "a", 1, 100, speed, 1.0, 1.0, 0)


@pytest.fixture
def run(tmp_path):
    """A swarm's run that this process holds, with which nothing is wrong."""
    held = Run(tmp_path / "run")
    append_event(held.folder, "started", message="3 members")
    alive(held.folder)
    yield held.folder
    held.close()


def alive(folder, members=("m0", "m1", "m2"), at=NOW, alarms=(), speeds=()):
    speeds = dict(zip(members, [1000.0] * len(members), strict=True)) | dict(speeds)
    found = status([member(name, speeds[name]) for name in members], alarms)
    write_status(folder, type(found)(**{**vars(found), "time": at}))


def found(folder):
    return [(each.of, each.check) for each in doctor.of_run(folder, "runs/a", NOW)]


def test_nothing_is_wrong_with_a_healthy_run(run):
    assert found(run) == []
    alive(run, speeds={"m0": 501.0})
    alive(run, members=("m0", "m1"), speeds={"m0": 1.0})  # two have no median to speak of
    append_event(run, "lost", member="m0", message="killed")
    assert found(run) == []


def test_a_straggler_is_named(run):
    alive(run, speeds={"m1": 499.0})
    (only,) = doctor.of_run(run, "runs/a", NOW)
    assert (only.of, only.check) == ("m1", "straggler")
    assert only.wrong.what == "499 tokens/s, beside 1,000 of the median of 3 members"


def test_silence_and_alarms_are_said(run):
    alive(run, at=NOW - 31)
    assert found(run) == [("runs/a", "silent")]
    alive(run, alarms=("no commit for 200 s",))
    (only,) = doctor.of_run(run, "runs/a", NOW)
    assert (only.check, only.wrong.what) == ("alarm", "no commit for 200 s")


def test_a_member_that_is_lost_again_and_again(run):
    for _ in range(3):
        append_event(run, "lost", member="m2", message="its machine was preempted")
    alive(run, at=time.time())
    (only,) = doctor.of_run(run, "runs/a", time.time())
    assert (only.of, only.check) == ("m2", "lost-often")
    assert only.wrong.what == "lost 3 times within an hour, the last time: its machine was preempted"
    alive(run, at=NOW)
    assert found(run) == []  # later than within an hour


def test_what_an_earlier_process_found_is_not_said_again(run):
    append_event(run, "diagnostic", kind="starvation", message="the devices waited 40% for data")
    assert found(run) == [("starvation", "finding")]
    append_event(run, "diagnostic", kind="starvation", message="the devices waited 41% for data")
    (only,) = doctor.of_run(run, "runs/a", NOW)
    assert only.wrong.what == "the devices waited 41% for data" and "docs/slow-tpu.md" in only.wrong.mend
    append_event(run, "started", message="again")
    assert found(run) == []


def test_a_run_that_was_killed_and_one_that_finished(typed, tmp_path, finished_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = start(["train", "gpt2-tiny", "--data", "fake", "--steps", "100000", "--run", "a"], tmp_path)
    wait_for((tmp_path / "a/metrics.jsonl").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    code, out, err = typed("doctor", "a", "--json")
    told = json.loads(out)
    assert code == 1 and told["run"] == "a", err
    assert [each["what"] for each in told["found"] if each["check"] == "ended"] == [
        "its process was killed, and nobody has resumed it"
    ]
    _, out, _ = typed("doctor", str(finished_run.run), "--json")
    assert not [each for each in json.loads(out)["found"] if each["check"] != "finding"]


def test_nothing_of_a_run_is_mended_without_a_person(typed, finished_run):
    code, _, err = typed("doctor", str(finished_run.run), "--fix")
    assert code == 2 and "nothing of a run is safe to mend without a person: leave --fix out" in " ".join(err.split())


def test_a_run_that_is_not_there_is_no_machine(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = typed("doctor", "runs/none")
    assert code == 2 and "runs/none does not exist" in err


def test_the_page_has_every_check():
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    for name, why in doctor.WHY.items():
        assert f"\n| {name} | " in page and f"| {why} |" in page
