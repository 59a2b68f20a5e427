"""Tell whether a run is running, and how it ended."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.train.run.directory import EVENTS, holder_pid, read_rows_back
from tpuswarm.train.storage.folders import shown

END_EVENTS = ("finished", "stopped", "failed")
"""The last event of a process that was not killed."""
PROCESS_EVENTS = ("started", *END_EVENTS)


class Life(NamedTuple):
    state: str
    """running, finished, stopped, failed or killed."""
    pid: int | None
    """0 if a process holds the run but has not written its id yet."""
    message: str
    """Why it stopped or failed; else empty."""


def stopped_sentence(folder: Path, message: str, in_program: bool = False) -> str:
    """Return the message about a stopped run; in_program: a Python program trains it, not a command."""
    run = shown(folder)
    again = f'program with run="{run}"' if in_program else f"`tpuswarm train` command with --run {run}"
    return f"{run}: {message}. To resume: the same {again}"


def removed_sentence(folder: Path) -> str:
    return f"{shown(folder)} was removed: it stopped before there was anything to keep"


def last_start(folder: Path) -> dict[str, Any]:
    """Return the event with which the last process started; empty without one."""
    rows = read_rows_back(folder / EVENTS, b'"event": "started"')
    return next((row for row in rows if row["event"] == "started"), {})


def updates_done(start: Mapping[str, Any], step: int) -> int:
    """Return how many updates all processes of a run did, including those repeated after a resume.

    start: event of the process that has reached `step`.
    """
    first_step: int = start.get("step", 0)
    return int(start.get("done", first_step)) + step - first_step


def read_life(folder: Path) -> Life:
    pid = holder_pid(folder)
    if pid is not None:
        return Life("running", pid, "")
    last = last_event(folder)
    return Life(last["event"], None, last.get("message", "")) if last else Life("killed", None, "")


def last_event(folder: Path) -> dict[str, Any]:
    """Return the event with which the last process ended; empty if it was killed or is running."""
    marks = (f'"event": "{event}"'.encode() for event in PROCESS_EVENTS)
    events = (row for row in read_rows_back(folder / EVENTS, *marks) if row["event"] in PROCESS_EVENTS)
    last = next(events, {"event": "started"})
    return last if last["event"] in END_EVENTS else {}
