"""Moments in the life of a command, for tests that interrupt it there."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.terminal import Terminal
from tpuswarm.train.run.directory import METRICS

MODEL = ["--data", "fake", "--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "8"]
TRAIN = ["train", "gpt2-tiny", *MODEL, "--steps", "1000000", "--run", "runs/a"]
Moment = Callable[[Terminal, Path], bool]


def maps(name: str) -> Moment:
    """The process has mapped a shared object of that name."""
    return lambda terminal, folder: name in Path(f"/proc/{terminal.process.pid}/maps").read_text()


def contains(name: str) -> Moment:
    """The run's folder contains that file, and it is not empty."""
    return lambda terminal, folder: (folder / name).exists() and bool((folder / name).stat().st_size)


def has_child(name: str) -> Moment:
    """The process has printed something and started a child with that name."""
    return lambda terminal, folder: (
        terminal.read() and any(name in command for command in processes_of(terminal.process.pid))
    )


def wait_until(moment: Moment, terminal: Terminal, folder: Path) -> None:
    """Wait for a moment before the first step; fail at the end of the process."""
    trains = contains(METRICS)
    while not moment(terminal, folder):
        assert terminal.process.poll() is None, terminal.finish()
        assert not trains(terminal, folder) or moment(terminal, folder), "it trains already"
        time.sleep(0.001)


def processes_of(session: int) -> list[str]:
    """Return the command lines of all processes in a session."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) == session:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except (OSError, ProcessLookupError):
            continue
    return found
