"""Data in the form that it is trained on, in a folder: made once, brought to the members of a swarm."""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.run.directory import writing

ABOUT = "about.json"
"""What is in the folder; written last."""
NEW = 60.0
"""Seconds for which a folder that nobody holds may have just been made."""


def is_made(folder: Path) -> bool:
    """Whether all of it is there."""
    return (folder / ABOUT).is_file()


def about(folder: Path) -> dict[str, Any]:
    """What is in a folder that is made."""
    return json.loads((folder / ABOUT).read_text())


def make(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, then name it `folder`; of two processes that do so the first one's is kept."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(folder)
        making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        held = os.open(making, os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            write(making)
            try:
                making.rename(folder)
            except OSError:
                if not is_made(folder):
                    raise
        finally:
            os.close(held)
            shutil.rmtree(making, ignore_errors=True)


def _remove_left(folder: Path) -> None:
    """What killed processes have left of it: one that is at work holds its own, from a moment after it was made."""
    for left in folder.parent.glob(f"{folder.name}.*"):
        with suppress(FileNotFoundError, BlockingIOError):
            if time.time() - left.stat().st_mtime < NEW:
                continue
            held = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(held)


def share(made: Path, folder: Path, *names: str) -> None:
    """Copy files of a folder that is made, and what is said about them; nothing where that was done before."""
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder):
        if not is_made(folder):
            for name in names:
                shutil.copyfile(made / name, folder / name)
            write_atomically(folder / ABOUT, (made / ABOUT).read_text())
