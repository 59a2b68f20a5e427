"""The best evaluation of a run: which it is, and its checkpoint, which is kept."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.directory import writing
from tpuswarm.train.storage.folders import BEST, MANIFEST, best_of, shown

BEST_EVENT = "best"
HIGHEST = ":max"
"""Ends the name of a figure of which the highest is best."""


class Best:
    """The best value so far of one figure of the evaluations, `eval_loss` or, the highest, `eval_accuracy:max`."""

    def __init__(self, goal: str, run: Path | None = None):
        """run: whose best checkpoint, where it has kept one, is the one to be better than."""
        self._name, self._sign = goal.removesuffix(HIGHEST), -1 if goal.endswith(HIGHEST) else 1
        self._value: float | None = None
        self.step: int | None = None
        """Of the best evaluation."""
        self.instead_of = ""
        """Another figure by which the run has kept its best checkpoint until now."""
        if run is not None and best_step(run) is not None:
            row = json.loads((run / BEST).read_text(encoding="utf-8"))
            self.better(row)
            self.instead_of = "" if self._name in row else next((name for name in row if name != "step"), "")

    def better(self, row: Mapping[str, Any], least: float = 0.0) -> bool:
        """Whether a row has the figure, and it is better than in all before it, by more than `least`."""
        value = row.get(self._name)
        if value is None or (self._value is not None and self._sign * (self._value - value) <= least):
            return False
        self._value, self.step = value, row["step"]
        return True

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has a value of the figure: one of which no row counts has none."""
        return row.get(self._name) is not None

    def require(self, names: Collection[str]) -> None:
        """Raise InputError where the figure is not among these."""
        if self._name not in names:
            known = ", ".join(name for name in names if name.startswith("eval_") and not name.startswith("eval_rows"))
            if not known:
                raise InputError(f"{self._name} is a figure of evaluations, and there are none: give validation data")
            raise InputError(f"the evaluations have no {self._name}; they have {known}")

    @property
    def row(self) -> dict[str, Any]:
        """The step and the figure of the best evaluation."""
        return {"step": self.step, self._name: self._value}

    def __str__(self) -> str:
        return f"{self._name} {self._value:.6g}, the {'highest' if self._sign < 0 else 'lowest'} so far"


def write_best(run: Path, row: Mapping[str, Any]) -> None:
    """Say in the run's folder which checkpoint is its best; it has to be whole."""
    with writing(run / BEST):
        write_atomically(run / BEST, json.dumps(row))


def best_step(run: Path) -> int | None:
    """The step of the best checkpoint, where one is kept."""
    step = best_of(run)
    return int(step) if step and (run / "checkpoints" / step / MANIFEST).exists() else None


def best_checkpoint(run: Path) -> checkpoint.Saved:
    """The checkpoint of the best evaluation of a run that keeps it; InputError where there is none."""
    step = best_of(run)
    found = checkpoint.inspect(run / "checkpoints" / step) if step else "train with keep_best, --keep-best eval_loss"
    if isinstance(found, checkpoint.Saved):
        return found
    raise InputError(f"{shown(run)} has no checkpoint of its best evaluation: {found}")
