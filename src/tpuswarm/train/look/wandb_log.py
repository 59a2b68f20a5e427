"""Weights & Biases, where the user asks for it: the rows of metrics.jsonl as they are."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.run.directory import EVENTS, read_config, read_rows

EVENT = "wandb"


def require() -> None:
    """InputError where the package is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise InputError("--wandb needs a package that is not installed: pip install 'tpuswarm[wandb]'")


class WandbLog:
    """One run of W&B for one run directory; a process that goes on with the directory goes on with it."""

    def __init__(self, folder: Path, project: str):
        """InputError where W&B refuses, without an API key for example."""
        import wandb

        before = [event["id"] for event in read_rows(folder / EVENTS) if event["event"] == EVENT]
        settings = wandb.Settings(silent=True, console="off")  # what is on the screen is ours to draw
        try:
            self._run = wandb.init(
                project=project,
                dir=folder,
                name=folder.name,
                id=before[-1] if before else None,
                resume="allow",
                config=read_config(folder),
                settings=settings,
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"W&B rejected this run: {error}; run `wandb login`, set WANDB_MODE=offline, or drop --wandb"
            ) from error
        self._defined: set[str] = set()
        """Names of columns whose axis is told."""
        if "swarm" not in read_config(folder):
            self._over("step", "*")
        self.id = self._run.id
        self.where = self._run.url if not self._run.offline else f"{Path(self._run.dir).parent} (`wandb sync` sends it)"

    def write(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl."""
        self._run.log(dict(row))

    def write_member(self, row: Mapping[str, Any]) -> None:
        """Take in a row of a swarm: a member's own under its name, over its own steps; evaluations over versions."""
        member = row["member"]
        if "eval_loss" in row:
            self._over("version", "eval_*")
            self._run.log({name: value for name, value in row.items() if name not in ("member", "step")})
            return
        self._over(f"{member}/step", f"{member}/*")
        self._run.log({f"{member}/{name}": value for name, value in row.items() if name != "member"})

    def _over(self, axis: str, names: str) -> None:
        """Draw the columns of these names over that one."""
        if names not in self._defined:
            self._defined.add(names)
            self._run.define_metric(names, step_metric=axis)

    def close(self) -> None:
        """Wait until what was written is on its way or on the disk."""
        self._run.finish()
