"""A run that lives in a bucket."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tpuswarm.train.bucket.mirror import ROWS, folder_of
from tpuswarm.train.run.directory import Run, read_rows

URL = "gs://bucket/runs/a"
CONFIG = {
    "recipe": {"name": "r", "target": "x:y", "options": {}},
    "train": {"steps": 10, "batch": 2, "seed": 0},
    "chosen": {"tokens_per_row": 1},
}
TIMEOUT_S = 120
Found = TypeVar("Found")


def start_run(steps: int = 3) -> Run:
    run = Run(folder_of(URL))
    run.write_config(CONFIG)
    run.write_event("started")
    for step in range(1, steps + 1):
        run.write_metrics({"step": step, "tokens": 2 * step, "loss": 1.0 / step})
    return run


def read_steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder / ROWS)]


def wait_until(condition: Callable[[], Found]) -> Found:
    """Wait for a true value and return it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
