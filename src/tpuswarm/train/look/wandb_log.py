"""Log the rows of metrics.jsonl to Weights & Biases."""

import importlib.util
import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from pydantic import ValidationError

from tpuswarm.config.validation_errors import describe_error
from tpuswarm.errors import InputError
from tpuswarm.train.look.guarded_logger import GuardedLogger, Report
from tpuswarm.train.run.directory import EVENTS, read_config, read_rows
from tpuswarm.train.user_code import describe_failure

WANDB_EVENT = "wandb"
REPLY_TIMEOUT_S = 15.0
MAX_RESTARTS = 5
RECENT_ROWS = 500
"""W&B's own process has up to 32 KiB of rows in memory only, and loses them when it is killed."""
REFUSED = re.compile(r"\berror (400|401|403|404)\b")
"""The status in W&B's message about a wrong key or project."""


def require_wandb() -> None:
    if importlib.util.find_spec("wandb") is None:
        raise InputError("--wandb needs a package that is not installed: pip install 'tpuswarm[wandb]'")


def open_wandb(folder: Path, project: str, report: Report) -> GuardedLogger:
    """Raise InputError if W&B rejects the key or the project. After any other failure it goes offline."""
    logger = GuardedLogger("W&B", lambda: WandbLog(folder, project), report, WandbLog.go_offline)
    logger.call("W&B failed at the start", WandbLog.open)
    if logger.logger and logger.logger.rejection:
        raise logger.logger.rejection
    return logger


class WandbLog:
    """One run of W&B for a run directory, continued when the run resumes."""

    def __init__(self, folder: Path, project: str):
        ids = [event["id"] for event in read_rows(folder / EVENTS) if event["event"] == WANDB_EVENT]
        self._folder, self._project, self._config = folder, project, read_config(folder)
        self._axes = {} if "swarm" in self._config else {"*": "step"}
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_ROWS)
        self._restarts = 0
        self.where: str | None = None
        self.id: str | None = ids[-1] if ids else None
        self.rejection: InputError | None = None

    def open(self, mode: str | None = None) -> None:
        """Begin or continue the run of W&B; set `rejection` if W&B rejects it, without an API key for example."""
        import wandb

        try:
            self._run = wandb.init(
                project=self._project,
                dir=self._folder,
                name=self._folder.name,
                id=self.id,
                resume="allow",
                config=self._config,
                mode=mode,  # type: ignore[arg-type]
                # the terminal shows our own output
                settings=wandb.Settings(silent=True, console="off", init_timeout=REPLY_TIMEOUT_S),
            )
        except ValidationError as error:
            first = error.errors()[0]
            variable = f"WANDB_{str(first['loc'][0]).upper()}"
            self.rejection = InputError(f"W&B does not take {variable}: {describe_error(first)}; correct or unset it")
            return
        except wandb.errors.Error as error:
            usage = wandb.errors.UsageError, wandb.errors.AuthenticationError
            if not isinstance(error, usage) and not REFUSED.search(str(error)):
                raise
            self.rejection = InputError(
                f"W&B rejected this run: {error}; run `wandb login`, set WANDB_MODE=offline, or drop --wandb"
            )
            return
        for columns, axis in self._axes.items():
            self._run.define_metric(columns, step_metric=axis)
        self.id = self._run.id
        self.where = self._run.url if not self._run.offline else f"{Path(self._run.dir).parent} (`wandb sync` sends it)"

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row of metrics.jsonl; a member's row under its name, over its steps."""
        member = row.get("member")
        if member is None:
            self._log(dict(row))
        elif "eval_loss" in row:  # of the swarm
            self._set_axis("eval_*", "version")
            self._log({name: value for name, value in row.items() if name not in ("member", "step")})
        else:
            self._set_axis(f"{member}/*", f"{member}/step")
            self._log({f"{member}/{name}": value for name, value in row.items() if name != "member"})

    def go_offline(self, error: BaseException) -> str:
        """Continue the run in a file after an error or a hang; return a sentence about it."""
        import wandb

        for process in psutil.Process().children():
            with suppress(psutil.Error):
                if process.name().startswith("wandb"):
                    process.kill()  # else W&B would wait for it when this process exits
        with suppress(Exception, SystemExit):  # it has no process to end any more
            wandb.teardown()
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise error
        self.open("offline")
        for row in self._recent:
            self._run.log(row)
        command = f"`wandb sync {self._folder}/wandb/*run-*`"
        return f"{describe_failure('W&B failed', error)}; training continues, and {command} sends the rows later"

    def close(self) -> None:
        """Wait until all rows are sent or on disk."""
        self._run.finish()

    def _log(self, row: dict[str, Any]) -> None:
        self._recent.append(row)
        self._run.log(row)

    def _set_axis(self, columns: str, axis: str) -> None:
        if columns not in self._axes:
            self._axes[columns] = axis
            self._run.define_metric(columns, step_metric=axis)
