"""A program that trains and is killed at one point: `die_at.py POINT FOLDER [GOAL OF THE BEST]`."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.train import toy
from tpuswarm import Trainer
from tpuswarm.train.run import best, checkpoint_writer, directory


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before(owner: Any, name: str, call: int) -> None:
    """Die before the given call of a function."""
    real, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            die()
        return real(*args, **kwargs)

    setattr(owner, name, counted)


def die_in_removal() -> None:
    real = shutil.rmtree

    def remove_one_file(path, *args, **kwargs):
        if path.exists():
            next(file for file in sorted(path.rglob("*")) if file.is_file()).unlink()
            die()
        real(path, *args, **kwargs)

    checkpoint_writer.shutil.rmtree = remove_one_file


def die_in_a_line_of_metrics() -> None:
    real = directory.Run.write_metrics

    def write_half(run, row):
        if row["step"] == 17:  # readers never see the whole line
            with (run.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row, default=float)[:-9])
            die()
        real(run, row)

    directory.Run.write_metrics = write_half


def die_in_digest_of_step_14() -> None:
    real = checkpoint_writer.file_digest

    def digest(path):
        if "00000014" in path.parts:
            time.sleep(1)  # the run continues
            die()
        return real(path)

    checkpoint_writer.file_digest = digest


POINTS = {
    "before the first checkpoint": lambda: die_before(checkpoint_writer.Checkpoints, "save", 1),
    "before a save": lambda: die_before(checkpoint_writer.Checkpoints, "save", 3),
    "files written, no digests": lambda: die_before(checkpoint_writer, "file_digest", 1),
    "digests, no manifest": lambda: die_before(checkpoint_writer, "fsync_path", 20),
    "manifest not renamed yet": lambda: die_before(Path, "replace", 4),  # after the configuration and two manifests
    "manifest there, old ones not removed": lambda: die_before(checkpoint_writer.Checkpoints, "_prune", 3),
    "half of the old one removed": die_in_removal,
    "half a line of metrics written": die_in_a_line_of_metrics,
    "finished, event not written": lambda: die_before(directory.Run, "write_event", 2),
}
POINTS_OF_BEST = {
    "next best half written": die_in_digest_of_step_14,
    "best not named": lambda: die_before(best, "write_atomically", 1),
}

if __name__ == "__main__":
    point, folder, *goal = sys.argv[1:]
    {**POINTS, **POINTS_OF_BEST, "nowhere": lambda: None}[point]()
    trainer = Trainer(devices=1, save_every=5, eval_every=7, keep=2, keep_best=goal[0] if goal else None)
    trainer.fit(toy.recipe(), steps=20, batch=8, run=folder)
