"""Files that are there whole or not at all, also after a power cut."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tpuswarm.errors import InputError

URL = re.compile(r"\w+:/")
"""How a path looks that was a URL."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, in the place of one that may be there."""
    with partial_path(path).open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    partial_path(path).replace(path)
    fsync_path(path.parent)


def partial_path(path: Path) -> Path:
    """Where a file is written before it is whole; a kill leaves it there."""
    return path.with_name(path.name + ".part")


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A new folder that gets the name `path` when all is in it; InputError where it cannot be new."""
    require_new_folder(path)
    path = path.resolve()  # what a link names is replaced, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        yield making
        for file in making.iterdir():
            file.chmod(0o644)  # some libraries write for their user alone
            fsync_path(file)
        making.chmod(0o755)
        making.replace(path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def require_new_folder(path: Path) -> None:
    """Raise InputError for what is no local folder, and where something is already; touches nothing."""
    if URL.match(str(path)):
        raise InputError(f"{path} is not a local folder; use one, and copy it afterwards")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path} already exists; use a new or empty folder")
    if path.resolve() == Path.cwd():
        raise InputError(f"{path} is the current folder; use a new one inside it")
