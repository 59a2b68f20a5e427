"""Run the steps of a run in one process, alone or as one of several hosts."""

import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from signal import Signals
from typing import Any

import jax
from jax.profiler import StepTraceAnnotation

from tpuswarm.config.formatting import token_unit
from tpuswarm.errors import RunFailed, TpuswarmError, first_line, message_of
from tpuswarm.train.data.feed import Feed
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.diagnostics import Diagnostics
from tpuswarm.train.look.describe import describe_start, memory_sentence, parameter_lines, parameter_rows
from tpuswarm.train.look.display import Display, RunHeader
from tpuswarm.train.look.guarded_logger import GuardedLogger, Report
from tpuswarm.train.look.outputs import Outputs
from tpuswarm.train.look.profile import TRACE_EVENT, Profiler
from tpuswarm.train.loop.evaluate import EVAL_BATCHES
from tpuswarm.train.loop.evaluations import Evaluations
from tpuswarm.train.loop.hook_runner import HookRunner
from tpuswarm.train.loop.hooks import Hooks, Step, copy_containers, require_unchanged
from tpuswarm.train.loop.progress import Progress
from tpuswarm.train.loop.result import Result, last_row
from tpuswarm.train.loop.saver import Saver
from tpuswarm.train.loop.session import Session
from tpuswarm.train.losses import HAS_COUNTED_ROWS
from tpuswarm.train.process.stop import Interrupted, StopDecision, decide_stop, set_exit_message
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.program.mesh import batch_sharding
from tpuswarm.train.recipe import Metrics
from tpuswarm.train.run.directory import SAMPLE_EVENT, command_line, writing
from tpuswarm.train.run.life import stopped_sentence
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import blame, sample_for_report

STOP_CAUSES = {Signals.SIGINT: "interrupted", Signals.SIGTERM: "SIGTERM", Signals.SIGHUP: "its terminal closed"}


