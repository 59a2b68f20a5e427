"""Find runs by name, list them, and read their status."""

import re
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
    RUNS,
    has_begun,
    holder_pid,
    read_config,
    read_rows,
    read_rows_back,
    reading,
)
from tpuswarm.train.run.life import last_start, read_life, updates_done
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import CHECKPOINTS, MANIFEST, copy_folder, is_url, shown

MAX_RECENT_UPDATES = 300
"""Rows at the end of the metrics from which the remaining time is computed."""
WHOLE_ROW = re.compile(rb'\{"step": (\d+)(?:, "[^"]+": (?:-?\d[-+.\de]*|null|NaN|"[^"]*"))++\}\n')
"""An undamaged row of metrics.jsonl; others may be damaged."""


def find_run(name: str, runs: Path = RUNS) -> Path:
    """Return the folder of a run: a path, a name in ./runs, or `last` for the most recently used one.

    For gs://BUCKET/FOLDER update and return the copy on this disk, without large files.
    Raises InputError for an ambiguous name and for another kind of URL.
    """
    if is_url(name):
        return download_run(name)
    here, listed = Path(name), runs / name
    candidates = ((here, f"./{name}"), (listed, str(listed))) if name == here.name else ()
    existing = [text for path, text in candidates if path.exists()]
    if name == "last":
        if existing:
            raise InputError(f"last means the run used last, but {existing[0]} exists too: say which you mean")
        if found := list_runs(runs):
            return found[0]
        raise InputError(f"there are no runs in {runs}; start one with `tpuswarm train`")
    if len(existing) > 1 and not here.samefile(listed):
        raise InputError(f"{name} means both {' and '.join(existing)}: say which you mean")
    return listed if not here.exists() and listed.is_dir() else here


def folder_from_name(run: str) -> Path:
    """Return the folder of a run by its name in a status."""
    return copy_folder(run) if is_url(run) else Path(run)


def last_used_at(folder: Path) -> float:
    """Return when a run was last used in seconds since 1970; now, if a living process holds it."""
    with suppress(InputError):  # its status shows the broken lock
        if holder_pid(folder) is not None:
            return time.time()
    files = [folder / name for name in (CONFIG, EVENTS, METRICS)]
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def list_runs(runs: Path = RUNS) -> list[Path]:
    """Return the runs in a folder, damaged ones too, the most recently used first."""
    with reading(runs):
        folders = (folder for folder in sorted(runs.glob("*")) if has_begun(folder))
        return sorted(folders, key=last_used_at, reverse=True)


@dataclass(frozen=True)
class Status:
    run: str
    state: str
    """A state of Life."""
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
    """tokens, or rows if a row counts as one."""
    devices: str
    elapsed: float
    """Seconds of training."""
    left: float | None
    """Estimated seconds to the last step; None unless it is running."""
    message: str
    """Why it stopped or failed; else empty."""
    steps_done: int | None
    """Steps that all processes did, with those repeated after a resume; None while a process resumes."""
    tokens_done: int | None
    missing_rows: str = ""
    """Result of `missing_rows`; empty where nobody asked for it."""


def read_status(folder: Path) -> Status:
    """Read the status of a run; InputError if the folder is none."""
    config = read_config(folder)
    chosen = config.get("chosen", {})
    start = last_start(folder)  # before the rows, which a resuming process cuts first
    updates, evaluation = read_newest_updates(folder), read_newest_evaluation(folder)
    newest: dict[str, Any] = updates[-1] if updates else {}
    life = read_life(folder)
    left = None
    timed = [row for row in updates if "wall_s" in row]
    if life.pid is not None and len(timed) > 1 and timed[-1]["step"] > timed[0]["step"]:
        seconds, steps = (timed[-1][name] - timed[0][name] for name in ("wall_s", "step"))
        left = max(0.0, (config["train"]["steps"] - newest["step"]) * seconds / steps)
    is_resuming = life.pid is not None and life.pid != start.get("pid", life.pid)
    done = None if is_resuming else updates_done(start, newest.get("step", 0))
    return Status(
        run=shown(folder),
        state=life.state,
        pid=life.pid,
        recipe=config["recipe"]["name"],
        step=newest.get("step", 0),
        steps=config["train"]["steps"],
        tokens=newest.get("tokens", 0),
        loss=newest.get("loss"),
        eval_loss=evaluation.get("eval_loss"),
        eval_step=evaluation.get("step"),
        tokens_per_s=newest.get("tokens_per_s") if life.pid is not None else None,
        unit=token_unit(chosen.get("tokens_per_row", 1)),
        devices=f"{chosen['devices']} x {chosen['device']}" if {"devices", "device"} <= chosen.keys() else "",
        elapsed=newest.get("wall_s", 0.0),
        left=left,
        message=life.message,
        steps_done=done,
        tokens_done=None if done is None else done * config["train"]["batch"] * chosen.get("tokens_per_row", 1),
    )


def missing_rows(folder: Path) -> str:
    """Name the steps of a plain run that have no row, although a later row or checkpoint exists; empty without any."""
    folders = [path.parent.name for path in (folder / CHECKPOINTS).glob(f"*/{MANIFEST}")]
    saved = [int(name) for name in folders if name.isdigit()]
    newest = [row["step"] for row in read_newest_updates(folder)[-1:]]
    last = max([*saved, *newest], default=0)
    if not last:
        return ""
    path = folder / METRICS
    if path.exists() and _count_updates(path) == last:  # parsing all rows takes a second for each 300,000
        return ""
    gaps, before = [], 0
    for step in [*(row["step"] for row in read_rows(path) if "loss" in row), last + 1]:
        if step > before + 1:
            gaps.append(f"{before + 1:,}" if step == before + 2 else f"{before + 1:,} to {step - 1:,}")
        before = step
    return f"{METRICS} has no rows of steps {', '.join(gaps)}: lost in a power cut, or damaged" if gaps else ""


def _count_updates(path: Path) -> int:
    """Return the number of undamaged rows of updates from step 1 on, up to a gap."""
    count = 0
    with reading(path), path.open("rb") as file:
        for line in file:
            if b'"loss"' in line:
                row = WHOLE_ROW.fullmatch(line)
                if row is None or int(row[1]) != count + 1:
                    break
                count += 1
    return count


def read_newest_updates(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the last MAX_RECENT_UPDATES updates; parses no others."""
    rows = (row for row in read_rows_back(folder / METRICS, b'"loss"') if "loss" in row)
    return list(islice(rows, MAX_RECENT_UPDATES))[::-1]


def read_newest_evaluation(folder: Path) -> dict[str, Any]:
    """Return the row of the last evaluation; empty without one."""
    rows = read_rows_back(folder / METRICS, b'"eval_loss"')
    return next((row for row in rows if row.get("eval_loss") is not None), {})
