"""Folders of prepared training data: written once in the user's cache, copied to the members of a swarm."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpuswarm.train.process.atomic import partial_path, write_atomically
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import writing

DESCRIPTION = "about.json"
"""Describes the folder's files, with a digest; written last."""


def is_complete(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def read_description(folder: Path) -> dict[str, Any]:
    return json.loads((folder / DESCRIPTION).read_text())


def cached_folder(kind: str, identity: str) -> Path:
    """Return the folder in the cache for data of this identity."""
    return cache_folder(kind) / hashlib.sha256(identity.encode()).hexdigest()[:32]


def write_once(folder: Path | None, kind: str, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a new folder, then rename it to `folder`; if two processes do so, the first one's stays.

    Without `folder` the name follows from the description.
    """
    parent = cache_folder(kind)
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(suffix=".part", dir=parent))
        try:
            write(partial)
            folder = folder or cached_folder(kind, (partial / DESCRIPTION).read_text())
            try:
                partial.rename(folder)
            except OSError:
                if not is_complete(folder):
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


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
