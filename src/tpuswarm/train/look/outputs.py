"""Send a process's rows and events to the run directory, to TensorBoard, W&B and loggers, and to the display."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import numpy as np

from tpuswarm.errors import InputError, TpuswarmError, message_of
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.phases import summary_sentence
from tpuswarm.train.look import pictures, wandb_log
from tpuswarm.train.look.display import Display
from tpuswarm.train.look.guarded_logger import GuardedLogger, Report
from tpuswarm.train.look.tensorboard_log import TensorBoardLog
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run.directory import SAMPLE_EVENT, Run
from tpuswarm.train.user_code import blame, require_call


class Logger(Protocol):
    """Receives the rows of a run: `Trainer(loggers=[…])`.

    An error of a logger is reported, and training continues. One that takes over a minute is not called again.
    """

    def write(self, row: Mapping[str, Any]) -> None:
        """Receive a row of metrics.jsonl: an update has `loss`, an evaluation `eval_loss`, a hook's numbers neither.

        A number that is not finite is None.
        """
        ...

    def close(self) -> None:
        """The run ends in this process, also by an error."""
        ...


def require_loggers(loggers: Iterable[Any]) -> None:
    """Raise InputError unless all are loggers."""
    for logger in loggers:
        if not all(callable(getattr(logger, name, None)) for name in ("write", "close")):
            raise InputError(f"a logger needs write(row) and close(); got a {type(logger).__name__}")


def all_loggers(recipe: Recipe, loggers: Iterable[Logger], report: Report) -> list[GuardedLogger]:
    """Return the given loggers and those of the recipe; report an error of the recipe's `loggers`.

    Raise InputError unless all are loggers.
    """
    found: list[Any] = list(loggers)
    require_call(recipe.loggers, "loggers")
    try:
        with blame(f"loggers of {recipe.name} fails", every_error=True):
            theirs = recipe.loggers()
    except TpuswarmError as error:
        report(f"{message_of(error)}; training continues without them")
        theirs = []
    if not isinstance(theirs, list | tuple):
        raise InputError(f"loggers of {recipe.name} returns a {type(theirs).__name__}, not a list of loggers")
    found += theirs
    require_loggers(found)
    return [GuardedLogger("a logger", partial(_return, logger), report) for logger in found]


def _return(logger: Any) -> Any:
    return logger


class Outputs:
    """Of several hosts, only the writer of the run has loggers."""

    def __init__(self, run: Run, display: Display, first_step: int):
        self._run, self._display, self._first_step = run, display, first_step
        self._step = first_step
        self._tensorboard: GuardedLogger | None = None
        self._loggers: list[GuardedLogger] = []

    def open(self, loggers: Callable[[Report], Iterable[GuardedLogger]] = lambda report: ()) -> None:
        """loggers: makes the user's loggers; called only on the host that writes."""
        if self._run.writes:
            folder = self._run.folder / "tensorboard"
            open_log = partial(TensorBoardLog, folder, self._first_step)
            self._tensorboard = GuardedLogger("TensorBoard", open_log, self._report)
            self._loggers += [self._tensorboard, *loggers(self._report)]

    def open_wandb(self, step: int, project: str) -> None:
        """Send rows to a project of W&B; InputError if it refuses."""
        if self._run.writes:
            logger = wandb_log.open_wandb(self._run.folder, project, self._report)
            self._loggers.append(logger)
            if log := logger.logger:
                self.announce(step, wandb_log.WANDB_EVENT, f"W&B: {log.where}", id=log.id)

    def write_row(self, row: Mapping[str, Any]) -> None:
        self._run.write_metrics(row)
        self._step = row["step"]
        for logger in self._loggers:
            logger.write(row)
        self._display.row(row)

    def write_event(self, step: int, event: str, message: str, **facts: Any) -> None:
        self._run.write_event(event, step=step, message=message, **facts)

    def announce(self, step: int, event: str, message: str | None, **facts: Any) -> None:
        """Write an event and display it; nothing for None."""
        if message is not None:
            self.write_event(step, event, message, **facts)
            self._display.event(message)

    def write_hook_result(self, step: int, hook: int, result: Any) -> None:
        """Write a text or picture that a hook returned; ignore anything else."""
        if not self._run.writes:
            return
        if isinstance(result, str):
            self.write_event(step, SAMPLE_EVENT, f"a hook at step {step}", text=result)
            self._display.event(f"step {step}: {result}")
        elif len(getattr(result, "shape", ())) == 3:
            self._write_picture(step, f"hook {hook}", f"{step:08d}-{hook}.png", np.asarray(result))

    def write_picture(self, step: int, picture: np.ndarray | None) -> None:
        """Write and display a generated picture, uint8 (height, width, 3); nothing for None."""
        if picture is not None and self._run.writes:
            self._write_picture(step, "made", f"{step:08d}.png", picture)
            self._display.picture(np.array(picture))  # the recipe may draw the next one into the same array

    def _write_picture(self, step: int, name: str, file: str, picture: np.ndarray) -> None:
        assert self._tensorboard is not None
        failure = f"TensorBoard failed at step {step}"
        self._tensorboard.call(failure, lambda log: log.write_picture(step, name, picture))
        pictures.write_picture(self._run.folder, file, picture)

    def announce_findings(self, step: int, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.announce(step, "diagnostic", finding.message, kind=finding.kind, **finding.numbers)

    def announce_summary(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write and display where the time went; facts: of diagnose/phases.py."""
        self.write_event(step, "summary", summary_sentence(facts), **facts)
        self._display.summary(facts)

    def close(self, is_urgent: bool) -> None:
        """Close display and loggers, but not the run directory; is_urgent: the machine may be taken away soon."""
        with ExitStack() as closing:
            closing.enter_context(waiting("closing the loggers"))
            for logger in self._loggers:
                closing.callback(logger.close, is_urgent)
            self._display.close()

    def _report(self, message: str) -> None:
        self.announce(self._step, "note", message)
