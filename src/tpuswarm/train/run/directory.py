"""Read and write a run directory: configuration, metrics, events, and the lock of the process that trains it."""

import errno
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
from tpuswarm.config.toml_file import FORMAT, read_toml
from tpuswarm.errors import InputError, RunFailed, UnknownFormat
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.locks import lock, read_lock_holder
from tpuswarm.train.run import schema
from tpuswarm.train.storage.folders import LOCK, ORIGIN, origin, shown
from tpuswarm.train.storage.sync import RunSync, owner_elsewhere

CONFIG, METRICS, EVENTS = "config.toml", schema.METRICS, schema.EVENTS
CHECKPOINTS, COMMITS = "checkpoints", "commits"
START, END = "# This file is whole if it has the line `# end`.", "# end"
"""First and last line of config.toml: TOML that is cut between two tables is still TOML."""
RUNS = Path("runs")
SAMPLE_EVENT = "sample"
"""A text that the model wrote."""


class Run:
    """A run directory that this process holds."""

    writes = True
    """False on all hosts but host 0."""

    def __init__(self, folder: Path | None, name: str = ""):
        """Lock the directory, or a new one in ./runs for a recipe's `name`; update the copy of a run in a bucket.

        Raises InputError if a living process holds it, naming its pid, if its file system has no locks, and if files
        are missing.
        """
        place = folder or RUNS
        try:
            self._created_folders = [path for path in (place, *place.parents) if not path.exists()]
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
        self._metrics: Any = None
        self._sync: RunSync | None = None
        try:
            is_locked = self._try_lock()
        except InputError:
            self.abandon()
            raise
        if not is_locked:
            raise _in_use(folder, holder_pid(folder))
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        if origin(folder):
            try:
                sync = RunSync(folder)
                sync.acquire()
                self._sync = sync
                require_whole(folder)
            except BaseException:
                self.close()
                raise

    def _try_lock(self) -> bool:
        for _ in range(5):  # `status` holds a shared lock for a moment
            try:
                lock(self._lock, "use another --run, on a local disk")
                return True
            except BlockingIOError:
                time.sleep(0.1)
        return False

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def config(self) -> dict[str, Any] | None:
        """Return the configuration; None in a new directory."""
        return read_config(self.folder) if (self.folder / CONFIG).exists() else None

    def write_config(self, config: Mapping[str, Any]) -> None:
        text = tomli_w.dumps({"format": FORMAT, **config})
        with writing(self.folder / CONFIG):
            write_atomically(self.folder / CONFIG, f"{START}\n{text}{END}\n")

    def cut_metrics(self, step: int) -> int:
        """Remove rows after `step` and a torn last line from metrics.jsonl; return the number of removed lines."""
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
            kept = number if row else kept  # keep a damaged line between intact ones
        with writing(path):
            os.truncate(path, sum(len(line) for line in lines[:kept]))
        self.upload()  # now: copies are compared by length, and new rows could restore the old one
        return len(lines) - kept

    @property
    def in_bucket(self) -> bool:
        return origin(self.folder) is not None

    def upload(self) -> None:
        """Upload what a run in a bucket lacks there."""
        if self._sync:
            self._sync.upload()

    def upload_soon(self) -> None:
        """Upload new rows to the run's bucket without the usual delay: a person waits for them."""
        if self._sync:
            self._sync.upload_soon()

    def check(self) -> None:
        """Raise RunFailed if this process has lost its run in a bucket, or cannot upload it."""
        if self._sync:
            self._sync.check()

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one row, unbuffered."""
        self.check()
        with writing(self.folder / METRICS):
            if self._metrics is None:
                self._metrics = (self.folder / METRICS).open("ab", buffering=0)
            self._metrics.write(json.dumps(row).encode() + b"\n")

    def write_event(self, event: str, **facts: Any) -> None:
        append_event(self.folder, event, **facts)

    def fail(self, why: str) -> None:
        """Record why this process ends at once, or remove a directory that never became a run."""
        if (self.folder / CONFIG).exists():
            self.write_event("failed", message=why)
        else:
            self.abandon()

    def abandon(self) -> None:
        """Close the directory, and remove it if it never became a run."""
        if not (self.folder / CONFIG).exists():
            if self._sync:
                self.remove()
            (self.folder / LOCK).unlink(missing_ok=True)  # two threads may abandon it
            for path in dict.fromkeys((self.folder, *self._created_folders)):
                with suppress(OSError):  # not empty, or gone
                    path.rmdir()
        self.close()

    def remove(self) -> None:
        if self._sync:
            self._sync.remove()
        shutil.rmtree(self.folder, ignore_errors=self._sync is not None)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        try:
            if self._sync:
                self._sync.close()
        except RunFailed as error:  # `tpuswarm stop` and `status` show what is missing in the bucket
            if (self.folder / CONFIG).exists():
                with suppress(OSError, RunFailed):
                    self.write_event("failed", message=str(error))
            raise
        finally:
            self._lock.close()


class FollowedRun(Run):
    """The run directory of host 0, read by another host."""

    writes = False

    def __init__(self, folder: Path):
        self.folder = folder

    def cut_metrics(self, step: int) -> int:
        return 0

    def _nothing(self, *given: Any, **facts: Any) -> None: ...

    write_config = write_metrics = write_event = upload = abandon = close = _nothing


def command_line() -> str:
    """Return the command of this process as a user types it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def append_event(folder: Path, event: str, **facts: Any) -> None:
    append_rows(folder / EVENTS, [{"time": time.time(), "event": event, **facts}])


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a JSON Lines file; a killed process may have left its last line torn."""
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                lines = lines if file.read(1) == b"\n" else b"\n" + lines
            file.write(lines)


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run, perhaps a new or damaged one."""
    if (folder / LOCK).exists() or (folder / ORIGIN).exists() or _has_rows(folder):
        return True
    try:
        return {"recipe", "train"} <= tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")).keys()
    except (OSError, ValueError):
        return False


