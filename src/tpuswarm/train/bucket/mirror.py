"""A run in a bucket, and its copy in a folder of this disk.

A process works on the copy as on any run; what it writes is sent every few seconds: files that only grow as immutable
pieces, named by the bytes that they hold, all others whole, checkpoints with their manifest last. A swarm's record is
not sent from here: swarm/storage/store.py writes it to the bucket first. A secret never leaves the disk.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.bucket import lease
from tpuswarm.train.bucket.pieces import PIECES, Piece, by_file, chain, grows
from tpuswarm.train.bucket.stored import Bucket, Held
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.computer import lock_holder
from tpuswarm.train.process.platform import cache_folder

ORIGIN, INDEX, PULLING, HOLDER = "bucket", ".mirror.json", ".pulling", ".holder.json"
FILES, CHECKPOINTS = "files/", "checkpoints/"
MANIFEST = "manifest.json"
ROWS = "metrics.jsonl"
BEST = "best.json"
"""Names the checkpoint that is kept besides the newest (train/run/best.py)."""
OWN = {"commits", "headers", "objects", "payloads", "views", "members", "founding.json"}
"""What a swarm's store writes, and what follows from the metrics."""
LOCK = "lock"
HERE = {LOCK, "token", "index.sqlite", ORIGIN}
"""What says something of this machine alone, or is secret; earlier versions left an index of the ledger."""
BORN = "files/born"
"""Random, and written once for each run: one that was deleted and begun anew in its place has another one."""
MERGED = 256
"""Pieces of a file that become one."""
LARGE = 2**23
"""Bytes of a file that a command brings only where it needs it."""
READERS = 16


def origin(folder: Path) -> str | None:
    """The URL of the run that a folder is a copy of; None for a run of this disk."""
    path = folder / ORIGIN
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def shown(folder: Path) -> str:
    """What a person calls a run."""
    return origin(folder) or str(folder)


def is_url(run: str) -> bool:
    """Whether a run is meant that lies in a bucket. Raises InputError for a URL of another kind."""
    scheme, apart, rest = run.partition("://")
    if not apart:
        return False
    if scheme != "gs" or not rest.strip("/").count("/"):
        raise InputError(f"a run is a local folder or gs://BUCKET/FOLDER, not {run}")
    return True


def folder_of(url: str) -> Path:
    """Where on this disk the copy of a run is, made if it is not there; nothing is brought yet."""
    url = url.rstrip("/")
    folder = cache_folder("runs") / url.removeprefix("gs://")
    folder.mkdir(parents=True, exist_ok=True)
    if origin(folder) != url:
        write_atomically(folder / ORIGIN, url)
    return folder


def folder_for(run: str) -> Path:
    """Where a run is, or is to be, on this disk; of one in a bucket its copy, as it is there now."""
    if not is_url(run):
        return Path(run)
    folder = folder_of(run)
    Mirror(folder).pull()
    return folder


def bring(url: str, whole: bool = False) -> Path:
    """The copy of a run as it is in its bucket now; whole: with large files and the newest checkpoint.

    Raises InputError where there is no such run, or no such bucket.
    """
    folder = folder_of(url)
    if lock_holder(folder / LOCK) is not None:  # its copy is ahead of the bucket
        return folder
    try:
        found = Mirror(folder).pull(whole)
    except FileNotFoundError as error:
        raise InputError(f"{url}: there is no such bucket, or you may not look into it") from error
    if not found:
        raise InputError(f"there is no run at {url}; `tpuswarm train --run {url}` begins one")
    return folder


def refresh(folder: Path, large: str | None = None) -> None:
    """See what has happened in a bucket since; nothing for a run of this disk.

    large: a folder of the run from which large files come too.
    """
    if origin(folder) and lock_holder(folder / LOCK) is None:
        Mirror(folder).pull(large=large)


