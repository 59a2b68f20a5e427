"""Damage files and folders of a run, as disks, editors, backups and other programs do."""

import ctypes
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

NUMBER = re.compile(rb"-?\d+(\.\d+)?")
VALUES = (b'"many"', b"-1", b"0", b"1e400", b"null", b"[]", b"99999999999999999999", b"nan", b"", b"\0\xff")
KINDS = ("gone", "folder", "dangling", "loop", "value", "value", "cut", "empty", "line", "noise", "flip", "flip")
"""Kinds of `damage`; folders know only the first four, and become files by the others."""
MS_RDONLY, MS_REMOUNT, MS_BIND, MNT_DETACH = 1, 32, 4096, 2
libc = ctypes.CDLL(None, use_errno=True)


def damage(path: Path, kind: str, random: Random) -> None:
    """Damage a file or folder; a link stays as it is."""
    if path.is_symlink():
        return
    data = path.read_bytes() if path.is_file() else b""
    numbers = list(NUMBER.finditer(data))
    if kind in ("gone", "folder", "dangling", "loop") or path.is_dir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind in ("dangling", "loop"):
            path.symlink_to(path if kind == "loop" else "nowhere")
        elif kind != "gone":
            path.write_bytes(b"a file in the place of a folder")
    elif kind == "value" and numbers:
        match = random.choice(numbers)
        path.write_bytes(data[: match.start()] + random.choice(VALUES) + data[match.end() :])
    elif kind == "cut":
        path.write_bytes(data[: random.randrange(len(data) + 1)])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "line" and data:
        lines = data.splitlines(keepends=True)
        del lines[random.randrange(len(lines))]
        path.write_bytes(b"".join(lines))
    elif kind == "noise":
        path.write_bytes(random.randbytes(200))
    elif data:
        at = random.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :])


def replace_by_older(path: Path, others: Sequence[Path]) -> bool:
    """Replace a file or folder by the first of `others` that differs, and keep its times; False if none does."""
    about = path.stat()
    for other in others:
        if other.is_dir() and path.is_dir():
            shutil.rmtree(path)
            shutil.copytree(other, path, symlinks=True)
        elif other.is_file() and path.is_file() and other.read_bytes() != path.read_bytes():
            path.write_bytes(other.read_bytes())
        else:
            continue
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        return True
    return False


def move_to_another_place(path: Path, place: Path) -> None:
    """Move a file or folder and leave a link to it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, place)
    path.symlink_to(place)


class Mounts:
    """Mounts of files and folders on themselves, in a mount namespace of this process: for root alone."""

    def __init__(self) -> None:
        self._others = _mount_points()

    def add(self, path: Path, is_read_only: bool = False) -> None:
        """Make a file or folder busy, as a server of NFS does: it can be read and written, not renamed or removed."""
        self._mount(path, MS_BIND)
        if is_read_only:
            self._mount(path, MS_BIND | MS_REMOUNT | MS_RDONLY)

    def clear(self) -> None:
        """Remove all mounts of this object, wherever their folders have been moved."""
        for path in reversed(_mount_points()[len(self._others) :]):
            libc.umount2(path, MNT_DETACH)

    def _mount(self, path: Path, flags: int) -> None:
        if libc.mount(os.fsencode(path), os.fsencode(path), None, flags, None):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))


def _mount_points() -> list[bytes]:
    """Return the mount points of this process, the newest last."""
    return [line.split()[4] for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]
