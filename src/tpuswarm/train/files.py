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


def write_atomically(path: Path, text: str) -> None:
    """Write a file, in the place of one that may be there."""
    with part(path).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part(path).replace(path)
    sync(path.parent)


def part(path: Path) -> Path:
    """Where a file is written before it is whole; a kill leaves it there."""
    return path.with_name(path.name + ".part")


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder that gets the name `path` when all is in it; InputError where something is there already."""
    if URL.match(str(path)):
        raise InputError(f"{path} is no local folder; name one, and copy it there afterwards")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path} is there already; name a folder that is new or empty")
    path = path.resolve()  # what a link names is replaced, not the link
    if path == Path.cwd():
        raise InputError(f"{path} is the folder you are in; name a new one within it")
    path.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        yield making
        for file in making.iterdir():
            file.chmod(0o644)  # some libraries write for their user alone
            sync(file)
        making.chmod(0o755)
        making.replace(path)
        sync(path.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
