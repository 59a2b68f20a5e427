"""Processes that die: the run goes on, and its metrics are bit for bit those of one that lived."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import finish, kill_after, rows_without_times, run, start, updates, wait_for
from tpuswarm.train.bucket.mirror import BEST
from tpuswarm.train.run.best import kept_best
from tpuswarm.train.run.directory import METRICS, read_rows
from tpuswarm.train.run.listing import status

STEPS = 120
SMALL = ["--layers", "1", "--heads", "2", "--width", "64"]
GPT2 = ["train", "gpt2-tiny", *SMALL, "--steps", str(STEPS), "--save-every", "10", "--eval-every", "40", "--seed", "3"]


@pytest.fixture(scope="module")
def words(text_file):
    return [*GPT2, "--data", str(text_file), "--run", "run"]


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory):
    """The metrics of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run(words, folder)
    rows = rows_without_times(folder / "run")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    return rows


def test_killed_again_and_again(words, whole, tmp_path):
    folder = tmp_path / "run"
    for rows in (1, 34, 71):
        kill_after(start(words, tmp_path), folder, rows, signal.SIGKILL)
        assert status(folder).state == "killed"
        with (folder / METRICS).open("a") as file:
            file.write('{"step": 119, "lo')  # the last line torn
    run(words, tmp_path)
    assert rows_without_times(folder) == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop(words, whole, tmp_path, number):
    folder = tmp_path / "run"
    process = start(words, tmp_path)
    first = folder / "checkpoints" / "00000000" / "manifest.json"
    wait_for(first.exists, process)  # what a save takes is known from then on
    out, err = kill_after(process, folder, 15, number)
    assert process.returncode == 128 + number, err
    stopped = updates(folder)
    assert f"saved at step {stopped}" in out and "Traceback" not in err
    assert status(folder).state == "stopped"
    _, err = run(words, tmp_path)
    assert f"resumed from the checkpoint of step {stopped}" in err
    assert rows_without_times(folder) == whole


def test_a_notice_too_short_for_a_save_leaves_the_last_checkpoint(words, whole, tmp_path):
    folder = tmp_path / "run"
    process = start([*words, "--grace", "0s"], tmp_path)
    wait_for(lambda: (folder / "checkpoints" / "00000010" / "manifest.json").exists(), process)
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process, 128 + signal.SIGTERM)
    done = updates(folder)
    kept = max(int(path.parent.name) for path in (folder / "checkpoints").glob("*/manifest.json"))
    if done > kept:
        assert "more than the 0.0 s left" in out and f"checkpoint of step {kept} is safe" in out
    _, err = run(words, tmp_path)
    assert f"resumed from the checkpoint of step {kept}" in err
    assert rows_without_times(folder) == whole


def test_the_running_process_is_named_and_left_alone(words, whole, tmp_path):
    first = start(words, tmp_path)
    wait_for(lambda: updates(tmp_path / "run") > 0, first)
    first.send_signal(signal.SIGSTOP)  # alive, and not about to finish
    try:
        _, err = run(words, tmp_path, code=2)
        assert f"run is in use by process {first.pid}" in err and len(err.strip().splitlines()) == 1
        out, _ = run(["status", "run", "--json"], tmp_path)
        assert json.loads(out)["state"] == "running" and json.loads(out)["pid"] == first.pid
    finally:
        first.send_signal(signal.SIGCONT)
    finish(first)
    assert rows_without_times(tmp_path / "run") == whole