class Mirror:
    """The bucket's side and this disk's side of one run."""

    def __init__(self, folder: Path):
        self.folder, self.url = folder, str(origin(folder))
        self.bucket = Bucket(self.url)
        self.owner = ""
        """Who has written this copy last."""
        self._files: dict[str, list[Any]] = {}
        """Of each: size and time of change here, and version there."""
        self._pieces: dict[str, list[Piece]] = {}
        self._saved: set[str] = set()
        """The checkpoints that are there."""
        self._ours = True
        """Whether nobody else has written the run since this copy: what it has sent is then what is there."""
        self._born: str | None = None
        """The version of BORN, of the run that this is a copy of; None: nothing was brought yet."""
        self._load()

    def _load(self) -> None:
        try:
            found = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return
        self.owner, self._files, self._saved = found["owner"], found["files"], set(found["saved"])
        self._pieces = {name: [Piece(*each) for each in pieces] for name, pieces in found["pieces"].items()}
        self._born = found["born"]

    # From the bucket.

    def forget(self) -> None:
        """Somebody else has written the run since: nothing of this copy counts, apart from the immutable record."""
        for name in (*self._files, *self._pieces):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
        self._files, self._pieces, self._saved = {}, {}, set()
        self._keep()

    def own(self, owner: str) -> None:
        """Who writes this copy from now on."""
        self.owner = owner
        self._keep()

    def begin(self) -> None:
        """Mark the run as one of its own, if it is a new one; for whoever holds it."""
        self.bucket.create(BORN, secrets.token_hex(16).encode())

    def pull(self, whole: bool = False, large: str | None = None) -> bool:
        """Make the copy what the bucket has; whether that is anything. whole, large: as in `bring` and `refresh`."""
        with self._alone():
            owner = self._see_holder()
            self._ours = owner in ("", self.owner)
            files, pieces = self.bucket.listed(FILES), self.bucket.listed(PIECES)
            born = files.pop(BORN).version if BORN in files else ""
            if self._born not in (None, born):
                self._wipe()
            self._born = born
            below = (FILES,) if whole else (f"{FILES}{large}/",) if large else ()
            wanted = {name: each for name, each in files.items() if name.startswith(below) or each.size <= LARGE}
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(lambda name: self._pull_file(name.removeprefix(FILES), wanted[name]), wanted))
            grown = {name: self._pull_pieces(name, found) for name, found in by_file(pieces).items()}
            if (since := grown.get(ROWS)) is not None:
                self._split_members(since)
            if whole:
                self._pull_checkpoints()
            self._keep()
        return bool(files)

    def _wipe(self) -> None:
        """The run is another one: nothing of this copy is of it, its record neither."""
        for path in self.folder.iterdir():
            if path.name in {ORIGIN, PULLING, LOCK, "token"}:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._files, self._pieces, self._saved = {}, {}, set()

    def _pull_file(self, name: str, about: Held) -> None:
        here, path = self._files.get(name), self.folder / name
        if here and path.exists() and (here[2] == about.version or (self._ours and not here[2])):
            return
        self.bucket.fetch(FILES + name, path)
        os.utime(path, (about.written, about.written))
        self._files[name] = [*_stamp(path), about.version]

    def _pull_pieces(self, name: str, found: list[tuple[Piece, float]]) -> int | None:
        """Append what is new: how much of the file is what it was, in bytes, 0 where some was cut off; None: all."""
        path = self.folder / name
        before = self._pieces.get(name, []) if path.exists() else []
        chosen = chain([piece for piece, _ in found])
        same = 0
        for old, new in zip(before, chosen, strict=False):
            if old[:2] != new[:2] or not (old.version == new.version or (self._ours and not old.version)):
                break
            same += 1
        if not chosen or same == len(chosen) == len(before):  # without its beginning: it is being sent anew, or removed
            return None
        start = chosen[same].start if same < len(chosen) else chosen[-1].end if chosen else 0
        appended = path.exists() and path.stat().st_size == start
        path.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(READERS) as pool, path.open("ab") as file:
            file.truncate(start)
            for data in pool.map(lambda each: self.bucket.read(f"{PIECES}{name}/{each.name}"), chosen[same:]):
                file.write(data)
        written = max(at for _, at in found)
        os.utime(path, (written, written))
        self._pieces[name] = chosen
        return start if appended else 0

    def _split_members(self, since: int) -> None:
        """The members' own files: each row of the run's says whose it is. Those before `since` are there."""
        with (self.folder / ROWS).open("rb") as file:
            file.seek(max(0, since - 1))
            new = file.read()
        if since and not new.startswith(b"\n"):  # a piece ended within a line
            self._split_members(0)
            return
        rows: dict[str, list[bytes]] = {}
        for line in new.splitlines(keepends=True):
            with suppress(ValueError):
                if member := json.loads(line).get("member"):
                    rows.setdefault(str(member), []).append(line)
        for member, lines in rows.items():
            own = self.folder / "members" / member / ROWS
            own.parent.mkdir(parents=True, exist_ok=True)
            with own.open("ab" if since else "wb") as file:
                file.writelines(lines)

    def _pull_checkpoints(self) -> None:
        """The newest whole one, and the best where one is kept: what has no manifest was not sent to its end."""
        listed = self.bucket.listed(CHECKPOINTS)
        steps = sorted(name.split("/")[1] for name in listed if name.endswith(f"/{MANIFEST}") and name.count("/") == 2)
        self._saved = set(steps)
        for step in {*steps[-1:], *({best_of(self.folder)} & set(steps))}:
            if (self.folder / CHECKPOINTS / step / MANIFEST).exists():
                continue
            names = [name for name in listed if name.split("/")[1] == step]
            names.sort(key=lambda name: name.endswith(f"/{MANIFEST}"))
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(lambda name: self.bucket.fetch(name, self.folder / name), names[:-1]))
            self.bucket.fetch(names[-1], self.folder / names[-1])

    def _see_holder(self) -> str:
        """Whoever has had the run last; empty: nobody."""
        found = lease.newest(self.bucket)
        if not found:
            return ""
        _, holder, age = found
        write_atomically(self.folder / HOLDER, json.dumps({**holder.__dict__, "age": age}))
        return holder.owner

    # To the bucket.

    def push(self, assure: Callable[[], None]) -> None:
        """Send what has changed here since; for whoever holds the run. assure: raises where that is another by now."""
        whole: list[str] = []
        growing: list[str] = []
        for path in self._walk():
            (growing if grows(path) else whole).append(path.relative_to(self.folder).as_posix())
        whole.sort(key=lambda name: (name == "config.toml", name))  # what it names is there before it
        for name in whole:
            if name != BEST:
                assure()
                self._push_file(name)
        for name in growing:
            assure()
            with suppress(FileNotFoundError):  # removed since
                self._push_pieces(name)
        self._push_checkpoints(assure)
        for name in [name for name in self._files if not (self.folder / name).exists()]:
            assure()
            self.bucket.delete(FILES + name)
            del self._files[name]
        self._keep()

    def _walk(self) -> Iterator[Path]:
        for path in sorted(self.folder.rglob("*")):
            parts = path.relative_to(self.folder).parts
            if parts[0] in OWN | HERE | {CHECKPOINTS.rstrip("/")} or any(part.startswith(".") for part in parts):
                continue
            if path.is_file() and not re.search(r"\.part$|\.\d+$|-journal$|-wal$|-shm$", path.name):
                yield path

    def _push_file(self, name: str) -> None:
        path = self.folder / name
        with suppress(FileNotFoundError):
            now = _stamp(path)
            if self._files.get(name, [])[:2] != now:
                self.bucket.put_file(FILES + name, path)
                self._files[name] = [*now, ""]

    def _push_pieces(self, name: str) -> None:
        pieces, size = self._pieces.setdefault(name, []), (self.folder / name).stat().st_size
        sent = pieces[-1].end if pieces else 0
        if size < sent:  # cut back to a checkpoint: what stays is one piece, and then the others go
            kept = [Piece(0, size, "")] if size else []
            if size:
                self._send_piece(name, kept[0])
            self._drop(name, [each for each in pieces if each.name not in {piece.name for piece in kept}])
            self._pieces[name] = kept
            return
        if size > sent:
            piece = Piece(sent, size, "")
            self._send_piece(name, piece)
            pieces.append(piece)
        if len(pieces) >= MERGED:
            merged = Piece(0, size, "")
            self._send_piece(name, merged)
            self._drop(name, pieces)
            self._pieces[name] = [merged]

    def _send_piece(self, name: str, piece: Piece) -> None:
        with (self.folder / name).open("rb") as file:
            file.seek(piece.start)
            self.bucket.create(f"{PIECES}{name}/{piece.name}", file.read(piece.end - piece.start))

    def _drop(self, name: str, pieces: Iterable[Piece]) -> None:
        for piece in reversed(list(pieces)):
            self.bucket.delete(f"{PIECES}{name}/{piece.name}")

    def _push_checkpoints(self, assure: Callable[[], None]) -> None:
        """Each that is whole here and not there; then the name of the best, and those go there that are gone here."""
        here = {path.parent.name for path in (self.folder / CHECKPOINTS).glob(f"[0-9]*/{MANIFEST}")}
        for step in sorted(here - self._saved):
            assure()
            files = sorted(path for path in (self.folder / CHECKPOINTS / step).rglob("*") if path.is_file())
            files.sort(key=lambda path: path.name == MANIFEST and path.parent.name == step)
            with suppress(FileNotFoundError), ThreadPoolExecutor(READERS) as pool:  # it may be pruned meanwhile
                list(pool.map(lambda path: self.bucket.put_file(self._name(path), path), files[:-1]))
                assure()
                self.bucket.put_file(self._name(files[-1]), files[-1])
                self._saved.add(step)
        if best_of(self.folder) in self._saved:
            assure()
            self._push_file(BEST)
        if gone := self._saved - here:
            listed = self.bucket.listed(CHECKPOINTS)
            whole = {name.split("/")[1] for name in listed if name.endswith(f"/{MANIFEST}") and name.count("/") == 2}
            # What was not sent to its end goes too; whole ones that this copy never had are another's.
            doomed = [name for name in listed if name.split("/")[1] in gone or name.split("/")[1] not in whole | here]
            for name in sorted(doomed, key=lambda name: not name.endswith(f"/{MANIFEST}")):
                assure()
                self.bucket.delete(name)
            self._saved &= here

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def clear(self) -> None:
        """Delete all of the run in the bucket: nothing came of it."""
        for name in self.bucket.listed(""):
            self.bucket.delete(name)

    def _keep(self) -> None:
        pieces = {name: [list(each) for each in pieces] for name, pieces in self._pieces.items()}
        with suppress(FileNotFoundError):  # its folder was removed: nothing came of the run
            index: dict[str, Any] = {"owner": self.owner, "files": self._files, "pieces": pieces}
            index |= {"saved": sorted(self._saved), "born": self._born}
            write_atomically(self.folder / INDEX, json.dumps(index))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Of several commands of this machine one brings the run at a time."""
        with (self.folder / PULLING).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._load()  # another one may have been here meanwhile
            yield


def best_of(folder: Path) -> str:
    """The folder of the best checkpoint of a run that keeps it; empty where there is none, or nobody can say."""
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return f"{json.loads((folder / BEST).read_text(encoding='utf-8'))['step']:08d}"
    return ""


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
