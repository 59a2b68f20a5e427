"""Folders of prepared training data: written once in the user's cache, copied to the members of a swarm."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpuswarm.train.process.atomic import partial_path, write_atomically
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import writing

DESCRIPTION = "about.json"
"""Describes the folder's files; written last."""


def is_complete(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def read_description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / DESCRIPTION).read_text())


def write_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder, then rename it to `folder`; if two processes do so, the first one's stays."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            write(partial)
            try:
                partial.rename(folder)
            except OSError:
                if not is_complete(folder):
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def copy_files(source: Path, folder: Path, *names: str) -> None:
    """Copy files and the description of a complete folder, unless `folder` is complete already."""
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder):
        if not is_complete(folder):
            for name in names:
                with waiting(f"copying {name} into the run"):
                    shutil.copyfile(source / name, partial_path(folder / name))
                partial_path(folder / name).replace(folder / name)
            write_atomically(folder / DESCRIPTION, (source / DESCRIPTION).read_text())
