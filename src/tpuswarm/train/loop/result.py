"""The end of a run as `fit` gives it, and the rows that say how it went."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuswarm.train.bucket.mirror import shown
from tpuswarm.train.look.display import Display
from tpuswarm.train.loop.session import Finished
from tpuswarm.train.recipe import State
from tpuswarm.train.run.directory import METRICS, read_rows


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


def ended_before(session: Finished, display: Display) -> Result:
    """The end of a run in which nothing is left to do, as it was the first time."""
    run = session.run.folder
    with session.agreement:
        display.note(f"{shown(run)} is finished; nothing left to do")
        return Result(run, session.state, session.step, session.steps, last_row(run), "finished", session.message, None)


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an evaluation's row."""
    return {name: value for name, value in row.items() if name.startswith("eval_")}


def last_row(folder: Path) -> dict[str, Any]:
    """The newest row of an update in a run's metrics, with the figures of the newest evaluation."""
    update: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for row in read_rows(folder / METRICS):
        update = row if "loss" in row else update
        evaluation |= figures(row)
    return update | evaluation
