"""The run directory: configuration, metrics, events, and the lock that keeps two processes out of one run."""

import errno
import fcntl
import itertools
import json
import os
import shlex
import shutil
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from tpuswarm.config.nearest import nearest_name
from tpuswarm.config.toml_file import read_toml
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.computer import read_lock_holder
from tpuswarm.train.run import schema
from tpuswarm.train.storage.folders import LOCK, ORIGIN, origin, shown
from tpuswarm.train.storage.sync import RunSync, owner_elsewhere

CONFIG, METRICS, EVENTS = "config.toml", schema.METRICS, schema.EVENTS
CHECKPOINTS, COMMITS = "checkpoints", "commits"
RUNS = Path("runs")
"""Where runs are that nobody named a place for."""
SAMPLE_EVENT = "sample"
"""The event of a text that the model made."""


class Run:
    """A run directory held by this process."""

    writes = True
    """Whether this process is the one that writes it."""

    def __init__(self, folder: Path | None, name: str = ""):
        """Make or take the directory, for None a new one in ./runs for a recipe's `name`.

        Of a run in a bucket it is the copy on this disk, which is brought up to date first (train/storage/copy.py).
        InputError if a living process has it, naming its pid, and if its files lack some.
        """
        place = folder or RUNS
        try:
            self._made = [each for each in (place, *place.parents) if not each.exists()]
            folder = folder or create_run_folder(name)
            require_usable(folder)
            self.folder = folder
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / LOCK).open("a+")
        except OSError as error:
            where = "" if error.filename in (None, str(place)) else f"{error.filename}: "
            raise InputError(
                f"{place} cannot be a run directory: {where}{error.strerror}; use another --run"
            ) from error
        if not self._take():
            raise _in_use(folder, holder_pid(folder))
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self._metrics: Any = None
        self._sync: RunSync | None = None
        if origin(folder):
            try:
                sync = RunSync(folder)
                sync.acquire()
                self._sync = sync
                require_whole(folder)
            except BaseException:
                self.close()
                raise

    def _take(self) -> bool:
        for _ in range(5):  # a look from `status` holds a shared lock for a moment
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(0.1)
        return False

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.folder / CHECKPOINTS

    def config(self) -> dict[str, Any] | None:
        """The resolved configuration; None in a new directory."""
        return read_config(self.folder) if (self.folder / CONFIG).exists() else None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.toml, whole or not at all."""
        with writing(self.folder / CONFIG):
            write_atomically(self.folder / CONFIG, tomli_w.dumps(dict(config)))

    def cut_metrics(self, step: int) -> int:
        """Cut metrics.jsonl back to the rows up to `step`, a torn last line included; how many lines went."""
        path = self.folder / METRICS
        if not path.exists():
            return 0
        with reading(path):
            lines = path.read_bytes().splitlines(keepends=True)
        kept = 0
        for number, line in enumerate(lines, 1):
            row = schema.parse_row(METRICS, line)
            if row and row["step"] > step:
                break
            kept = number if row else kept  # a damaged line with whole ones behind it stays
        with writing(path):
            os.truncate(path, sum(len(line) for line in lines[:kept]))
        if self._sync:  # before new rows make the file as long as it was: what lies in a bucket is told by its bytes
            self._sync.upload()
        return len(lines) - kept

    @property
    def in_bucket(self) -> bool:
        """Whether each look at its record is a request."""
        return self._sync is not None

    def upload_soon(self) -> None:
        """To a bucket, where the run is in one: somebody waits for what is new."""
        if self._sync:
            self._sync.upload_soon()

    def check(self) -> None:
        """Raise RunFailed where a run in a bucket is not this process's any more, or cannot be kept."""
        if self._sync:
            self._sync.check()

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one row and hand it to the operating system at once."""
        self.check()
        with writing(self.folder / METRICS):
            if self._metrics is None:
                self._metrics = (self.folder / METRICS).open("ab", buffering=0)
            self._metrics.write(json.dumps(row).encode() + b"\n")

    def write_event(self, event: str, **facts: Any) -> None:
        """Append one thing that happened to events.jsonl."""
        append_event(self.folder, event, **facts)

    def fail(self, why: str) -> None:
        """What a process that has to end at once leaves: its last event, or no directory if nothing came of it."""
        if (self.folder / CONFIG).exists():
            self.write_event("failed", message=why)
        else:
            self.abandon()

    def abandon(self) -> None:
        """Let the directory go, and remove it if nothing came of it."""
        if not (self.folder / CONFIG).exists():
            if self._sync:
                self.remove()
            (self.folder / LOCK).unlink(missing_ok=True)  # two threads may come to the end of a run
            for each in dict.fromkeys((self.folder, *self._made)):
                with suppress(OSError):  # it holds something else, or is gone
                    each.rmdir()
        self.close()

    def remove(self) -> None:
        """Remove all of it: nothing came of it."""
        if self._sync:
            self._sync.remove()
        shutil.rmtree(self.folder, ignore_errors=self._sync is not None)

    def close(self) -> None:
        """Let the directory go."""
        if self._metrics is not None:
            self._metrics.close()
        try:
            if self._sync:
                self._sync.close()
        except RunFailed as error:  # `tpuswarm stop` and `status` say what only this disk has
            if (self.folder / CONFIG).exists():
                with suppress(OSError, RunFailed):
                    self.write_event("failed", message=str(error))
            raise
        finally:
            self._lock.close()


class FollowedRun(Run):
    """A run directory that host 0 of several holds and writes, as another host sees it: reading is all that it does."""

    writes = False

    def __init__(self, folder: Path):
        """The directory may not be there before host 0 has come."""
        self.folder = folder

    def cut_metrics(self, step: int) -> int:
        """Nothing."""
        return 0

    def _nothing(self, *given: Any, **facts: Any) -> None: ...

    write_config = write_metrics = write_event = abandon = close = _nothing


def command_line() -> str:
    """What this process was started with, as it is typed."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def append_event(folder: Path, event: str, **facts: Any) -> None:
    """Append one thing that happened to the events.jsonl of the run in `folder`, which this process holds."""
    append_rows(folder / EVENTS, [{"time": time.time(), "event": event, **facts}])


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append objects to a JSON lines file, whose last line may be torn."""
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                lines = lines if file.read(1) == b"\n" else b"\n" + lines  # a killed process may leave a torn line
            file.write(lines)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, was about to become one, or is what damage left of one."""
    if (folder / LOCK).exists() or (folder / ORIGIN).exists() or _left_something(folder):
        return True
    try:
        return {"recipe", "train"} <= tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")).keys()
    except (OSError, ValueError):
        return False