DRIVER = """
import os, shutil, signal, sys, time
from pathlib import Path
import tpuswarm.train.run.best as best
import tpuswarm.train.run.checkpoint as checkpoint
import tpuswarm.train.run.directory as run
from tests.train import toy
from tpuswarm import Trainer

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def before(module, name, count):
    real, seen = getattr(module, name), [0]
    def wrapped(*args, **kwargs):
        seen[0] += 1
        if seen[0] == count:
            die()
        return real(*args, **kwargs)
    setattr(module, name, wrapped)

def plant(point):
    if point == "before the first checkpoint":
        before(checkpoint.Checkpoints, "save", 1)
    elif point == "before a save":
        before(checkpoint.Checkpoints, "save", 3)
    elif point == "files written, not yet digested":
        before(checkpoint, "_digest", 1)
    elif point == "digested, no manifest":
        before(checkpoint, "sync", 20)
    elif point == "manifest written under its other name":
        before(Path, "replace", 4)  # the configuration and two manifests come first
    elif point == "manifest there, old ones not removed":
        before(checkpoint.Checkpoints, "_prune", 3)
    elif point == "half of the old one removed":
        real = shutil.rmtree
        def half(path, *args, **kwargs):
            if path.exists():
                next(file for file in sorted(path.rglob("*")) if file.is_file()).unlink()
                die()
            real(path, *args, **kwargs)
        checkpoint.shutil.rmtree = half
    elif point == "half a line of metrics written":
        real_write = run.Run.write_metrics
        def torn(self, row):
            real_write(self, row)
            if row["step"] == 17:
                os.truncate(self.folder / "metrics.jsonl", os.path.getsize(self.folder / "metrics.jsonl") - 9)
                die()
        run.Run.write_metrics = torn
    elif point == "finished but not said":
        before(run.Run, "write_event", 2)
    elif point == "the next best one half written":
        real_digest = checkpoint._digest
        def late(path):
            if "00000014" in path.parts:
                time.sleep(1)  # the run goes on meanwhile
                die()
            return real_digest(path)
        checkpoint._digest = late
    elif point == "the best one whole but not named":
        before(best, "write_atomically", 1)

for line in sys.stdin:
    point, folder, keep_best = line.rstrip().split("|")
    child = os.fork()
    if child == 0:
        plant(point)
        trainer = Trainer(devices=1, save_every=5, eval_every=7, keep=2, keep_best=keep_best or None)
        trainer.fit(toy.recipe(), steps=20, batch=8, run=folder)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

POINTS = [
    "before the first checkpoint",
    "before a save",
    "files written, not yet digested",
    "digested, no manifest",
    "manifest written under its other name",
    "manifest there, old ones not removed",
    "half of the old one removed",
    "half a line of metrics written",
    "finished but not said",
]


@pytest.fixture(scope="module")
def driven():
    """Trains in a process that dies at a point; its exit code. Each is a fork of one that has imported JAX."""
    process = start([], Path.cwd(), [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE)

    def drive(point: str, folder: Path, keep_best: str = "") -> int:
        process.stdin.write(f"{point}|{folder}|{keep_best}\n")
        process.stdin.flush()
        return int(process.stdout.readline() or finish(process)[1])

    yield drive
    finish(process)


@pytest.fixture(scope="module")
def whole_toy(driven, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "run"
    assert driven("nowhere", folder) == 0
    return rows_without_times(folder)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point_of_a_save(driven, whole_toy, tmp_path, point):
    folder = tmp_path / "run"
    assert driven(point, folder) == -signal.SIGKILL
    assert status(folder).state == "killed"
    assert driven("nowhere", folder) == 0
    assert rows_without_times(folder) == whole_toy
    assert status(folder).state == "finished"


@pytest.mark.parametrize(
    ("point", "goal", "expected"),
    [("the next best one half written", "eval_loss", 20), ("the best one whole but not named", "eval_worst:max", 7)],
)
def test_killed_while_the_best_one_is_kept(driven, whole_toy, tmp_path, point, goal, expected):
    folder = tmp_path / "run"
    assert driven(point, folder, goal) == -signal.SIGKILL
    if (folder / BEST).exists():
        assert kept_best(folder).step == 7, "what it names is whole"
    assert driven("nowhere", folder, goal) == 0
    assert rows_without_times(folder) == whole_toy
    assert kept_best(folder).step == expected


@pytest.mark.slow
def test_killed_at_random_moments(words, whole, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # printed with a failure
    moments, folder = random.Random(seed), tmp_path / "run"
    for _ in range(6):
        process = start(words, tmp_path)
        begun = list(read_rows(folder / METRICS)) if folder.exists() else []
        rows = min(STEPS - 2, max(1, len([row for row in begun if "loss" in row]) + moments.randrange(-8, 40)))
        if updates(folder) >= STEPS:
            process.communicate(timeout=240)
            break
        kill_after(
            process, folder, rows, moments.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        )
    run(words, tmp_path)
    assert rows_without_times(folder) == whole
