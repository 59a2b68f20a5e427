"""Log the rows of metrics.jsonl to Weights & Biases."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.run.directory import EVENTS, read_config, read_rows

WANDB_EVENT = "wandb"


def require_wandb() -> None:
    if importlib.util.find_spec("wandb") is None:
        raise InputError("--wandb needs a package that is not installed: pip install 'tpuswarm[wandb]'")


class WandbLog:
    """One run of W&B for a run directory, continued when the run resumes."""

    def __init__(self, folder: Path, project: str):
        """Raise InputError if W&B refuses, without an API key for example."""
        import wandb

        ids = [event["id"] for event in read_rows(folder / EVENTS) if event["event"] == WANDB_EVENT]
        config = read_config(folder)
        try:
            self._run = wandb.init(
                project=project,
                dir=folder,
                name=folder.name,
                id=ids[-1] if ids else None,
                resume="allow",
                config=config,
                settings=wandb.Settings(silent=True, console="off"),  # the terminal shows our own output
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"W&B rejected this run: {error}; run `wandb login`, set WANDB_MODE=offline, or drop --wandb"
            ) from error
        self._columns_with_axis: set[str] = set()
        if "swarm" not in config:
            self._set_axis("*", "step")
        self.id = self._run.id
        self.where = self._run.url if not self._run.offline else f"{Path(self._run.dir).parent} (`wandb sync` sends it)"

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(row))

    def write_member(self, row: Mapping[str, Any]) -> None:
        """Write a member's row under its name, over its steps; an evaluation of the swarm over versions."""
        member = row["member"]
        if "eval_loss" in row:
            self._set_axis("eval_*", "version")
            self._run.log({name: value for name, value in row.items() if name not in ("member", "step")})
            return
        self._set_axis(f"{member}/*", f"{member}/step")
        self._run.log({f"{member}/{name}": value for name, value in row.items() if name != "member"})

    def _set_axis(self, columns: str, axis: str) -> None:
        if columns not in self._columns_with_axis:
            self._columns_with_axis.add(columns)
            self._run.define_metric(columns, step_metric=axis)

    def close(self) -> None:
        """Wait until all rows are sent or on disk."""
        self._run.finish()
