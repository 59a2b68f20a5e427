"""Data in the form that it is trained on, in a folder: made once, brought to the members of a swarm."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpuswarm.train.process.atomic import partial_path, write_atomically
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import writing

ABOUT = "about.json"
"""What is in the folder; written last."""


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
        making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            write(making)
            try:
                making.rename(folder)
            except OSError:
                if not is_made(folder):
                    raise
        finally:
            shutil.rmtree(making, ignore_errors=True)


def share(made: Path, folder: Path, *names: str) -> None:
    """Copy files of a folder that is made, and what is said about them; nothing where that was done before."""
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder):
        if not is_made(folder):
            for name in names:
                with waiting(f"copying {name} into the run"):
                    shutil.copyfile(made / name, partial_path(folder / name))
                partial_path(folder / name).replace(folder / name)
            write_atomically(folder / ABOUT, (made / ABOUT).read_text())