class Loop:
    """One process's work on one run."""

    def __init__(
        self,
        session: Session,
        diagnostics: Diagnostics,
        display: Display,
        *,
        hooks: Hooks,
        profile: bool,
        wandb: str | None,
        loggers: Callable[[Report], list[GuardedLogger]] = lambda report: [],
        eval_batches: int = EVAL_BATCHES,
    ):
        self._session, self._diagnostics, self._display = session, diagnostics, display
        self._agreement, self._wandb, self._loggers = session.agreement, wandb, loggers
        self._outputs = Outputs(session.run, display, session.first_step)
        self._profiler = Profiler(session.run, session.first_step, session.steps, profile)
        self._progress = Progress(session, self._outputs)
        self._saver = Saver(self._progress, diagnostics)
        self._evaluations = Evaluations(self._progress, self._saver, diagnostics, eval_batches)
        self._hook_runner = HookRunner(hooks, self._progress, self._evaluations, diagnostics)
        self._unread: tuple[int, Metrics] | None = None
        """The newest step and its metrics, still on the devices."""

    def run(self) -> Generator[Step, None, Result]:
        """Run all steps; yield their rows and return the result."""
        progress = self._progress
        self._agreement.set_stop_callbacks(self._note_slow_stop, self._cut_short)
        try:
            self._session.write_config()
        except BaseException:  # an event would make the directory of a new run stay
            self._saver.checkpoints.close()
            raise
        try:
            with blame(f"{self._session.recipe.name} fails"):
                return (yield from self._run())
        except GeneratorExit:
            self._agreement.broadcast("leaving the loop", True)
            self._flush()
            self._saver.save(wait=True)
            self._saver.checkpoints.wait()
            message = f"the loop was left after step {progress.step}; the same command resumes from there"
            progress.event("stopped", message)
            self._write_summary()
            raise
        except TpuswarmError as error:
            with suppress(RunFailed):  # the disk may have failed
                progress.event("failed", message_of(error))
            raise
        except jax.errors.JaxRuntimeError as error:
            self._agreement.wait_for_loss()
            reason = first_line(error)
            progress.event("failed", reason)
            raise RunFailed(
                f"the devices failed around step {progress.step} ({reason}); the checkpoint of step "
                f"{self._saver.saved_step} is safe, and the same command resumes from it"
            ) from error
        except Interrupted:  # a second Ctrl-C
            self._cut_short()
            raise
        except BaseException as error:  # record every failure
            with suppress(RunFailed):
                progress.event("failed", f"{type(error).__name__}: {message_of(error)}")
            raise
        finally:
            with ExitStack() as ends:
                ends.callback(self._session.run.close)
                ends.callback(lambda: self._outputs.close(self._agreement.is_terminating()))
                ends.callback(self._profiler.close)
                ends.callback(self._saver.checkpoints.close)

    def _run(self) -> Generator[Step, None, Result]:
        self._open()
        for step in self._train():
            state_copy = copy_containers(step.state)
            yield step._replace(state=state_copy)
            require_unchanged(state_copy, step.state)
        is_done = self._hook_runner.stop_reason or self._progress.step == self._session.steps
        if is_done and (ended := (yield from self._finish())):
            return self._result("finished", ended, None)
        signal = self._agreement.stop_signal
        assert signal is not None
        return self._result("stopped", self._end_early(signal), int(signal))

    def _note_slow_stop(self) -> None:
        self._display.note("finishing the step under way, then saving; Ctrl-C again stops without saving")

    def _cut_short(self) -> None:
        """End without saving, after a second Ctrl-C."""
        self._display.close()
        with suppress(RunFailed):
            step, saved_step = self._progress.step, self._saver.saved_step
            unsaved = "" if saved_step == step else f"step {step} was not saved; "
            message = f"interrupted twice: {unsaved}the checkpoint of step {saved_step} is safe"
            set_exit_message(self._stopped_sentence(message))
            self._progress.event("stopped", message)

    def _open(self) -> None:
        session, compiled, step = self._session, self._session.compiled, self._progress.step
        mesh = compiled.mesh
        parameters = sum(row.count for row in parameter_rows(compiled) if not row.statistic)
        held_out = session.validation.source.rows_per_epoch if session.validation else 0
        form = compiled.choice.why
        about = describe_start(session.recipe, session.settings, parameters, form, session.source, held_out)
        self._outputs.open(self._loggers)
        self._display.open(
            RunHeader(
                title=session.recipe.name,
                devices=f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
                run=shown(session.run.folder),
                step=session.first_step,
                steps=session.steps,
                tokens_per_step=session.tokens_per_step,
                unit=token_unit(compiled.program.tokens_per_row),
                sentences=[*(f"{name}: {text}" for name, text in about.items()), *session.notes],
                preview=session.recipe.preview(),
                seconds=self._diagnostics.stopwatch.seconds(*phases.PHASES),
            )
        )
        facts = {"command": command_line(), "pid": os.getpid(), "done": session.updates_done}
        self._outputs.write_event(step, "started", f"from step {step}", **facts)
        for kind, text in about.items():
            self._progress.event(kind, text)
        self._outputs.write_event(step, "parameters", memory_sentence(compiled), table=parameter_lines(compiled))
        for note in session.notes:
            self._progress.event("note", note)
        self._outputs.announce_findings(step, self._diagnostics.at_start(compiled, session.settings["batch"]))
        if self._wandb is not None:
            self._outputs.open_wandb(step, self._wandb)
        if step == 0:
            self._saver.save(wait=False)  # a fallback for failures, and an early measurement of the time of a save
        else:
            self._progress.last_row = self._agreement.broadcast("reading the last row", last_row(session.run.folder))

    def _train(self) -> Iterator[Step]:
        session, progress, hooks = self._session, self._progress, self._hook_runner.hooks
        if self._evaluations.was_missed() and (row := self._evaluations.measure()):
            yield from self._hook_runner.call(hooks.with_evaluation_hooks(), row)
        spec = session.compiled.program.batch_spec(session.settings["batch"])
        sharding = batch_sharding(session.compiled.mesh)
        feed = Feed(session.source, spec, sharding, progress.step, session.steps)
        with self._diagnostics.stopwatch.during(phases.STEPS), feed:
            progress.restart_clock()
            # Read a step's metrics after the dispatch of the next step: the devices never wait. Write all rows up to a
            # checkpoint's step before the checkpoint.
            while progress.step < session.steps and not self._is_ending():
                item = feed.next(should_leave=self._agreement.should_leave_feed)
                if item is None:
                    break
                batch, wait_s = item
                progress.wait_s += wait_s
                before, self._unread = self._unread, (progress.step + 1, self._dispatch(batch))
                self._outputs.announce_findings(progress.step, self._diagnostics.after_step(progress.step, wait_s))
                if before:
                    yield self._write_update(*before)
                self._saver.checkpoints.check()
                due = self._saver.is_due(), self._evaluations.is_due(), hooks.due(progress.step)
                save, evaluate, due_hooks = self._agreement.broadcast("deciding what is due", due)
                is_due = (save or evaluate or due_hooks) and progress.step < session.steps
                if is_due and not self._agreement.should_stop():
                    yield from self._flush()
                    if save:
                        self._saver.save(wait=False)
                    row = self._evaluations.measure() if evaluate else None
                    yield from self._hook_runner.call(hooks.with_evaluation_hooks(due_hooks) if row else due_hooks, row)
            yield from self._flush()
            self._outputs.announce(progress.step, TRACE_EVENT, self._profiler.close())

    def _is_ending(self) -> bool:
        return bool(self._hook_runner.stop_reason) or self._agreement.should_stop()

    def _dispatch(self, batch: Any) -> Metrics:
        """Start the next update on the devices; return its metrics, which do not exist yet."""
        progress, session = self._progress, self._session
        self._outputs.announce(progress.step, TRACE_EVENT, self._profiler.before(progress.step))
        with StepTraceAnnotation("train", step_num=progress.step + 1):
            progress.state, metrics = session.compiled.step(progress.state, batch, session.clock(progress.step))
        progress.step += 1
        self._outputs.announce(progress.step, TRACE_EVENT, self._profiler.after(progress.step, metrics))
        return metrics

    def _finish(self) -> Generator[Step, None, str]:
        """Make the missing last checkpoint, evaluation and report; return how the run ended.

        Return an empty string after a stop signal.
        """
        session, progress = self._session, self._progress
        self._saver.save(wait=True)
        row = self._evaluations.measure() if self._evaluations.is_missing() else None
        if self._agreement.should_stop():  # the process that resumes evaluates again
            return ""
        hooks = self._hook_runner.hooks.due_at_end(progress.step, is_evaluated=row is not None)
        yield from self._hook_runner.call(hooks, row)
        self._evaluations.report_missing_best()
        if session.run.writes:
            self._write_summary()
            if (text := self._sample()) is not None:
                session.run.write_event(SAMPLE_EVENT, step=progress.step, text=text)
            with writing(session.run.folder / "report.html"), waiting("writing the report"):
                from tpuswarm.train.look.report import write_report  # matplotlib takes half a second

                write_report(session.run.folder)
        if reason := self._hook_runner.stop_reason:  # the same command does not continue
            ended = f"ended at step {progress.step}: {reason}"
            self._outputs.announce(progress.step, "finished", ended, of=session.steps)
            return ended
        progress.event("finished", f"{progress.step} steps")
        return f"finished: {progress.step} steps"

    def _sample(self) -> str | None:
        """Return a text of the model for the report; None if it writes none or runs on several hosts."""
        if jax.process_count() > 1:
            return None
        with waiting("writing a sample"):
            return sample_for_report(self._session.recipe, self._progress.state)

    def _end_early(self, signal: Signals) -> str:
        """Save, if the grace period is long enough; return a sentence about it."""
        progress, checkpoints = self._progress, self._saver.checkpoints
        left_s = max(0.0, self._session.settings["grace"] - self._agreement.seconds_since_signal())
        decision = decide_stop(signal, checkpoints.last_save_s, checkpoints.is_saving, left_s)
        decision = StopDecision(*self._agreement.broadcast("deciding how to stop", decision))
        if decision.save:
            self._saver.save(wait=True)
        with self._diagnostics.stopwatch.during(phases.CHECKPOINTS):
            checkpoints.wait()
        cause = STOP_CAUSES[signal]
        message = f"{cause}: saved at step {progress.step}"
        if self._saver.saved_step != progress.step:
            why = cause if decision.save else f"{cause}, {decision.reason}"
            message = (
                f"{why}: step {progress.step} was not saved; the checkpoint of step {self._saver.saved_step} is safe"
            )
        progress.event("stopped", message)
        self._write_summary()
        if not self._session.recipe.target:  # a command prints its own last line
            self._display.note(self._stopped_sentence(message))
        return message

    def _stopped_sentence(self, message: str) -> str:
        return stopped_sentence(self._session.run.folder, message, in_program=not self._session.recipe.target)

    def _flush(self) -> list[Step]:
        """Read and write the metrics that are still on the devices."""
        before, self._unread = self._unread, None
        return [self._write_update(*before)] if before else []

    def _write_update(self, step: int, metrics: Metrics) -> Step:
        session, progress = self._session, self._progress
        if session.compiled.options.platform == "cpu":  # one by one, without NumPy, is many times faster there
            values = {name: float(value.item()) for name, value in metrics.items()}
        else:
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not values.pop(HAS_COUNTED_ROWS, True):
            progress.note_once(
                "uncounted",
                f"no row counts in step {step} (its weights are all 0): it changes nothing; further ones are not "
                "reported",
            )
        elif not all(math.isfinite(values.get(name, 0.0)) for name in ("loss", "grad_norm")):
            quantities = f"loss {values['loss']}, gradient norm {values.get('grad_norm', 'unknown')}"
            raise self._saver.failure(step, quantities)
        else:
            progress.note_missing({"step": step} | {name: None for name in values if not math.isfinite(values[name])})
        if (ended := getattr(session.source, "ended_after", None)) is not None:
            progress.note_once("stream", f"the stream ended after {ended:,} rows, fewer than its rows_per_epoch")
        return progress.write_update(step, values)

    def _write_summary(self) -> None:
        """Write a summary as an event, for the report, and as a table on the display."""
        summary = self._diagnostics.summary(self._session.compiled, self._session.tokens_per_step)
        self._outputs.announce_summary(self._progress.step, summary)

    def _result(self, ended: str, message: str, signal: int | None) -> Result:
        progress, session = self._progress, self._session
        return Result(
            session.run.folder, progress.state, progress.step, session.steps, progress.last_row, ended, message, signal
        )
