"""Evaluate during a run, and keep the best checkpoint."""

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from tpuswarm.config.units import Interval, parse_every
from tpuswarm.errors import InputError, TpuswarmError, message_of
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.diagnostics import Diagnostics
from tpuswarm.train.loop.evaluate import EVAL_BATCHES, evaluate
from tpuswarm.train.loop.hooks import Hooks
from tpuswarm.train.loop.progress import Progress
from tpuswarm.train.loop.result import eval_metrics
from tpuswarm.train.loop.saver import Saver
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run import best
from tpuswarm.train.run.best import Best
from tpuswarm.train.run.directory import METRICS, read_rows
from tpuswarm.train.user_code import blame


class Evaluations:
    """Evaluates the state that a `Progress` has reached, and keeps the best checkpoint."""

    def __init__(self, progress: Progress, saver: Saver, diagnostics: Diagnostics, max_batches: int = EVAL_BATCHES):
        self._progress, self._saver, self._max_batches = progress, saver, max_batches
        self._stopwatch, self._session = diagnostics.stopwatch, progress.session
        settings = self._session.settings
        every, goal = settings["eval_every"], settings["keep_best"]
        self._interval = Interval() if every is None else parse_every(every, "eval_every")
        self._last_time = time.monotonic()
        self._best = Best(goal, self._session.run.folder) if goal else None
        if self._best and self._best.previous_metric:
            self._session.notes.append(
                f"the best checkpoint was kept by {self._best.previous_metric}; from here on it is by {goal}, and the "
                "next evaluation replaces it"
            )
        if self._best and self._best.is_lost:
            self._session.notes.append(
                "best.json or its checkpoint is damaged: only evaluations from here on count for it"
            )

    def require_names(self, hooks: Hooks, names: list[str]) -> None:
        """Raise InputError if hooks or `keep_best` need a metric that no evaluation will have."""
        if self._session.validation is not None and hooks.can_add_metrics:
            return  # only the first evaluation shows the names
        hooks.require_metrics(names)
        if self._best:
            self._best.require(self._session.eval_names)

    def is_due(self) -> bool:
        elapsed_s = time.monotonic() - self._last_time
        return self._session.validation is not None and self._interval.due(self._progress.step, elapsed_s)

    def is_missing(self) -> bool:
        """Return whether this step has no evaluation yet; use the evaluation of an earlier process."""
        if self._session.validation is None:
            return False
        rows = read_rows(self._session.run.folder / METRICS)
        newest = [row for row in rows if row["step"] == self._progress.step and "eval_loss" in row][-1:]
        newest = self._session.agreement.broadcast("evaluating", newest)
        for row in newest:
            self._count(row)
        return not newest

    def was_missed(self) -> bool:
        """Return whether the process before this one saved this step and ended before its evaluation."""
        is_inside = 0 < self._progress.step < self._session.steps
        return is_inside and self.is_missing() and self._interval.due(self._progress.step, 0.0)

    def measure(self) -> dict[str, Any] | None:
        """Evaluate; return the row without writing it, or None if the run is asked to stop meanwhile."""
        progress, session = self._progress, self._session
        assert session.validation is not None
        with progress.pause_clock(), self._stopwatch.during(phases.EVALUATION):
            with waiting("evaluating") as show_progress:
                found = evaluate(
                    session.compiled, progress.state, *session.validation, self._max_batches,
                    should_leave=session.agreement.should_stop, show_progress=show_progress,
                    should_leave_feed=session.agreement.should_leave_feed,
                )  # fmt: skip
            if found is None:
                return None
            values, rows = found
            if not math.isfinite(values.get("loss", 0.0)):
                raise self._saver.failure(progress.step, f"held-out loss {values['loss']}")
            self._write_picture()
        self._last_time = time.monotonic()
        row: dict[str, Any] = {"step": progress.step, "tokens": progress.tokens, "eval_rows": rows}
        if rows < (total := session.validation.source.rows_per_epoch):
            row["eval_rows_total"] = total
        row |= dict.fromkeys(session.eval_names)
        row |= {f"eval_{name}": value for name, value in values.items() if math.isfinite(value)}
        for name in eval_metrics(progress.last_row):
            del progress.last_row[name]
        progress.last_row |= eval_metrics(row)
        return row

    def finish(self, row: Mapping[str, Any], is_complete: bool) -> None:
        """Count a written row, which may be the best one; is_complete: no hook failed.

        Raise InputError if a complete row lacks the metric of `keep_best`.
        """
        self._progress.note_missing(row)
        self._count(row)
        if self._best and is_complete:
            try:
                self._best.require(row)
            except InputError:
                self._session.remove_setting("keep_best")  # else the same command without it would fail again
                raise

    def report_missing_best(self) -> None:
        """Report if no evaluation had the metric of `keep_best`."""
        if self._best and self._best.step is None:
            goal = self._session.settings["keep_best"]
            self._progress.note_once("best", f"no evaluation had a value of {goal}: there is no best checkpoint")

    def _write_picture(self) -> None:
        recipe = self._session.recipe
        if jax.process_count() == 1:
            try:
                with blame(f"{recipe.name}.pictured failed", every_error=True):
                    self._progress.outputs.write_picture(self._progress.step, recipe.pictured(self._progress.state))
            except TpuswarmError as error:
                self._progress.note_once("pictured", f"{message_of(error)}; training continues")

    def _count(self, row: Mapping[str, Any]) -> None:
        progress = self._progress
        progress.last_row |= eval_metrics(row)
        if self._best and self._best.update(row):
            self._saver.save(wait=False)
            progress.event(best.BEST_EVENT, str(self._best))
            write = partial(best.write_best, self._session.run.folder, self._best.row)
            self._saver.checkpoints.pin(progress.step, write)
