"""What one process says of its run: to the run directory, to TensorBoard and W&B, and to the person who watches."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from tpuswarm.train import wandb_log
from tpuswarm.train.board import Board
from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.diagnose.summary import sentence
from tpuswarm.train.display import Display
from tpuswarm.train.run import Run


class Outputs:
    """Rows and events, each to everyone whom it concerns; of several hosts only the one that writes is heard."""

    def __init__(self, run: Run, display: Display, first_step: int):
        self._run, self._display, self._first_step = run, display, first_step
        self._boards: list[Board | wandb_log.WandbLog] = []

    def open(self) -> None:
        """Begin to write."""
        if self._run.writes:
            self._boards.append(Board(self._run.folder / "tensorboard", self._first_step))

    def open_wandb(self, step: int, project: str) -> None:
        """Send the rows to a project of W&B as well; InputError where it refuses."""
        if self._run.writes:
            log = wandb_log.WandbLog(self._run.folder, project)
            self._boards.append(log)
            self.tell(step, wandb_log.EVENT, f"W&B: {log.where}", id=log.id)

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""
        self._run.write_metrics(row)
        for board in self._boards:
            board.write(row)
        self._display.row(row)

    def event(self, step: int, event: str, message: str, **facts: Any) -> None:
        """Something that happened, for events.jsonl alone."""
        self._run.write_event(event, step=step, message=message, **facts)

    def tell(self, step: int, event: str, message: str | None, **facts: Any) -> None:
        """Something that happened, for the person as well; None is nothing to tell."""
        if message is not None:
            self.event(step, event, message, **facts)
            self._display.note(message)

    def findings(self, step: int, findings: Iterable[Finding]) -> None:
        """What was diagnosed."""
        for finding in findings:
            self.tell(step, "diagnostic", finding.message, kind=finding.kind, **finding.numbers)

    def summary(self, step: int, facts: Mapping[str, Any]) -> None:
        """Where the time went: facts of diagnose.summary.Summary."""
        self.event(step, "summary", sentence(facts), **facts)
        self._display.summary(facts)

    def close(self) -> None:
        """End everything but the run directory."""
        with ExitStack() as ends:
            for board in self._boards:
                ends.callback(board.close)
            ends.callback(self._display.close)
