"""A run in a bucket, as its files lie there."""

from pathlib import Path

from tpuswarm.train.bucket.mirror import folder_of
from tpuswarm.train.run.directory import Run, read_rows

URL = "gs://bucket/runs/a"
CONFIG = {
    "recipe": {"name": "r", "target": "x:y", "options": {}},
    "train": {"steps": 10, "batch": 2, "seed": 0},
    "chosen": {"tokens_per_row": 1},
}


def begin(steps: int = 3) -> Run:
    run = Run(folder_of(URL))
    run.write_config(CONFIG)
    run.write_event("started")
    for step in range(1, steps + 1):
        run.write_metrics({"step": step, "tokens": 2 * step, "loss": 1.0 / step})
    return run


def save(folder: Path, step: int) -> None:
    """As a checkpoint lies there: its manifest last."""
    at = folder / "checkpoints" / f"{step:08}"
    at.mkdir(parents=True)
    (at / "arrays").write_bytes(b"arrays")
    (at / "manifest.json").write_text("{}")


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder / "metrics.jsonl")]
