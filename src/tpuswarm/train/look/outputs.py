"""What one process says of its run: to the run directory, to TensorBoard and W&B, and to the person who watches."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.phases import summary_sentence
from tpuswarm.train.look import wandb_log
from tpuswarm.train.look.board import Board
from tpuswarm.train.look.display import Display
from tpuswarm.train.look.pictures import write_picture
from tpuswarm.train.optional import HasLoggers
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run.directory import SAMPLE_EVENT, Run
from tpuswarm.train.user_code import blame, require_call


@runtime_checkable
class Logger(Protocol):
    """What a run's rows go to, besides its directory: `Trainer(loggers=[…])`."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl; one of an update has `loss`, one of an evaluation `eval_loss`.

        One of numbers that a hook returned has neither. What is not finite is None.
        """
        ...

    def close(self) -> None:
        """The run ends in this process, however it ends."""
        ...


def check_loggers(loggers: Iterable[Any]) -> None:
    """Raise InputError for what is no logger."""
    for each in loggers:
        if not isinstance(each, Logger):
            raise InputError(f"a logger needs write(row) and close(); got a {type(each).__name__}")


def all_loggers(recipe: Recipe, loggers: Iterable[Logger] = ()) -> list[Logger]:
    """Those that were given and those that the recipe brings; InputError for what is no logger."""
    found: list[Any] = list(loggers)
    if isinstance(recipe, HasLoggers):
        require_call(recipe.loggers, "loggers")
        with blame(f"loggers of {recipe.name} fails"):
            theirs = recipe.loggers()
        if not isinstance(theirs, list | tuple):
            raise InputError(f"loggers of {recipe.name} returns a {type(theirs).__name__}, not a list of loggers")
        found += theirs
    check_loggers(found)
    return found


class Blamed:
    """A logger of the user's, whose faults are told with their line."""

    def __init__(self, logger: Logger):
        self._logger = logger

    def write(self, row: Mapping[str, Any]) -> None:
        """Take in a row."""
        with blame(f"a logger failed at step {row['step']}"):
            self._logger.write(dict(row))

    def close(self) -> None:
        """The run ends."""
        with blame("a logger failed at the end"):
            self._logger.close()


class Outputs:
    """Rows and events, each to everyone whom it concerns; of several hosts only the one that writes is heard."""

    def __init__(self, run: Run, display: Display, first_step: int):
        self._run, self._display, self._first_step = run, display, first_step
        self._board: Board | None = None
        self._loggers: list[Logger] = []

    def open(self, loggers: Callable[[], Iterable[Logger]] = list) -> None:
        """Begin to write, to the user's loggers too, which are made only where they are written to."""
        if self._run.writes:
            self._board = Board(self._run.folder / "tensorboard", self._first_step)
            self._loggers += [self._board, *map(Blamed, loggers())]

    def open_wandb(self, step: int, project: str) -> None:
        """Send the rows to a project of W&B as well; InputError where it refuses."""
        if self._run.writes:
            log = wandb_log.WandbLog(self._run.folder, project)
            self._loggers.append(log)
            self.tell(step, wandb_log.EVENT, f"W&B: {log.where}", id=log.id)

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""
        self._run.write_metrics(row)
        for logger in self._loggers:
            logger.write(row)
        self._display.row(row)

    def event(self, step: int, event: str, message: str, **facts: Any) -> None:
        """Something that happened, for events.jsonl alone."""
        self._run.write_event(event, step=step, message=message, **facts)

    def tell(self, step: int, event: str, message: str | None, **facts: Any) -> None:
        """Something that happened, for the person as well; None is nothing to tell."""
        if message is not None:
            self.event(step, event, message, **facts)
            self._display.note(message)

    def returned(self, step: int, index: int, found: Any) -> None:
        """What the hook `index` returned: a text, a picture, or nothing that counts."""
        if not self._run.writes:
            return
        if isinstance(found, str):
            self.event(step, SAMPLE_EVENT, f"a hook at step {step}", text=found)
            self._display.note(f"step {step}: {found}")
        elif len(getattr(found, "shape", ())) == 3:
            self._keep(step, f"hook {index}", f"{step:08d}-{index}.png", np.asarray(found))

    def made(self, step: int, picture: np.ndarray | None) -> None:
        """What the model makes now, uint8 (height, width, 3); None: nothing."""
        if picture is not None and self._run.writes:
            self._keep(step, "made", f"{step:08d}.png", picture)
            self._display.picture(picture)

    def _keep(self, step: int, name: str, file: str, picture: np.ndarray) -> None:
        assert self._board is not None
        self._board.picture(step, name, picture)
        write_picture(self._run.folder, file, picture)

    def findings(self, step: int, findings: Iterable[Finding]) -> None:
        """What was diagnosed."""
        for finding in findings:
            self.tell(step, "diagnostic", finding.message, kind=finding.kind, **finding.numbers)

    def summary(self, step: int, facts: Mapping[str, Any]) -> None:
        """Where the time went: facts of diagnose/phases.py."""
        self.event(step, "summary", summary_sentence(facts), **facts)
        self._display.summary(facts)

    def close(self) -> None:
        """End everything but the run directory."""
        with ExitStack() as ends:
            for logger in self._loggers:
                ends.callback(logger.close)
            ends.callback(self._display.close)
