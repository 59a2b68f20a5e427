"""Store the last synced folder on this computer, for machines that are created later."""

import hashlib
import json
import os
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
from tpuswarm.remote.sync.listing import list_files, refuse_secrets
from tpuswarm.train.process.atomic import write_atomically

CHUNK_BYTES = 1 << 18
UNSURE_S = 2.0
"""A file changed so shortly before it was read may change again within the same tick of its disk's clock."""


class File(NamedTuple):
    """One file of a tree."""

    digest: str
    """SHA-256 of its content, or of a link's target."""
    size: int
    """Bytes."""
    kind: Literal["file", "program", "link"]


@dataclass(frozen=True)
class Tree:
    """A folder at one moment."""

    name: str
    files: Mapping[str, File]
    """By relative path."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all paths, contents and kinds."""
        lines = sorted(f"{path}\0{file.digest}\0{file.kind}\n" for path, file in self.files.items())
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


class Stat(NamedTuple):
    """Identifies an unchanged file without reading it."""

    size: int
    changed_ns: int
    """Also `cp -p` and chmod set it."""
    inode: int


class TreeStore:
    """A folder with a tree, `tree.json`, and the contents of its files in `objects`, by digest."""

    def __init__(self, folder: Path):
        self._index, self._objects = folder / "tree.json", folder / "objects"

    def load(self) -> Tree | None:
        """Return the stored tree; None if there is none, or it is damaged."""
        index = self._read_index()
        return None if index is None else Tree(index["name"], {path: row[0] for path, row in index["files"].items()})

    def take(self, root: Path, confirm: Callable[[int, int], None]) -> Tree:
        """Store the current files of a folder. Raise InputError for secrets, and if git cannot list it.

        confirm: called with the bytes of all files, and of new or changed ones, before any is read; raises to refuse.
        """
        start_ns = time.time_ns()
        names = list_files(root)
        prefix = f"{root}{os.sep}"  # creating a Path takes longer than the lstat
        stats = {name: os.lstat(prefix + name) for name in names}
        before = self._read_index() if self._objects.exists() else None
        rows = before["files"] if before else {}
        unchanged = {name: file for name, (file, seen) in rows.items() if name in stats and seen == _stat(stats[name])}
        confirm(
            sum(about.st_size for about in stats.values()),
            sum(about.st_size for name, about in stats.items() if name not in unchanged),
        )
        refuse_secrets(root, (name for name in names if name not in unchanged))
        files = {name: unchanged.get(name) or self._add(root / name, stats[name]) for name in names}
        if len(unchanged) < len(files) or rows.keys() != files.keys():
            sure_before_ns = start_ns - int(UNSURE_S * 1e9)
            is_sure = {name: about.st_ctime_ns < sure_before_ns for name, about in stats.items()}
            new = {name: (file, _stat(stats[name]) if is_sure[name] else None) for name, file in files.items()}
            write_atomically(self._index, json.dumps({"name": root.name, "files": new}), is_shared=True)
            self._delete_others({file.digest for file in files.values()})
        return Tree(root.name, files)

    def pack(self, files: Iterable[File]) -> IO[bytes]:
        """Return an open temporary file with the contents of these files, concatenated and compressed."""
        packed = tempfile.TemporaryFile(prefix="tpuswarm-")  # noqa: SIM115
        compressor = zlib.compressobj(1)
        for file in files:
            with (self._objects / file.digest).open("rb") as content:
                while chunk := content.read(CHUNK_BYTES):
                    packed.write(compressor.compress(chunk))
        packed.write(compressor.flush())
        packed.flush()
        return packed

    def _read_index(self) -> dict[str, Any] | None:
        try:
            index = json.loads(self._index.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        rows = index["files"].items()
        files = {path: (File(*file), Stat(*seen) if seen else None) for path, (file, seen) in rows}
        return {"name": index["name"], "files": files}

    def _add(self, path: Path, about: os.stat_result) -> File:
        self._objects.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(about.st_mode):
            target = os.fsencode(path.readlink())
            file = File(hashlib.sha256(target).hexdigest(), len(target), "link")
            (self._objects / file.digest).write_bytes(target)
            return file
        digest, size = hashlib.sha256(), 0
        part = self._objects / f".{os.getpid()}.part"
        try:
            with path.open("rb") as source, part.open("wb") as copy:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    copy.write(chunk)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise RunFailed(f"{path} cannot be read: {error.strerror}") from error
        part.replace(self._objects / digest.hexdigest())
        return File(digest.hexdigest(), size, "program" if about.st_mode & stat.S_IXUSR else "file")

    def _delete_others(self, digests: set[str]) -> None:
        for path in self._objects.iterdir() if self._objects.exists() else ():
            if path.name not in digests:
                path.unlink()


def _stat(about: os.stat_result) -> Stat:
    return Stat(about.st_size, about.st_ctime_ns, about.st_ino)
