"""The loop over the steps of a run: one process's work, alone or as one of several hosts."""

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from signal import Signals
from typing import Any

import jax
from jax.profiler import StepTraceAnnotation

from tpuswarm.config.shown import unit
from tpuswarm.config.units import Interval, parse_every
from tpuswarm.errors import InputError, RunFailed, TpuswarmError, first_line
from tpuswarm.train.data.feed import Feed
from tpuswarm.train.diagnose import times
from tpuswarm.train.diagnose.watch import Watch
from tpuswarm.train.look.describe import memory_sentence, parameter_rows
from tpuswarm.train.look.display import Display, Opening
from tpuswarm.train.look.outputs import Logger, Outputs
from tpuswarm.train.look.profile import TRACE, Profiler
from tpuswarm.train.loop.evaluate import EVAL_BATCHES, evaluate
from tpuswarm.train.loop.finite import diverged, not_finite
from tpuswarm.train.loop.hooks import (
    Hooks,
    ScaleLearningRate,
    Step,
    Stop,
    add_numbers,
    copy_containers,
    require_unchanged,
)
from tpuswarm.train.loop.recorded import LR_SCALE
from tpuswarm.train.loop.result import Result, figures, last_row
from tpuswarm.train.loop.session import Session
from tpuswarm.train.losses import COUNTS, RESERVED
from tpuswarm.train.optional import ShowsPicture, sampled
from tpuswarm.train.process.stop import Interrupted, StopDecision, decide_stop, last_words
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.program.mesh import batch_sharding
from tpuswarm.train.recipe import Metrics
from tpuswarm.train.run import best
from tpuswarm.train.run.best import Best
from tpuswarm.train.run.checkpoint import Checkpoints
from tpuswarm.train.run.directory import METRICS, SAMPLE, command_line, read_rows, writing
from tpuswarm.train.run.life import stopped_sentence
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import blame

ASKED = {Signals.SIGINT: "interrupted", Signals.SIGTERM: "SIGTERM", Signals.SIGHUP: "its terminal closed"}
"""Who asked a run to stop, as its end says it."""
UNCOUNTED = "no row counts in {} (its weights are all 0), which {}; more of these are not reported"


