"""Files that are there whole or not at all, also after a power cut."""

import os
from pathlib import Path


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
