"""The end of a run, and its last metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuswarm.train.recipe import State
from tpuswarm.train.run.listing import read_newest_evaluation, read_newest_updates


@dataclass(frozen=True)
class Result:
    """The end of `fit`."""

    run: Path
    state: State
    step: int
    steps: int
    metrics: dict[str, Any]
    """The last row of an update, with the metrics of the newest evaluation: eval_loss, …"""
    ended: str
    """finished or stopped."""
    message: str
    signal: int | None
    """The signal that stopped the run."""


def eval_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith("eval_")}


def last_row(folder: Path) -> dict[str, Any]:
    """Return the newest row of an update in a run's metrics, with the metrics of the newest evaluation."""
    return (read_newest_updates(folder) or [{}])[-1] | eval_metrics(read_newest_evaluation(folder))