class Loop:
    """One process's work on one run."""

    def __init__(
        self,
        session: Session,
        watch: Watch,
        display: Display,
        *,
        hooks: Hooks,
        profile: bool,
        wandb: str | None,
        loggers: Callable[[], list[Logger]] = list,
        eval_batches: int = EVAL_BATCHES,
    ):
        self._session, self._watch, self._display, self._agreement = session, watch, display, session.agreement
        self._wandb, self._loggers, self._eval_batches = wandb, loggers, eval_batches
        self._enough = ""
        """Why a hook ended the run."""
        self._noted: set[str] = set()
        """The kinds of notes that are written once."""
        every = session.settings["eval_every"]
        self._eval_every = Interval() if every is None else parse_every(every, "eval_every")
        self._save_every, self._hooks = parse_every(session.settings["save_every"], "save_every"), hooks
        writes, keep = session.run.writes, session.settings["keep"]
        self._checkpoints = Checkpoints(session.run.checkpoints, keep, session.save_seconds, writes)
        self._outputs = Outputs(session.run, self._display, session.first_step)
        self._profiler = Profiler(session.run, session.first_step, session.steps, profile)
        goal = session.settings["keep_best"]
        self._best = Best(goal, session.run.folder) if goal else None
        if self._best and self._best.instead_of:
            session.notes.append(
                f"the best checkpoint was kept by {self._best.instead_of}; from here on it is by {goal}, and the next "
                "evaluation replaces it"
            )
        if hooks.scale_learning_rate:
            self._require_scale()
        named = [*session.measured, *session.compiled.step.out_info[1]]  # type: ignore[attr-defined]
        self._names = {*RESERVED, "eval_rows", "eval_rows_total", *named}
        """Names in rows that a hook's numbers must not have."""
        if session.validation is None or not hooks.can_add_metrics:
            hooks.require(named)
            if self._best:
                self._best.require(session.measured)
        self._checkpoints.pinned = best.kept_step(session.run.folder)
        self._state = session.state
        session.state = None  # its buffers are donated to the first step
        self._done = self._saved = session.first_step
        self._pending: tuple[int, Metrics] | None = None
        self._last: dict[str, Any] = {}
        self._began = self._read_at = self._saved_at = self._evaluated_at = time.monotonic()
        self._waited = 0.0

    def run(self) -> Generator[Step, None, Result]:
        """All steps, from the opening to the result; within the agreement of its hosts."""
        self._agreement.tell(self._slow, self._cut_short)
        try:
            self._open()
            for step in self._train():
                given = copy_containers(step.state)
                yield step._replace(state=given)
                require_unchanged(given, step.state)
            if (self._enough or self._done == self._session.steps) and (ended := (yield from self._finish())):
                return self._result("finished", ended, None)
            asked = self._agreement.asked
            assert asked is not None
            return self._result("stopped", self._end_early(asked), int(asked))
        except GeneratorExit:
            self._agreement.same("leaving the loop", True)
            self._flush()
            if self._saved < self._done:
                self._save(wait=True)
            self._checkpoints.wait()
            self._event("stopped", f"the loop was left after step {self._done}; the same command resumes from there")
            self._sum_up()
            raise
        except TpuswarmError as error:
            with suppress(RunFailed):  # the disk may be what failed
                self._event("failed", str(error))
            raise
        except jax.errors.JaxRuntimeError as error:
            self._agreement.wait()
            reason = first_line(error)
            self._event("failed", reason)
            raise RunFailed(
                f"the devices failed around step {self._done} ({reason}); the checkpoint of step {self._saved} "
                "is safe, and the same command resumes from it"
            ) from error
        except Interrupted:  # for the second time
            self._cut_short()
            raise
        except BaseException as error:  # whatever ended it, the run should say so
            with suppress(RunFailed):
                self._event("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            with ExitStack() as ends:
                ends.callback(self._session.run.close)
                ends.callback(self._outputs.close)
                ends.callback(self._profiler.close)
                ends.callback(self._checkpoints.close)

    def _slow(self) -> None:
        self._display.note("finishing the step under way, then saving; Ctrl-C again stops without saving")

    def _cut_short(self) -> None:
        """It was interrupted for the second time, and saves nothing any more."""
        self._display.close()
        with suppress(RunFailed):
            lost = f"interrupted twice: step {self._done} was not saved"
            said = f"{lost}; the checkpoint of step {self._saved} is safe"
            last_words(stopped_sentence(self._session.run.folder, said))
            self._event("stopped", said)

    def _open(self) -> None:
        session, compiled = self._session, self._session.compiled
        mesh = compiled.mesh
        session.begin()
        self._outputs.open(self._loggers)
        self._display.open(
            Opening(
                title=session.recipe.name,
                devices=f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
                run=shown(session.run.folder),
                step=session.first_step,
                steps=session.steps,
                tokens_per_step=session.tokens_per_step,
                unit=unit(compiled.program.tokens_per_row),
                parameters=parameter_rows(compiled),
                sentences=[memory_sentence(compiled), *session.notes],
                seconds=self._watch.times.of(*times.PLACES),
            )
        )
        self._outputs.event(self._done, "started", f"from step {self._done}", command=command_line())
        for note in session.notes:
            self._event("note", note)
        self._outputs.findings(self._done, self._watch.at_start(compiled, session.settings["batch"]))
        if self._wandb is not None:
            self._outputs.open_wandb(self._done, self._wandb)
        if self._done == 0:
            self._save(wait=False)  # there is always one to go back to, and what a save takes is known early
        else:
            self._last = self._agreement.same("reading the last row", last_row(session.run.folder))

    def _stopping(self) -> bool:
        return self._agreement.stopping()

    def _train(self) -> Iterator[Step]:
        session, step = self._session, self._session.compiled.step
        missing = 0 < self._done < session.steps and self._not_evaluated() and self._evaluation_due(0.0)
        if missing and (row := self._evaluate()):  # the process before this one saved here and ended before it did
            yield from self._call(self._hooks.evaluated(), row)
        spec = session.compiled.program.batch_spec(session.settings["batch"])
        sharding = batch_sharding(session.compiled.mesh)
        feed = Feed(session.source, spec, sharding, self._done, session.steps)
        with self._watch.times.during(times.STEPS), feed:
            self._read_at = time.monotonic()
            # The order matters: a step's metrics are read after the next one was dispatched, so that the devices never
            # wait; and everything up to a checkpoint's step is written before the checkpoint.
            while self._done < session.steps and not (self._enough or self._stopping()):
                fed = feed.next(leave=self._agreement.leaves_feed)
                if fed is None:
                    break
                batch, waited = fed
                self._waited += waited
                self._traced(self._profiler.before(self._done))
                with StepTraceAnnotation("train", step_num=self._done + 1):
                    self._state, metrics = step(self._state, batch, session.clock(self._done))
                self._done += 1
                self._traced(self._profiler.after(self._done, metrics))
                self._outputs.findings(self._done, self._watch.after_step(self._done, waited))
                before, self._pending = self._pending, (self._done, metrics)
                if before:
                    yield self._record(*before)
                self._checkpoints.check()
                now = time.monotonic()
                save = self._save_every.due(self._done, now - self._saved_at)
                due = save, self._evaluation_due(now - self._evaluated_at), self._hooks.due(self._done)
                save, evaluate, hooks = self._agreement.same("deciding what is due", due)
                if any((save, evaluate, hooks)) and self._done < session.steps and not self._stopping():
                    yield from self._flush()
                    if save:
                        self._save(wait=False)
                    row = self._evaluate() if evaluate else None
                    yield from self._call(self._hooks.evaluated(hooks) if row else hooks, row)
            yield from self._flush()
            self._traced(self._profiler.close())

    def _finish(self) -> Generator[Step, None, str]:
        """The last checkpoint, evaluation and report, each only if it is not there from before; how the run ended.

        Nothing where it is asked to stop before the report.
        """
        session = self._session
        if self._saved < self._done:
            self._save(wait=True)
        row = self._evaluate() if self._not_evaluated() else None
        if self._stopping():  # an evaluation whose hooks were not called is made again
            return ""
        yield from self._call(self._hooks.last(self._done, evaluated=row is not None), row)
        if session.run.writes:
            self._sum_up()
            if (text := self._sample()) is not None:
                session.run.write_event(SAMPLE, step=self._done, text=text)
            with writing(session.run.folder / "report.html"), waiting("writing the report"):
                from tpuswarm.train.look.report import write_report  # matplotlib: half a second that no start waits for

                write_report(session.run.folder)
        if self._enough:  # the same command does not go on from here
            ended = f"ended at step {self._done}: {self._enough}"
            self._outputs.tell(self._done, "finished", ended, of=session.steps)
            return ended
        self._event("finished", f"{self._done} steps")
        return f"finished: {self._done} steps"

    def _sample(self) -> str | None:
        """What the model writes, for the report; None where it does not, or is spread over several hosts."""
        if jax.process_count() > 1:
            return None
        with waiting("writing a sample"):
            return sampled(self._session.recipe, self._state)

    def _end_early(self, asked: Signals) -> str:
        """Save or not, as the grace period allows; what happened in words."""
        left = max(0.0, self._session.settings["grace"] - self._agreement.since())
        decision = decide_stop(asked, self._checkpoints.seconds, self._checkpoints.busy, left)
        decision = StopDecision(*self._agreement.same("deciding how to stop", decision))
        if decision.save and self._saved < self._done:
            self._save(wait=True)
        with self._watch.times.during(times.CHECKPOINTS):
            self._checkpoints.wait()
        who = ASKED[asked]
        message = f"{who}: saved at step {self._done}"
        if self._saved != self._done:
            why = who if decision.save else f"{who}, {decision.reason}"
            message = f"{why}: step {self._done} was not saved; the checkpoint of step {self._saved} is safe"
        self._event("stopped", message)
        self._sum_up()
        return message

    def _flush(self) -> list[Step]:
        """Read and write the metrics that are still on the devices."""
        before, self._pending = self._pending, None
        return [self._record(*before)] if before else []

    def _record(self, step: int, metrics: Metrics) -> Step:
        if self._session.compiled.options.platform == "cpu":  # there one by one, without NumPy, is many times faster
            values = {name: float(value.item()) for name, value in metrics.items()}
        else:
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not values.pop(COUNTS, True):
            self._note_once("uncounted", UNCOUNTED.format(f"step {step}", "changes nothing"))
        elif not all(math.isfinite(values.get(name, 0.0)) for name in ("loss", "grad_norm")):
            self._fail_not_finite(step, f"loss {values['loss']}, gradient norm {values.get('grad_norm', 'unknown')}")
        if (ended := getattr(self._session.source, "ended_after", None)) is not None:
            self._note_once("stream", f"the stream ended after {ended:,} rows, fewer than its rows_per_epoch")
        now = time.monotonic()
        tokens = self._session.tokens_per_step
        row = {
            "step": step,
            "tokens": step * tokens,
            **{name: value if math.isfinite(value) else None for name, value in values.items()},
            "tokens_per_s": tokens / max(now - self._read_at, 1e-9),
            "wait_s": self._waited,
            "wall_s": self._session.wall_s + now - self._began,
        }
        self._read_at, self._waited = now, 0.0
        self._last |= row
        return self._write(row)

    def _evaluate(self) -> dict[str, Any] | None:
        """The row, yet to be written; None where the run is asked to stop meanwhile: the next process evaluates."""
        session, start = self._session, time.monotonic()
        assert session.validation is not None
        with self._watch.times.during(times.EVALUATION), waiting("evaluating") as far:
            found = evaluate(
                session.compiled, self._state, *session.validation, self._eval_batches, leave=self._stopping, far=far,
                leaves_feed=self._agreement.leaves_feed,
            )  # fmt: skip
        if found is None:
            return None
        values, rows = found
        if "loss" not in values:
            self._note_once("uncounted", UNCOUNTED.format(f"the evaluation at step {self._done}", "has no loss"))
        elif not math.isfinite(values["loss"]):
            self._fail_not_finite(self._done, f"held-out loss {values['loss']}")
        if jax.process_count() == 1 and isinstance(session.recipe, ShowsPicture):
            with self._watch.times.during(times.EVALUATION), blame(f"{session.recipe.name}.pictured failed"):
                self._outputs.made(self._done, session.recipe.pictured(self._state))
        self._evaluated_at = time.monotonic()
        self._read_at += self._evaluated_at - start  # speed is that of training alone
        row: dict[str, Any] = {"step": self._done, "tokens": self._done * session.tokens_per_step, "eval_rows": rows}
        if rows < (every := session.validation.source.rows_per_epoch):
            row["eval_rows_total"] = every
        row |= dict.fromkeys(session.measured)
        row |= {f"eval_{name}": value for name, value in values.items() if math.isfinite(value)}
        self._last = {name: value for name, value in self._last.items() if name not in figures(self._last)}
        self._last |= figures(row)
        return row

    def _count(self, row: dict[str, Any]) -> None:
        """Of an evaluation of this step: the newest figures, and perhaps the best."""
        self._last |= figures(row)
        if self._best and self._best.better(row):
            if self._saved < self._done:
                self._save(wait=False)
            self._event(best.EVENT, str(self._best))
            self._checkpoints.pin(self._done, partial(best.write_best, self._session.run.folder, self._best.row))

    def _call(self, due: Sequence[int], evaluation: dict[str, Any] | None) -> list[Step]:
        """Call hooks, and write their numbers: with the row of an evaluation, or as a row of their own.

        Of an evaluation nothing is written where a hook fails: the process that resumes makes it again.
        """
        start, row, rows = time.monotonic(), self._last | {"step": self._done}, [evaluation] if evaluation else []
        numbers: dict[str, Any] = {}
        returned: dict[int, Any] = {}
        with self._watch.times.during(times.USER):
            for index in due:
                if not self._hooks.counts(index):
                    returned[index] = self._hooks.call(index, row, self._state)
                    add_numbers(numbers, returned[index], self._names)
                    self._outputs.returned(self._done, index, returned[index])
        if due:
            numbers = self._agreement.same("writing the numbers of hooks", numbers)
        with self._watch.times.during(times.USER):
            for index in filter(self._hooks.counts, due):
                returned[index] = self._hooks.call(index, row | numbers, self._state)
        if evaluation:
            evaluation |= figures(numbers)
        later = figures(numbers) if self._session.validation else {}  # of an evaluation whose row is there already
        own = {name: value for name, value in numbers.items() if name not in later}
        if own and not self._is_written(own):
            rows.append({"step": self._done, "tokens": self._done * self._session.tokens_per_step} | own)
        written = [self._write(row) for row in rows]
        if evaluation:
            self._count(evaluation)
            if self._best:
                self._best.require(evaluation)
        if returned and not self._enough:
            wanted = [str(found.reason) for found in returned.values() if isinstance(found, Stop)]
            self._enough = self._agreement.same("deciding whether a hook ends the run", "; ".join(wanted))
        if returned:
            factors = [float(found.factor) for found in returned.values() if isinstance(found, ScaleLearningRate)]
            factor = self._agreement.same("multiplying the learning rate", math.prod(factors))
            if factor != 1:
                self._scale(factor)
        self._read_at += time.monotonic() - start  # speed is that of training alone
        return written

    def _is_written(self, own: Collection[str]) -> bool:
        """Whether an earlier process wrote these numbers for this step, before it ended at the end of the run."""
        if self._done > self._session.first_step:
            return False
        rows = read_rows(self._session.run.folder / METRICS)
        found = any(row["step"] == self._done and row.keys() >= set(own) for row in rows)
        return self._agreement.same("looking for numbers of hooks", found)

    def _scale(self, factor: float) -> None:
        """Multiply the learning rate; InputError for a program whose steps do not look at it."""
        session = self._session
        self._require_scale()
        session.lr_scale *= factor
        message = f"the learning rate is multiplied by {factor:g}, in all by {session.lr_scale:g}"
        self._outputs.tell(self._done, LR_SCALE, message, total=session.lr_scale)

    def _require_scale(self) -> None:
        if not self._session.compiled.scales_learning_rate:
            raise InputError(
                f"a hook scales the learning rate, but {self._session.recipe.name} ignores the scale: its "
                "optimizer keeps parameters of its own, or its Program.step does not multiply by clock.lr_scale"
            )

    def _write(self, row: dict[str, Any]) -> Step:
        self._outputs.row(row)
        return Step(row, self._state)

    def _evaluation_due(self, elapsed: float) -> bool:
        return self._session.validation is not None and self._eval_every.due(self._done, elapsed)

    def _not_evaluated(self) -> bool:
        """Whether an evaluation of this step is missing; one of the process before this one counts as if made now."""
        if self._session.validation is None:
            return False
        rows = read_rows(self._session.run.folder / METRICS)
        found = [row for row in rows if row["step"] == self._done and "eval_loss" in row][-1:]
        for row in (found := self._agreement.same("evaluating", found)):
            self._count(row)
        return not found

    def _save(self, wait: bool) -> None:
        with self._watch.times.during(times.CHECKPOINTS):
            self._save_now(wait)

    def _save_now(self, wait: bool) -> None:
        start = time.monotonic()
        bad = not_finite(self._session.compiled.program.exchange().get(self._state))
        if bad:
            self._fail_not_finite(self._done, "the parameters")
        wall_s = self._session.wall_s + start - self._began
        self._checkpoints.save(self._done, self._state, {"wall_s": wall_s}, self._session.position(self._done))
        if wait:
            with waiting(f"saving step {self._done}"):
                self._checkpoints.wait()
        self._saved = self._done
        self._saved_at = time.monotonic()
        self._read_at += self._saved_at - start

    def _fail_not_finite(self, step: int, what: str) -> None:
        compiled = self._session.compiled
        self._checkpoints.wait()
        params = compiled.program.exchange().get(self._state)
        raise diverged(params, step, what, self._saved, bool(compiled.options.clip))

    def _sum_up(self) -> None:
        """Where the time went: an event, which the report reads, and a table on the display."""
        self._outputs.summary(self._done, self._watch.summary(self._session.compiled, self._session.tokens_per_step))

    def _traced(self, message: str | None) -> None:
        self._outputs.tell(self._done, TRACE, message)

    def _note_once(self, kind: str, message: str) -> None:
        """Tell the user, the first time only."""
        if kind not in self._noted:
            self._noted.add(kind)
            self._outputs.tell(self._done, "note", message)

    def _event(self, event: str, message: str) -> None:
        self._outputs.event(self._done, event, message)

    def _result(self, ended: str, message: str, signal: int | None) -> Result:
        return Result(
            self._session.run.folder, self._state, self._done, self._session.steps, self._last, ended, message, signal
        )
