"""Call the hooks of a run, and act on what they return."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.diagnostics import Diagnostics
from tpuswarm.train.loop.evaluations import Evaluations
from tpuswarm.train.loop.hooks import Hooks, ScaleLearningRate, Step, Stop, add_numbers
from tpuswarm.train.loop.progress import Progress
from tpuswarm.train.loop.recorded import LR_SCALE
from tpuswarm.train.loop.result import figures
from tpuswarm.train.losses import RESERVED
from tpuswarm.train.run.directory import METRICS, read_rows


class HookCalls:
    """Calls hooks with the state that a `Progress` has reached."""

    def __init__(self, hooks: Hooks, progress: Progress, evaluations: Evaluations, diagnostics: Diagnostics):
        self.hooks, self._progress, self._evaluations, self._diagnostics = hooks, progress, evaluations, diagnostics
        self._session = session = progress.session
        self.stop_reason = ""
        """Why a hook has ended the run; empty if none has."""
        if hooks.scale_learning_rate:
            self._require_scale()
        names = [*session.measured, *session.compiled.step.out_info[1]]  # type: ignore[attr-defined]
        evaluations.require_names(hooks, names)
        self._columns = {*RESERVED, "eval_rows", "eval_rows_total", *names}

    def call(self, due: Sequence[int], evaluation: dict[str, Any] | None) -> list[Step]:
        """Call hooks; write their numbers in the row of an evaluation, if there is one, or in a row of their own.

        If a hook fails, the evaluation is not written: the process that resumes makes it again.
        """
        with self._progress.pause_clock():
            returned, numbers = self._call(due)
            written = self._write(evaluation, numbers)
            if evaluation:
                self._evaluations.finish(evaluation)
            if returned:
                self._act(list(returned.values()))
        return written

    def _call(self, due: Sequence[int]) -> tuple[dict[int, Any], dict[str, Any]]:
        """Return what each hook returned, and all their numbers; those that count evaluations are called last."""
        progress, returned = self._progress, dict[int, Any]()
        row, numbers = progress.last_row | {"step": progress.step}, dict[str, Any]()
        with self._diagnostics.stopwatch.during(phases.USER):
            for index in due:
                if not self.hooks.counts(index):
                    returned[index] = self.hooks.call(index, row, progress.state)
                    add_numbers(numbers, returned[index], self._columns)
                    progress.outputs.returned(progress.step, index, returned[index])
        if due:
            numbers = self._session.agreement.broadcast("writing the numbers of hooks", numbers)
        with self._diagnostics.stopwatch.during(phases.USER):
            for index in filter(self.hooks.counts, due):
                returned[index] = self.hooks.call(index, row | numbers, progress.state)
        return returned, numbers

    def _write(self, evaluation: dict[str, Any] | None, numbers: dict[str, Any]) -> list[Step]:
        progress, rows = self._progress, [evaluation] if evaluation else []
        if evaluation:
            evaluation |= figures(numbers)
        in_written_row = figures(numbers) if self._session.validation else {}  # that of the evaluation of this step
        own = {name: value for name, value in numbers.items() if name not in in_written_row}
        if own and not self._is_written(own):
            rows.append({"step": progress.step, "tokens": progress.tokens} | own)
        return [progress.write(row) for row in rows]

    def _is_written(self, own: Collection[str]) -> bool:
        """Whether an earlier process, which ended at the end of the run, wrote these numbers for this step."""
        if self._progress.step > self._session.first_step:
            return False
        rows = read_rows(self._session.run.folder / METRICS)
        found = any(row["step"] == self._progress.step and row.keys() >= set(own) for row in rows)
        return self._session.agreement.broadcast("looking for numbers of hooks", found)

    def _act(self, returned: list[Any]) -> None:
        """Stop the run or scale the learning rate, if a hook returned that."""
        agreement = self._session.agreement
        if not self.stop_reason:
            reasons = [str(found.reason) for found in returned if isinstance(found, Stop)]
            self.stop_reason = agreement.broadcast("deciding whether a hook ends the run", "; ".join(reasons))
        factors = [float(found.factor) for found in returned if isinstance(found, ScaleLearningRate)]
        factor = agreement.broadcast("multiplying the learning rate", math.prod(factors))
        if factor != 1:
            self._require_scale()
            self._session.lr_scale *= factor
            total = self._session.lr_scale
            message = f"the learning rate is multiplied by {factor:g}, in all by {total:g}"
            self._progress.outputs.tell(self._progress.step, LR_SCALE, message, total=total)

    def _require_scale(self) -> None:
        """Raise InputError for a program whose steps ignore the scale of the learning rate."""
        if not self._session.compiled.scales_learning_rate:
            raise InputError(
                f"a hook scales the learning rate, but {self._session.recipe.name} ignores the scale: its "
                "optimizer keeps parameters of its own, or its Program.step does not multiply by clock.lr_scale"
            )
