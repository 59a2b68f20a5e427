"""The folders of the demos in several places, which the next demo replaces."""

import shutil
from pathlib import Path

from tpuswarm.errors import InputError


def prepare_folder(folder: Path) -> None:
    """Make an empty folder in place of an earlier demo's. Raise InputError for a folder that is no demo's."""
    marker = folder / f".{folder.name}"
    if folder.exists() and not marker.exists():
        raise InputError(f"{folder} is not a demo's, and the demo would replace it. Rename it, or use another folder.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    marker.touch()
