"""A folder as it was when it was sent last, kept on this computer: machines that come later get the very same files."""

import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tpuswarm.errors import RunFailed
from tpuswarm.remote.sync.listed import listed, refuse_secrets
from tpuswarm.train.process.atomic import write_atomically

CHUNK = 1 << 18
SURE_S = 2.0
"""A file that was written so shortly before it was read may have changed again without another time of its own."""


class File(NamedTuple):
    """One file of a tree."""

    digest: str
    """SHA-256 of what is in it, or of where a link leads."""
    size: int
    """Bytes."""
    kind: Literal["file", "program", "link"]


@dataclass(frozen=True)
class Tree:
    """A folder at one moment."""

    name: str
    """The folder's own."""
    files: Mapping[str, File]

    @cached_property
    def digest(self) -> str:
        """Of the whole tree."""
        lines = sorted(f"{path}\0{each.digest}\0{each.kind}\n" for path, each in self.files.items())
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(each.size for each in self.files.values())


class Seen(NamedTuple):
    """A file as `stat` shows it: what tells an unchanged file without reading it."""

    size: int
    written: int
    inode: int


class KeptTree:
    """A folder of this computer with a tree and the content of all its files."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._index, self._objects = folder / "tree.json", folder / "objects"

    def load(self) -> Tree | None:
        """The tree that was kept last; None: there is none that can be read."""
        found = self._read()
        if found is None:
            return None
        return Tree(found["name"], {path: File(*each[0]) for path, each in found["files"].items()})

    def take(self, root: Path, agree: Callable[[int, int], None]) -> Tree:
        """Keep a folder as it is now. Raises InputError for what may not or cannot be sent.

        agree: called before anything of it is read with the bytes of all files, and of those that are new or changed;
        raises where a person says no.
        """
        begun = time.time_ns()
        names = listed(root)
        at = f"{root}{os.sep}"  # thousands of names: a Path for each takes longer than to look at the file
        looked = {name: os.lstat(at + name) for name in names}
        before = (self._read() or {"files": {}}) if self._objects.exists() else {"files": {}}
        known = {
            name: File(*there[0])
            for name, there in before["files"].items()
            if name in looked and tuple(there[1]) == _seen(looked[name])
        }
        agree(
            sum(each.st_size for each in looked.values()),
            sum(each.st_size for name, each in looked.items() if name not in known),
        )
        refuse_secrets(root, (name for name in names if name not in known))
        files = {name: known.get(name) or self._keep(root / name, looked[name]) for name in names}
        sure = begun - int(SURE_S * 1e9)
        rows = {
            name: (each, _seen(looked[name]) if looked[name].st_mtime_ns < sure else None)
            for name, each in files.items()
        }
        if any(name not in known for name in names) or before["files"].keys() != files.keys():
            write_atomically(self._index, json.dumps({"name": root.name, "files": rows}))
            self._forget(each.digest for each in files.values())
        return Tree(root.name, files)

    def open(self, file: File) -> IO[bytes]:
        """What is in a file of the tree."""
        return (self._objects / file.digest).open("rb")

    def pack(self, files: Iterable[File]) -> IO[bytes]:
        """What is in these files, one after the other and compressed."""
        packed = tempfile.TemporaryFile(prefix="tpuswarm-")  # noqa: SIM115  # the caller's to close
        squeeze = zlib.compressobj(1)
        for each in files:
            with self.open(each) as content:
                while chunk := content.read(CHUNK):
                    packed.write(squeeze.compress(chunk))
        packed.write(squeeze.flush())
        packed.flush()
        return packed

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._index.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        for each in found["files"].values():
            each[1] = each[1] or ()
        return found

    def _keep(self, path: Path, seen: os.stat_result) -> File:
        self._objects.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(seen.st_mode):
            target = os.fsencode(path.readlink())
            file = File(hashlib.sha256(target).hexdigest(), len(target), "link")
            (self._objects / file.digest).write_bytes(target)
            return file
        digest, size = hashlib.sha256(), 0
        part = self._objects / f".{os.getpid()}.part"
        try:
            with path.open("rb") as source, part.open("wb") as copy:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    copy.write(chunk)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise RunFailed(f"{path} cannot be read: {error.strerror}") from error
        part.replace(self._objects / digest.hexdigest())
        return File(digest.hexdigest(), size, "program" if seen.st_mode & stat.S_IXUSR else "file")

    def _forget(self, kept: Iterable[str]) -> None:
        wanted = set(kept)
        for each in self._objects.iterdir() if self._objects.exists() else ():
            if each.name not in wanted:
                each.unlink()

    def delete(self) -> None:
        """All of it."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _seen(about: os.stat_result) -> Seen:
    return Seen(about.st_size, about.st_mtime_ns, about.st_ino)


@dataclass(frozen=True)
class Change:
    """What has to happen on a host so that it has a tree."""

    send: tuple[str, ...]
    delete: tuple[str, ...]
    edited: tuple[str, ...]
    """What was changed there since it was sent, or made there, and is overwritten or deleted."""


def difference(tree: Tree, there: Mapping[str, tuple[str, str]], edited: Iterable[str]) -> Change:
    """From what a host has of what was sent to it, as (digest, kind) by path."""
    send = tuple(path for path, each in tree.files.items() if there.get(path) != (each.digest, each.kind))
    delete = tuple(sorted(path for path in there if path not in tree.files))
    lost = {*send, *delete}
    return Change(send, delete, tuple(sorted(path for path in edited if path in lost)))
