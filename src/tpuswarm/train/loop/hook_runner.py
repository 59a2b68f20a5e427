"""Call the hooks of a run, and act on their results."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from tpuswarm.errors import InputError
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.diagnostics import Diagnostics
from tpuswarm.train.loop.evaluations import Evaluations
from tpuswarm.train.loop.hooks import Hooks, ScaleLearningRate, Step, Stop, merge_numbers
from tpuswarm.train.loop.progress import Progress
from tpuswarm.train.loop.result import eval_metrics
from tpuswarm.train.loop.run_config import LR_SCALE
from tpuswarm.train.recipe import EVALUATION_COLUMNS, RESERVED
from tpuswarm.train.run.directory import METRICS, read_rows
from tpuswarm.train.user_code import describe_failure


class HookRunner:
    """Calls hooks with the state that a `Progress` has reached."""

    def __init__(self, hooks: Hooks, progress: Progress, evaluations: Evaluations, diagnostics: Diagnostics):
        self.hooks, self._progress, self._evaluations = hooks, progress, evaluations
        self._stopwatch, self._session = diagnostics.stopwatch, progress.session
        self.stop_reason = ""
        """Why a hook has ended the run; empty if no hook has."""
        self._has_failed = False
        """Whether a hook of the newest call failed; its numbers are missing then."""
        if hooks.scale_learning_rate:
            self._require_scale()
        names = [*self._session.eval_names, *self._session.compiled.step.out_info[1]]  # type: ignore[attr-defined]
        evaluations.require_names(hooks, names)
        self._columns = {*RESERVED, *EVALUATION_COLUMNS, *names}

    def call(self, due: Sequence[int], evaluation: dict[str, Any] | None) -> list[Step]:
        """Call hooks; write their numbers into the row of an evaluation, if there is one, or into a row of their own.

        A failing hook is reported, and its numbers are missing.
        """
        self._has_failed = False
        with self._progress.pause_clock():
            results, numbers = self._call(due)
            written = self._write(evaluation, numbers)
            if evaluation:
                self._evaluations.finish(evaluation, is_complete=not self._has_failed)
            if results:
                self._act(list(results.values()))
        return written

    def _call(self, due: Sequence[int]) -> tuple[dict[int, Any], dict[str, Any]]:
        """Return the result of each hook, and all their numbers, which hooks that count evaluations see."""
        progress, results = self._progress, dict[int, Any]()
        row, numbers = progress.last_row | {"step": progress.step}, dict[str, Any]()
        with self._stopwatch.during(phases.USER):
            for index in due:
                if not self.hooks.counts_evaluations(index):
                    results[index] = self._call_one(index, row)
                    if ignored := self.hooks.ignored(index, results[index]):
                        progress.note_once(f"result of hook {index}", ignored)
                    with self._survive(index):
                        merge_numbers(numbers, results[index], self._columns)
                        progress.outputs.write_hook_result(progress.step, index, results[index])
        if due:
            found = numbers, self._has_failed
            numbers, self._has_failed = self._session.agreement.broadcast("writing the numbers of hooks", found)
        with self._stopwatch.during(phases.USER):
            for index in filter(self.hooks.counts_evaluations, due):
                results[index] = self._call_one(index, row | numbers)
        return results, numbers

    def _call_one(self, index: int, row: dict[str, Any]) -> Any:
        with self._survive(index):
            return self.hooks.call(index, row, self._progress.state)
        return None  # all hosts act on the same number of results

    @contextmanager
    def _survive(self, index: int) -> Iterator[None]:
        """Report the first error of a hook; training continues.

        Several hosts end: the others may wait in a collective of the hook.
        """
        try:
            yield
        except Exception as error:
            if jax.process_count() > 1:
                raise
            self._has_failed = True
            failure = describe_failure(f"a hook failed at step {self._progress.step}", error)
            self._progress.note_once(f"hook {index}", f"{failure}; training continues")

    def _write(self, evaluation: dict[str, Any] | None, numbers: dict[str, Any]) -> list[Step]:
        progress, rows = self._progress, [evaluation] if evaluation else []
        if evaluation:
            evaluation |= eval_metrics(numbers)
        written = eval_metrics(numbers) if self._session.validation else {}  # in the row of this step's evaluation
        own = {name: value for name, value in numbers.items() if name not in written}
        if own and not self._is_written(own):
            rows.append({"step": progress.step, "tokens": progress.tokens} | own)
        return [progress.write(row) for row in rows]

    def _is_written(self, own: Collection[str]) -> bool:
        """Return whether an earlier process wrote these numbers."""
        if self._progress.step > self._session.first_step:
            return False
        rows = read_rows(self._session.run.folder / METRICS)
        is_written = any(row["step"] == self._progress.step and row.keys() >= set(own) for row in rows)
        return self._session.agreement.broadcast("looking for numbers of hooks", is_written)

    def _act(self, results: list[Any]) -> None:
        agreement = self._session.agreement
        if not self.stop_reason:
            reasons = [str(result.reason) for result in results if isinstance(result, Stop)]
            self.stop_reason = agreement.broadcast("deciding whether a hook ends the run", "; ".join(reasons))
        factors = [float(result.factor) for result in results if isinstance(result, ScaleLearningRate)]
        factor = agreement.broadcast("multiplying the learning rate", math.prod(factors))
        if factor != 1:
            self._require_scale()
            self._session.lr_scale *= factor
            total = self._session.lr_scale
            message = f"the learning rate is multiplied by {factor:g}, in all by {total:g}"
            self._progress.outputs.announce(self._progress.step, LR_SCALE, message, total=total)

    def _require_scale(self) -> None:
        if not self._session.compiled.scales_learning_rate:
            raise InputError(
                f"a hook scales the learning rate, but {self._session.recipe.name} ignores the scale: its "
                "optimizer keeps parameters of its own, or its Program.step does not multiply by clock.lr_scale"
            )
