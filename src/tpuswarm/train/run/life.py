"""Whether a run lives, how it ended if it does not, and what is said then."""

from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.train.run.directory import EVENTS, holder_pid, read_rows_back
from tpuswarm.train.storage.folders import shown

END_EVENTS = ("finished", "stopped", "failed")
"""Events that end a process's work on a run; without one of them it was killed."""

_ENDS = tuple(f'"event": "{each}"'.encode() for each in ("started", *END_EVENTS))


class Life(NamedTuple):
    """Whether a run lives, and how it ended if it does not."""

    state: str
    """running, finished, stopped, failed, or killed (its process is gone without a word)."""
    pid: int | None
    """0 for a moment while a process takes the run."""
    message: str
    """Why it stopped or failed, where it did."""


def stopped_sentence(folder: Path, message: str, in_program: bool = False) -> str:
    """Return what the user reads about a stopped run; in_program: a Python program trains it, not a command."""
    run = shown(folder)
    again = f'program with run="{run}"' if in_program else f"`tpuswarm train` command with --run {run}"
    return f"{run}: {message}. To resume: the same {again}"


def removed_sentence(folder: Path) -> str:
    return f"{shown(folder)} was removed: it stopped before there was anything to keep"


def read_life(folder: Path) -> Life:
    """Whether a run lives, by its lock and its events."""
    pid = holder_pid(folder)
    if pid is not None:
        return Life("running", pid, "")
    last = last_event(folder)
    return Life(last["event"], None, last.get("message", "")) if last else Life("killed", None, "")


def last_event(folder: Path) -> dict[str, Any]:
    """How the last process of a run ended, as its events say; empty where it was killed, or lives."""
    ends = (row for row in read_rows_back(folder / EVENTS, *_ENDS) if row["event"] in ("started", *END_EVENTS))
    last = next(ends, {"event": "started"})
    return last if last["event"] in END_EVENTS else {}
