"""Whether a run lives, how it ended if it does not, and what is said then."""

import mmap
from pathlib import Path
from typing import Any, NamedTuple

from tpuswarm.train.bucket.mirror import shown
from tpuswarm.train.run.directory import EVENTS, holder, reading
from tpuswarm.train.run.schema import parse_row

LAST = ("finished", "stopped", "failed")
"""Events that end a process's work on a run; without one of them it was killed."""

_ENDS = tuple(f'"event": "{each}"'.encode() for each in ("started", *LAST))


class Life(NamedTuple):
    """Whether a run lives, and how it ended if it does not."""

    state: str
    """running, finished, stopped, failed, or killed (its process is gone without a word)."""
    pid: int | None
    """0 for a moment while a process takes the run."""
    message: str
    """Why it stopped or failed, where it did."""


def stopped_sentence(folder: Path, message: str) -> str:
    """What is said of a run that was asked to stop, in whatever way; message: of its last event."""
    run = shown(folder)
    return f"{run}: {message}; the same `tpuswarm train` command with --run {run} resumes it"


def removed_sentence(folder: Path) -> str:
    """What is said of one that had nothing to resume from."""
    return f"{shown(folder)} was removed: it stopped before there was anything to keep"


def read_life(folder: Path) -> Life:
    """Whether a run lives, by its lock and its events."""
    pid = holder(folder)
    if pid is not None:
        return Life("running", pid, "")
    last = last_event(folder)
    return Life(last["event"], None, last.get("message", "")) if last else Life("killed", None, "")


def last_event(folder: Path) -> dict[str, Any]:
    """How the last process of a run ended, as its events say; empty where it was killed, or lives."""
    path = folder / EVENTS
    if not path.exists() or not path.stat().st_size:
        return {}
    last: dict[str, Any] = {}
    with reading(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = len(text)
        while not last and (at := max(text.rfind(each, 0, at) for each in _ENDS)) >= 0:  # a line may be torn
            row = parse_row(EVENTS, text[text.rfind(b"\n", 0, at) + 1 : text.find(b"\n", at) + 1])
            last = row if row and row["event"] in ("started", *LAST) else {}
    return last if last.get("event") in LAST else {}
