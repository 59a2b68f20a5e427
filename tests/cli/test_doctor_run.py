"""`tpuswarm doctor RUN`: each fault that a run can have, and a run without any."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest
import tomli_w

from tests.swarm.chains import Run as Chain
from tests.swarm.views.test_status import status_of
from tpuswarm.doctor.run import WHY, check_run
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.status import MemberStatus, write_status
from tpuswarm.train.look.report import write_report
from tpuswarm.train.run.directory import CONFIG, METRICS, Run, append_event
from tpuswarm.train.run.listing import missing_rows

NOW = 1_800_000_000.0
SWARM = {
    "recipe": {"name": "toy", "target": "toy", "options": {}},
    "train": {"steps": 8, "batch": 2, "seed": 0},
    "chosen": {"tokens_per_row": 4, "devices": 1, "platform": "cpu"},
}


def member(name, speed=1000.0, state="alive"):
    return MemberStatus(name, state, 1, "a", 1, 100, speed, 1.0, 1.0, 0)


@pytest.fixture
def run(tmp_path):
    """A healthy swarm's run, held by this process."""
    held = Run(tmp_path / "run")
    held.write_config({**SWARM, "swarm": {"members": 3}})
    append_event(held.folder, "started", message="3 members")
    alive(held.folder)
    yield held.folder
    held.close()


def alive(folder, members=("m0", "m1", "m2"), at=NOW, alarms=(), speeds=()):
    speeds = dict(zip(members, [1000.0] * len(members), strict=True)) | dict(speeds)
    found = status_of([member(name, speeds[name]) for name in members], alarms)
    write_status(folder, type(found)(**{**vars(found), "time": at}))


def found(folder):
    return [(finding.subject, finding.check) for finding in check_run(folder, "runs/a", NOW)]


def test_healthy_run_has_no_findings(run):
    assert found(run) == []
    alive(run, speeds={"m0": 501.0})
    alive(run, members=("m0", "m1"), speeds={"m0": 1.0})  # the median of two means nothing
    append_event(run, "lost", member="m0", message="killed")
    assert found(run) == []


def test_straggler_is_named(run):
    alive(run, speeds={"m1": 499.0})
    (only,) = check_run(run, "runs/a", NOW)
    assert (only.subject, only.check) == ("m1", "straggler")
    assert only.problem == "499 tokens/s; the median of 3 members is 1,000"


def test_silence_and_alarms_are_reported(run):
    alive(run, at=NOW - 31)
    assert found(run) == [("runs/a", "silent")]
    alive(run, alarms=("no commit for 200 s",))
    (only,) = check_run(run, "runs/a", NOW)
    assert (only.check, only.problem) == ("alarm", "no commit for 200 s")


def test_member_lost_repeatedly_is_reported(run):
    for _ in range(3):
        append_event(run, "lost", member="m2", message="its machine was preempted")
    alive(run, at=time.time())
    (only,) = check_run(run, "runs/a", time.time())
    assert (only.subject, only.check) == ("m2", "lost-often")
    assert only.problem == "lost 3 times within an hour; the last time: its machine was preempted"
    alive(run, at=NOW)
    assert found(run) == []  # later than within an hour


def test_findings_of_an_earlier_process_are_not_repeated(run):
    append_event(run, "diagnostic", kind="starvation", message="the devices waited 40% for data")
    assert found(run) == [("starvation", "finding")]
    append_event(run, "diagnostic", kind="starvation", message="the devices waited 41% for data")
    (only,) = check_run(run, "runs/a", NOW)
    assert only.problem == "the devices waited 41% for data" and "docs/slow-tpu.md" in only.advice
    append_event(run, "started", message="again")
    assert found(run) == []


def test_killed_run_is_reported_and_a_finished_one_is_not(typed, tmp_path, finished_run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished_run.run, "killed")
    append_event(Path("killed"), "started")  # without an end, and without a process that holds the run
    for run, checks in (("killed", ["ended"]), (str(finished_run.run), [])):
        code, out, err = typed("doctor", run, "--json")
        found = [row for row in json.loads(out)["found"] if row["check"] != "finding"]
        assert [row["check"] for row in found] == checks, err
        assert not checks or (code, found[0]["what"]) == (1, "its process was killed, and the run was not resumed")


def test_document_lists_every_check():
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    for name, why in WHY.items():
        assert f"\n| {name} | " in page and f"| {why} |" in page


def test_lost_and_damaged_rows_are_named_in_every_view(typed, tmp_path, finished_run):
    run = shutil.copytree(finished_run.run, tmp_path / "run")
    whole = (run / METRICS).read_bytes()

    def without(*lost: int) -> bytes:
        rows = whole.splitlines(keepends=True)
        return b"".join(row for row in rows if b'"loss"' not in row or json.loads(row)["step"] not in lost)

    (run / METRICS).unlink()
    sentence = "metrics.jsonl has no rows of steps {}: lost in a power cut, or damaged"
    assert missing_rows(run) == sentence.format("1 to 60")
    for rows, steps in (
        (without(*range(25, 31)), "25 to 30"),
        (without(60), "60"),
        (whole.replace(b'"step": 5,', b'"step": 4,'), "5"),
        (whole.replace(b'"step": 5,', b'"sdep": 5,'), "5"),
        (without(3, 5, 6), "3, 5 to 6"),
    ):
        (run / METRICS).write_bytes(rows)
        assert missing_rows(run) == sentence.format(steps)
    sentence = sentence.format(steps)
    assert sentence in " ".join(typed("status", str(run))[1].split())
    assert json.loads(typed("status", str(run), "--json")[1])["missing_rows"] == sentence
    assert ("rows", sentence) in [(finding.check, finding.problem) for finding in check_run(run, "runs/a")]
    assert sentence in write_report(run).read_text()


def test_damaged_checkpoint_and_ledger_are_named(typed, tmp_path, finished_run):
    run = shutil.copytree(finished_run.run, tmp_path / "plain")
    newest = max((run / "checkpoints").iterdir())
    (newest / "manifest.json").write_text("{")
    sentence = f"checkpoint {newest.name} is damaged (its manifest cannot be read); skipping it"
    assert sentence in " ".join(typed("doctor", str(run))[1].split())
    run = tmp_path / "swarm"
    Chain(Store(run), random.Random(1)).grow(3)
    (run / CONFIG).write_text(tomli_w.dumps({**SWARM, "swarm": {"members": 4}}))
    (run / "commits/000002.json").write_text("{")
    problems = json.loads(typed("ledger", "verify", str(run), "--json")[1])["problems"]
    assert problems and {finding.problem for finding in check_run(run, "a") if finding.check == "damage"} == {*problems}
