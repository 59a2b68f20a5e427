"""Send a process's rows and events to the run directory, to TensorBoard, W&B and loggers, and to the display."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.phases import summary_sentence
from tpuswarm.train.look import pictures, wandb_log
from tpuswarm.train.look.display import Display
from tpuswarm.train.look.tensorboard_log import TensorBoardLog
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run.directory import SAMPLE_EVENT, Run
from tpuswarm.train.user_code import blame, require_call


class Logger(Protocol):
    """Receives the rows of a run: `Trainer(loggers=[…])`."""

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


def all_loggers(recipe: Recipe, loggers: Iterable[Logger] = ()) -> list[Logger]:
    """Return the given loggers and those of the recipe; InputError unless all are loggers."""
    found: list[Any] = list(loggers)
    require_call(recipe.loggers, "loggers")
    with blame(f"loggers of {recipe.name} fails"):
        theirs = recipe.loggers()
    if not isinstance(theirs, list | tuple):
        raise InputError(f"loggers of {recipe.name} returns a {type(theirs).__name__}, not a list of loggers")
    found += theirs
    require_loggers(found)
    return found


class UserLogger:
    """A logger whose errors name the user's line."""

    def __init__(self, logger: Logger):
        self._logger = logger

    def write(self, row: Mapping[str, Any]) -> None:
        with blame(f"a logger failed at step {row['step']}"):
            self._logger.write(dict(row))

    def close(self) -> None:
        with blame("a logger failed at the end"):
            self._logger.close()


class Outputs:
    """Of several hosts, only the writer of the run has loggers."""

    def __init__(self, run: Run, display: Display, first_step: int):
        self._run, self._display, self._first_step = run, display, first_step
        self._tensorboard: TensorBoardLog | None = None
        self._loggers: list[Logger] = []

    def open(self, loggers: Callable[[], Iterable[Logger]] = list) -> None:
        """loggers: makes the user's loggers; called only on the host that writes."""
        if self._run.writes:
            self._tensorboard = TensorBoardLog(self._run.folder / "tensorboard", self._first_step)
            self._loggers += [self._tensorboard, *map(UserLogger, loggers())]

    def open_wandb(self, step: int, project: str) -> None:
        """Send rows to a project of W&B; InputError if it refuses."""
        if self._run.writes:
            log = wandb_log.WandbLog(self._run.folder, project)
            self._loggers.append(log)
            self.announce(step, wandb_log.WANDB_EVENT, f"W&B: {log.where}", id=log.id)

    def write_row(self, row: Mapping[str, Any]) -> None:
        self._run.write_metrics(row)
        for logger in self._loggers:
            logger.write(row)
        self._display.row(row)

    def write_event(self, step: int, event: str, message: str, **facts: Any) -> None:
        self._run.write_event(event, step=step, message=message, **facts)

    def announce(self, step: int, event: str, message: str | None, **facts: Any) -> None:
        """Write an event and display it; nothing for None."""
        if message is not None:
            self.write_event(step, event, message, **facts)
            self._display.note(message)

    def write_hook_result(self, step: int, hook: int, result: Any) -> None:
        """Write a text or picture that a hook returned; ignore anything else."""
        if not self._run.writes:
            return
        if isinstance(result, str):
            self.write_event(step, SAMPLE_EVENT, f"a hook at step {step}", text=result)
            self._display.note(f"step {step}: {result}")
        elif len(getattr(result, "shape", ())) == 3:
            self._write_picture(step, f"hook {hook}", f"{step:08d}-{hook}.png", np.asarray(result))

    def write_picture(self, step: int, picture: np.ndarray | None) -> None:
        """Write and display a generated picture, uint8 (height, width, 3); nothing for None."""
        if picture is not None and self._run.writes:
            self._write_picture(step, "made", f"{step:08d}.png", picture)
            self._display.picture(np.array(picture))  # the recipe may draw the next one into the same array

    def _write_picture(self, step: int, name: str, file: str, picture: np.ndarray) -> None:
        assert self._tensorboard is not None
        self._tensorboard.write_picture(step, name, picture)
        pictures.write_picture(self._run.folder, file, picture)

    def announce_findings(self, step: int, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.announce(step, "diagnostic", finding.message, kind=finding.kind, **finding.numbers)

    def announce_summary(self, step: int, facts: Mapping[str, Any]) -> None:
        """Write and display where the time went; facts: of diagnose/phases.py."""
        self.write_event(step, "summary", summary_sentence(facts), **facts)
        self._display.summary(facts)

    def close(self) -> None:
        """Close loggers and display, but not the run directory."""
        with ExitStack() as closing:
            for logger in self._loggers:
                closing.callback(logger.close)
            closing.callback(self._display.close)