def has_begun(folder: Path) -> bool:
    """Return whether a folder is a run, perhaps a damaged one, with more than a lock."""
    return is_run(folder) and ((folder / CONFIG).exists() or _has_rows(folder))


def _has_rows(folder: Path) -> bool:
    return any((folder / name).exists() for name in (METRICS, EVENTS))


def require_not_in_use(folder: Path) -> None:
    """Raise InputError if a living process of this machine holds the run, before any slow work."""
    if origin(folder) is None and (pid := holder_pid(folder)) is not None:
        raise _in_use(folder, pid)


def _in_use(folder: Path, pid: int | None) -> InputError:
    return InputError(f"{shown(folder)} is in use by process {pid}; stop it first, or use another --run")


def require_usable(folder: Path) -> None:
    """Raise InputError for a folder that can neither become a run nor be resumed."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a run directory")
    if folder.is_dir() and not is_run(folder) and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and is not a run; use a new or empty directory for --run")
    require_whole(folder)


def require_whole(folder: Path) -> None:
    """Raise InputError for a run without the files to resume from.

    A killed process never leaves one: it writes config.toml first, and begins a checkpoint or commit before any row.
    """

    def has_steps(name: str) -> bool:
        entries = (folder / name).iterdir() if (folder / name).is_dir() else ()
        return any(path.name.removesuffix(".json").isdigit() for path in entries)

    has_metrics = next(read_rows(folder / METRICS), None) is not None
    if (folder / CONFIG).exists():
        kept = COMMITS if "swarm" in read_config(folder) else CHECKPOINTS
        if has_metrics and not has_steps(kept) and not origin(folder):
            raise InputError(
                f"{folder} has {METRICS} but no {kept}/ to resume from; restore a copy of it, or use another --run to "
                "start over"
            )
    elif found := [METRICS] * has_metrics + [f"{name}/" for name in (CHECKPOINTS, COMMITS) if has_steps(name)]:
        raise InputError(
            f"{folder} has {' and '.join(found)} but no {CONFIG}, which says what was trained; restore a copy of it, "
            "or use another --run to start over"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a run (see schema.py); InputError if the folder is no run, or it is damaged."""
    path = folder / CONFIG
    if not path.exists():
        if _has_rows(folder):
            raise InputError(f"{folder} has no {CONFIG}, which says what was trained; restore a copy of it")
        problem = f"is not a run (it has no {CONFIG})" if folder.exists() else "does not exist"
        names = (run.name for run in RUNS.glob("*") if has_begun(run))
        similar = nearest_name(folder.name, names, min_similarity=0.6)
        hint = f"did you mean runs/{similar}?" if similar else "`tpuswarm status` lists the runs in ./runs"
        raise InputError(f"{folder} {problem}; {hint}")
    try:
        read_toml(path, schema.Config)
    except InputError as error:
        if not is_run(folder):
            raise InputError(f"{folder} is not a run: its {CONFIG} belongs to something else") from error
        if isinstance(error, UnknownFormat):
            raise
        raise InputError(f"{error}; fix it, or restore a copy") from error
    text = path.read_text(encoding="utf-8")
    if text.startswith(START) and END not in text.splitlines():
        raise InputError(f"{path} was cut off: it has no line `{END}`; restore a copy")
    return {name: table for name, table in tomllib.loads(text).items() if name != "format"}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the intact rows of metrics.jsonl or events.jsonl, one at a time."""
    if path.exists():
        with reading(path), path.open("rb") as file:
            for line in file:
                row = schema.parse_row(path.name, line)
                if row is not None:
                    yield row


def read_rows_back(path: Path, *marks: bytes, chunk: int = 2**16) -> Iterator[dict[str, Any]]:
    """Yield intact rows from the last to the first, reading the file only as far as needed.

    Lines without any of `marks` are not parsed. A resuming run may cut the file meanwhile, so it is not memory-mapped.
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
            cut, block = block[:first], block[first:]  # the first line starts in an earlier chunk
            for line in reversed(block.splitlines(keepends=True) if _has(block, marks) else []):
                row = schema.parse_row(path.name, line) if _has(line, marks) else None
                if row is not None:
                    yield row


def _has(text: bytes, marks: Sequence[bytes]) -> bool:
    return not marks or any(mark in text for mark in marks)


def holder_pid(folder: Path) -> int | None:
    """Return the pid of the living process that holds a run, 0 if it has not written it yet; None without one.

    For a run in a bucket the process may be on another machine (see `owner_elsewhere`).
    """
    with reading(folder / LOCK):
        pid = read_lock_holder(folder / LOCK)
    if pid is not None:
        return int(pid) if pid.isdigit() else 0
    owner = owner_elsewhere(folder)
    return owner.pid if owner else None


def create_run_folder(name: str, runs: Path = RUNS) -> Path:
    """Create a folder with an unused name, gpt2-tiny-1 or gpt2-tiny-2 for example; InputError if that fails."""
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
    """Turn a failed write into RunFailed with advice."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason, advice = ("the disk is full", "make room") if full else (error.strerror or error, "fix that")
        raise RunFailed(
            f"{path} could not be written: {reason}; what was saved or committed is safe: {advice} and start the same "
            "command again"
        ) from error
