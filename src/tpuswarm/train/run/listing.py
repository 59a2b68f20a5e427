"""The runs that there are: which one is meant by a name, and how each of them stands, seen from outside."""

import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tpuswarm.config.formatting import token_unit
from tpuswarm.errors import InputError
from tpuswarm.train.run.directory import (
    CONFIG,
    EVENTS,
    METRICS,
    has_begun,
    holder_pid,
    read_config,
    read_rows_back,
    reading,
)
from tpuswarm.train.run.life import read_life
from tpuswarm.train.storage.copy import bring
from tpuswarm.train.storage.folders import folder_of, is_url, shown

MAX_RECENT_UPDATES = 300
"""Updates at the end of the metrics by which it is told how a run stands."""


def find_run(name: str, runs: Path = Path("runs")) -> Path:
    """The folder meant by RUN: a path, the name of one in ./runs, or `last`, the one that was used last.

    Of gs://BUCKET/FOLDER it is the copy on this disk, brought up to date but for what is large.
    Raises InputError for a name that means two of them, and for a URL of another kind.
    """
    if is_url(name):
        return bring(name)
    here, listed = Path(name), runs / name
    both = ((here, f"./{name}"), (listed, str(listed))) if name == here.name else ()
    meant = [shown for path, shown in both if path.exists()]
    if name == "last":
        if meant:
            raise InputError(f"last means the run used last, but {meant[0]} exists too: say which you mean")
        if found := list_runs(runs):
            return found[0]
        raise InputError(f"there are no runs in {runs}; start one with `tpuswarm train`")
    if len(meant) > 1 and not here.samefile(listed):
        raise InputError(f"{name} means both {' and '.join(meant)}: say which you mean")
    return listed if not here.exists() and listed.is_dir() else here


def folder_from_name(run: str) -> Path:
    """The folder of a run by what it is called in a status."""
    return folder_of(run) if is_url(run) else Path(run)


def last_used_at(folder: Path) -> float:
    """When a run was used last, in seconds since 1970: now, where a living process holds it."""
    with suppress(InputError):  # what is wrong with its lock is said where it is shown
        if holder_pid(folder) is not None:
            return time.time()
    files = [folder / name for name in (CONFIG, EVENTS, METRICS)]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def list_runs(runs: Path = Path("runs")) -> list[Path]:
    """The runs in a folder, damaged ones too, the one used last first."""
    with reading(runs):
        folders = (folder for folder in sorted(runs.glob("*")) if has_begun(folder))
        return sorted(folders, key=last_used_at, reverse=True)


@dataclass(frozen=True)
class Status:
    """What can be seen of a run from outside."""

    run: str
    state: str
    """As in Life."""
    pid: int | None
    recipe: str
    step: int
    steps: int
    tokens: int
    loss: float | None
    eval_loss: float | None
    eval_step: int | None
    tokens_per_s: float | None
    """None unless it is running."""
    unit: str
    """What its tokens are: tokens, or rows where a row counts for one."""
    devices: str
    elapsed: float
    """Seconds of training."""
    left: float | None
    """Seconds until the last step, at the pace of the last ones; None unless it is running."""
    message: str
    """Why it stopped or failed, where it did."""


def read_status(folder: Path) -> Status:
    """The status of a run; InputError if the folder is none."""
    config = read_config(folder)
    chosen = config.get("chosen", {})
    newest, evaluation = read_newest_updates(folder), read_newest_evaluation(folder)
    train: dict[str, Any] = newest[-1] if newest else {}
    life = read_life(folder)
    left = None
    timed = [row for row in newest if "wall_s" in row]
    if life.pid is not None and len(timed) > 1 and timed[-1]["step"] > timed[0]["step"]:
        seconds, steps = (timed[-1][name] - timed[0][name] for name in ("wall_s", "step"))
        left = max(0.0, (config["train"]["steps"] - train["step"]) * seconds / steps)
    return Status(
        run=shown(folder),
        state=life.state,
        pid=life.pid,
        recipe=config["recipe"]["name"],
        step=train.get("step", 0),
        steps=config["train"]["steps"],
        tokens=train.get("tokens", 0),
        loss=train.get("loss"),
        eval_loss=evaluation.get("eval_loss"),
        eval_step=evaluation.get("step"),
        tokens_per_s=train.get("tokens_per_s") if life.pid is not None else None,
        unit=token_unit(chosen.get("tokens_per_row", 1)),
        devices=f"{chosen['devices']} x {chosen['device']}" if {"devices", "device"} <= chosen.keys() else "",
        elapsed=train.get("wall_s", 0.0),
        left=left,
        message=life.message,
    )


def read_newest_updates(folder: Path) -> list[dict[str, Any]]:
    """Rows of the last updates in a run's metrics, a few hundred; the others are not parsed."""
    rows = (row for row in read_rows_back(folder / METRICS, b'"loss"') if "loss" in row)
    return list(islice(rows, MAX_RECENT_UPDATES))[::-1]


def read_newest_evaluation(folder: Path) -> dict[str, Any]:
    """The last row with an evaluation in a run's metrics, the others not parsed; empty where there is none."""
    rows = read_rows_back(folder / METRICS, b'"eval_loss"')
    return next((row for row in rows if row.get("eval_loss") is not None), {})
