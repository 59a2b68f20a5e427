"""The end of a run as `fit` gives it, and the rows that say how it went."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuswarm.train.recipe import State
from tpuswarm.train.run.listing import newest_evaluation, newest_steps


@dataclass(frozen=True)
class Result:
    """The end of `fit`."""

    run: Path
    state: State
    step: int
    steps: int
    metrics: dict[str, Any]
    """The last row of an update, with the figures of the newest evaluation: eval_loss, …"""
    ended: str
    """finished or stopped."""
    message: str
    signal: int | None
    """The signal that stopped it."""


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an evaluation's row."""
    return {name: value for name, value in row.items() if name.startswith("eval_")}


def last_row(folder: Path) -> dict[str, Any]:
    """The newest row of an update in a run's metrics, with the figures of the newest evaluation."""
    return (newest_steps(folder) or [{}])[-1] | figures(newest_evaluation(folder))
