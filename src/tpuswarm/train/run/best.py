"""Track the best evaluation of a run, and find its checkpoint."""

import json
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.directory import writing
from tpuswarm.train.storage.folders import BEST, MANIFEST, best_of, shown

BEST_EVENT = "best"
ADVICE = "train with keep_best, --keep-best eval_loss"
MAX_SUFFIX = ":max"
_ROW = TypeAdapter(dict[str, int | float])


class Best:
    """The best value so far of one metric of the evaluations: the lowest eval_loss, the highest eval_accuracy:max."""

    def __init__(self, goal: str, run: Path | None = None):
        """run: start with the value of its best checkpoint."""
        self._name, self._sign = goal.removesuffix(MAX_SUFFIX), -1 if goal.endswith(MAX_SUFFIX) else 1
        self._value: float | None = None
        self.step: int | None = None
        self.previous_metric = ""
        """Set if the run has kept its best checkpoint by another metric until now."""
        self.is_lost = run is not None and (run / BEST).exists()
        """Whether the run has had a best checkpoint, and its file or the checkpoint is damaged."""
        if run is not None and best_step(run) is not None:
            with suppress(ValidationError):
                row = _ROW.validate_json((run / BEST).read_bytes())
                self.update(row)
                self.previous_metric = "" if self._name in row else next((name for name in row if name != "step"), "")
                self.is_lost = False

    def update(self, row: Mapping[str, Any], min_delta: float = 0.0) -> bool:
        """Return whether a row improves the best value by more than `min_delta`, and take over its value."""
        value = row.get(self._name)
        if (
            value is None
            or not self.has(row)
            or (self._value is not None and self._sign * (self._value - value) <= min_delta)
        ):
            return False
        self._value, self.step = value, row["step"]
        return True

    def has(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has a finite value; an evaluation in which no row counts has none."""
        value = row.get(self._name)
        return value is not None and math.isfinite(value)

    def require(self, names: Collection[str]) -> None:
        """Raise InputError unless the metric is one of these."""
        if self._name not in names:
            known = ", ".join(name for name in names if name.startswith("eval_") and not name.startswith("eval_rows"))
            if not known:
                raise InputError(f"{self._name} is a figure of evaluations, and there are none: give validation data")
            raise InputError(f"the evaluations have no {self._name}; they have {known}")

    @property
    def row(self) -> dict[str, Any]:
        return {"step": self.step, self._name: self._value}

    def __str__(self) -> str:
        return f"{self._name} {self._value:.6g}, the {'highest' if self._sign < 0 else 'lowest'} so far"


def write_best(run: Path, row: Mapping[str, Any]) -> None:
    """Record which checkpoint is the best; it must be complete already."""
    with writing(run / BEST):
        write_atomically(run / BEST, json.dumps(row))


def best_step(run: Path) -> int | None:
    """Return the step of the best checkpoint, if it is complete."""
    step = best_of(run)
    return int(step) if step and (run / "checkpoints" / step / MANIFEST).exists() else None


def best_checkpoint(run: Path) -> checkpoint.Saved:
    """Return the checkpoint of the best evaluation; InputError without one."""
    while True:
        step = best_of(run)
        found = checkpoint.inspect(run / "checkpoints" / step) if step else ADVICE
        if isinstance(found, checkpoint.Saved):
            return found
        if best_of(run) == step:  # no better one since
            raise InputError(f"{shown(run)} has no checkpoint of its best evaluation: {found}")
