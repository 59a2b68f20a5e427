"""The end of a swarm's run, and the same command after it; without a cluster, members or training."""

import json
import shutil
from pathlib import Path
from random import Random

import pytest

from tests.swarm.chains import Run as Chain
from tpuswarm.swarm.storage.founding import FOUNDING
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision import needs, start
from tpuswarm.swarm.supervision.supervisor import RunEnd
from tpuswarm.swarm.views.events import commit_event
from tpuswarm.train.run.directory import append_event, append_rows, read_rows

pytestmark = pytest.mark.slow

TRAIN = "train gpt2-tiny --data fake --layers 1 --width 16 --heads 1 --context 8 --batch 2 --run a --members 2"
RUN = Path("a")


class Cluster:
    join_address, dashboard = "", None

    def __init__(self, *arguments, is_open):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Supervisor:
    """Adds commits and rows; the rows of the second member come last."""

    view = None

    def __init__(self, run, *rest):
        assert not (RUN / "report.html").exists(), "an earlier report"

    def run_to_end(self):
        if not (RUN / FOUNDING).exists():
            self.view = Chain(Store(RUN), Random(3)).grow(9).view
            (RUN / FOUNDING).write_text('{"fragments": [[["w", [1]]]], "chosen": {}}')
        for member, loss in (("m0", 2.5), ("m1", 9.5)):
            rows = [{"step": 1, "tokens": 16, "loss": loss, "member": member, "version": 1}]
            if member == "m0":
                rows.append({"step": 1, "tokens": 16, "eval_loss": 2.25, "eval_rows": 4, "member": "m0", "version": 9})
            for path in (RUN / "metrics.jsonl", RUN / "members" / member / "metrics.jsonl"):
                append_rows(path, rows)
        return RunEnd("finished", "finished: 4 steps", None)


@pytest.fixture
def call(typed, monkeypatch, tmp_path):
    """Run `tpuswarm train` in this process, in an empty directory; (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "Cluster", Cluster)
    monkeypatch.setattr(start, "Supervisor", Supervisor)
    monkeypatch.setattr(start, "MAX_SAMPLED_BYTES", 0)  # its commits fit no recipe
    return lambda options: typed(*TRAIN.split(), *options.split())


def events():
    return [event["event"] for event in read_rows(RUN / "events.jsonl")]


def test_same_command_after_the_end_repeats_the_result_and_changes_nothing(call, monkeypatch):
    code, out, _ = call("--steps 4 --json")
    first = json.loads(out)
    assert code == 0 and (first["ended"], first["version"]) == ("finished", 9)
    assert (first["metrics"]["loss"], first["metrics"]["eval_loss"]) == (2.5, 2.25)
    assert (RUN / "report.html").exists() and events() == ["started", "finished"]
    assert list(read_rows(RUN / "events.jsonl"))[-1]["message"] == "4 steps"  # `finished: 4 steps`, with its event

    files = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"}

    def full(*needs):
        raise AssertionError("checked memory although nothing will start")

    monkeypatch.setattr(needs, "check_memory", full)
    for options in ("--steps 4", "--steps 4 --members 300", "--steps 2 --accept-code"):
        code, out, err = call(f"{options} --json")
        assert (code, json.loads(out)) == (0, first) and "is finished; nothing left to do" in err
    for options, words in (
        ("--steps 4 --outer nesterof", "outer is average or nesterov, not 'nesterof'"),
        ("--steps 2", "steps was 4, now 2"),
        ("--steps 4 --batch 4 --accept-code", "is a different run: batch"),
    ):
        code, out, err = call(options)
        assert (code, out) == (2, "") and words in err
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"} == files


def test_longer_run_is_not_finished(call):
    call("--steps 4")
    code, _, err = call("--steps 1000 --accept-code")
    assert code == 0 and "steps was 4, now 1000" in err
    assert events() == ["started", "finished", "note", "started", "finished"]


def test_same_command_writes_a_report_that_failed(call):
    part = RUN / "report.html.part"
    RUN.mkdir()
    (RUN / "lock").touch()
    part.symlink_to("/dev/full")
    code, out, err = call("--steps 4")
    assert (code, out) == (1, "") and "report.html could not be written: the disk is full" in err
    assert "start the same command again" in err and not (RUN / "report.html").exists()
    code, out, _ = call("--steps 4")
    assert code == 0 and "training loss 2.500, held-out loss 2.250; a/report.html" in out
    assert (RUN / "report.html").read_text().endswith("</html>\n") and events().count("started") == 1


@pytest.mark.parametrize("lost", ["commits", "commits/000009.json", "headers", "config.toml", "founding.json"])
def test_run_without_its_essential_files_is_refused(call, lost):
    call("--steps 4")
    append_event(RUN, "commit", **commit_event(Ledger(Store(RUN)).record(9)))
    path = RUN / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"}
    code, out, err = call("--steps 4")
    assert (code, out) == (2, "") and "restore a copy of it, or " in err
    assert ("--init-from" in err) == (lost in ("commits/000009.json", "headers"))
    assert lost in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"} == before


@pytest.mark.parametrize("folder", ["commits", "headers", "objects"])
def test_folder_that_cannot_be_written_is_named_before_anything_starts(call, monkeypatch, folder):
    call("--steps 4")
    touch = Path.touch

    def touch_or_fail(path, *rest, **named):
        if path.parent.name == folder:
            raise PermissionError(13, "Permission denied", str(path))
        touch(path, *rest, **named)

    monkeypatch.setattr(Path, "touch", touch_or_fail)
    monkeypatch.setattr(start, "Cluster", None)
    code, out, err = call("--steps 1000 --accept-code")
    assert (code, out) == (1, "") and f"error: {folder}/" in err and "could not be written: [Errno 13]" in err


def test_damaged_founding_is_named_before_anything_starts(call, monkeypatch):
    call("--steps 4")
    (RUN / FOUNDING).write_text('{"fragments": [')
    monkeypatch.setattr(start, "Cluster", None)
    code, out, err = call("--steps 4")
    assert (code, out) == (1, "") and "founding.json in a is damaged" in err and "restore a copy" in err


def test_swarm_killed_while_founding_continues_with_its_first_version(call):
    call("--steps 4")
    saved = {path: path.read_bytes() for path in (RUN / "config.toml", RUN / "commits" / "000000.json")}
    for path in [RUN / "founding.json", RUN / "metrics.jsonl", *sorted(RUN.glob("commits/*"))[1:]]:
        path.unlink()
    for name in ("headers", "payloads"):
        shutil.rmtree(RUN / name)
    code, _, err = call("--steps 5")
    assert code == 2 and "steps was 4, now 5" in err
    code, out, _ = call("--steps 4")
    assert {path: path.read_bytes() for path in saved} == saved  # another run's name would fit no record
    assert code == 0 and "finished" in out and events() == ["started", "finished"] * 2