def has_begun(folder: Path) -> bool:
    """Whether a folder is a run, or what is left of one, that more than a lock is there of."""
    return is_run(folder) and ((folder / CONFIG).exists() or _left_something(folder))


def _left_something(folder: Path) -> bool:
    return any((folder / name).exists() for name in (METRICS, EVENTS))


def require_not_in_use(folder: Path) -> None:
    """Raise InputError for a run that a living process of this machine has: said before there is a wait."""
    if origin(folder) is None and (pid := holder_pid(folder)) is not None:
        raise _in_use(folder, pid)


def _in_use(folder: Path, pid: int | None) -> InputError:
    return InputError(f"{shown(folder)} is in use by process {pid}; stop it first, or use another --run")


def require_usable(folder: Path) -> None:
    """Raise InputError for what can neither become a run nor be resumed."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a run directory")
    if folder.is_dir() and not is_run(folder) and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and is not a run; use a new or empty directory for --run")
    require_whole(folder)


def require_whole(folder: Path) -> None:
    """Raise InputError for a run without the files that it would go on from.

    No kill leaves one like this: config.toml is written first, and a checkpoint or commit is begun before any row.
    """

    def holds(name: str) -> bool:
        path = folder / name
        return any(each.name.removesuffix(".json").isdigit() for each in path.iterdir()) if path.is_dir() else False

    metrics = next(read_rows(folder / METRICS), None) is not None
    if (folder / CONFIG).exists():
        kept = COMMITS if "swarm" in read_config(folder) else CHECKPOINTS
        if metrics and not holds(kept) and not origin(folder):
            raise InputError(
                f"{folder} has {METRICS} but no {kept}/ to resume from; restore a copy of it, or use another --run to "
                "start over"
            )
    elif found := [METRICS] * metrics + [f"{name}/" for name in (CHECKPOINTS, COMMITS) if holds(name)]:
        raise InputError(
            f"{folder} has {' and '.join(found)} but no {CONFIG}, which says what was trained; restore a copy of it, "
            "or use another --run to start over"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run, as schema.py has it; InputError if the folder is no run, or it is damaged."""
    path = folder / CONFIG
    if not path.exists():
        if _left_something(folder):
            raise InputError(f"{folder} has no {CONFIG}, which says what was trained; restore a copy of it")
        what = f"is not a run (it has no {CONFIG})" if folder.exists() else "does not exist"
        near = nearest_name(
            folder.name, (each.name for each in Path("runs").glob("*") if has_begun(each)), min_similarity=0.6
        )
        more = f"; did you mean runs/{near}?" if near else ""
        raise InputError(f"{folder} {what}{more or '; `tpuswarm status` lists the runs in ./runs'}")
    try:
        read_toml(path, schema.Config)
    except InputError as error:
        if not is_run(folder):
            raise InputError(f"{folder} is not a run: its {CONFIG} belongs to something else") from error
        raise InputError(f"{error}; fix it, or restore a copy") from error
    return tomllib.loads(path.read_text(encoding="utf-8"))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of metrics.jsonl or events.jsonl; torn and damaged lines are left out. One is read at a time."""
    if path.exists():
        with reading(path), path.open("rb") as file:
            for line in file:
                row = schema.parse_row(path.name, line)
                if row is not None:
                    yield row


def read_rows_back(path: Path, *marks: bytes, chunk: int = 2**16) -> Iterator[dict[str, Any]]:
    """As `read_rows`, from the last row to the first; no more of the file is read than is asked for.

    A line that has none of `marks`, where given, is not parsed. The file may be cut meanwhile, as a run that resumes
    does: a memory map would end this process then.
    """
    if not path.exists():
        return
    with reading(path), path.open("rb") as file:
        start, cut = file.seek(0, os.SEEK_END), b""
        while start > 0:
            end, start = start, max(0, start - chunk)
            file.seek(start)
            block = file.read(end - start) + cut
            first = (block.find(b"\n") + 1 or len(block)) if start else 0
            cut, block = block[:first], block[first:]  # its beginning is before it
            for line in reversed(block.splitlines(keepends=True) if _has(block, marks) else []):
                row = schema.parse_row(path.name, line) if _has(line, marks) else None
                if row is not None:
                    yield row


def _has(text: bytes, marks: Sequence[bytes]) -> bool:
    return not marks or any(mark in text for mark in marks)


def holder_pid(folder: Path) -> int | None:
    """The pid of the living process that holds a run, 0 where it has not said it yet; None where there is none.

    Of a run in a bucket the process may be one of another machine: see `owner_elsewhere`.
    """
    with reading(folder / LOCK):
        pid = read_lock_holder(folder / LOCK)
    if pid is not None:
        return int(pid) if pid.isdigit() else 0
    far = owner_elsewhere(folder)
    return far.pid if far else None


def create_run_folder(name: str, runs: Path = RUNS) -> Path:
    """A new folder in ./runs with a name that was free: gpt2-tiny-1, gpt2-tiny-2, …; InputError where none can be."""
    try:
        runs.mkdir(exist_ok=True)
        for number in itertools.count(1):
            folder = runs / f"{name}-{number}"
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        reason = "it is a file" if runs.is_file() else error.strerror
        raise InputError(f"no run can be made in ./{runs}: {reason}; say where with --run") from error
    raise AssertionError("unreachable")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a failed read into InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into RunFailed with the way out."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason, way = ("the disk is full", "make room") if full else (error.strerror or error, "fix that")
        raise RunFailed(
            f"{path} could not be written: {reason}; what was saved or committed is safe: {way} and start the same "
            "command again"
        ) from error
