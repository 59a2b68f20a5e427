"""The run directory: configuration, metrics, events, and the lock that keeps two processes out of one run."""

import errno
import fcntl
import itertools
import json
import os
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.files import write_atomically

CONFIG, METRICS, EVENTS, LOCK = "config.toml", "metrics.jsonl", "events.jsonl", "lock"
LAST = ("finished", "stopped", "failed")
"""Events that end a process's work on a run; without one of them it was killed."""


class Run:
    """A run directory held by this process."""

    writes = True
    """Whether this process is the one that writes it."""

    def __init__(self, folder: Path):
        """Make or take the directory; InputError if a living process has it, naming its pid."""
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file, not a run directory")
        if folder.is_dir() and not is_run(folder) and any(folder.iterdir()):
            raise InputError(f"{folder} holds other things and is no run; give a new or empty directory with --run")
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / LOCK).open("a+")
        except OSError as error:
            raise InputError(f"{folder} cannot be a run directory: {error.strerror}; give another --run") from error
        if not self._take():
            raise InputError(f"{folder} is in use by process {holder(folder)}; stop it first, or give another --run")
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self._metrics: Any = None

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
        return self.folder / "checkpoints"

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
        lines = path.read_bytes().splitlines(keepends=True)
        kept = 0
        for line in lines:
            row = _parse(line)
            if row is None or row["step"] > step:
                break
            kept += 1
        os.truncate(path, sum(len(line) for line in lines[:kept]))
        return len(lines) - kept

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one row and hand it to the operating system at once."""
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
            (self.folder / LOCK).unlink(missing_ok=True)  # two threads may come to the end of a run
            with suppress(OSError):  # it holds something else
                self.folder.rmdir()
        self.close()

    def close(self) -> None:
        """Let the directory go."""
        if self._metrics is not None:
            self._metrics.close()
        self._lock.close()


class FollowedRun(Run):
    """A run directory that host 0 of several holds and writes, as another host sees it: reading is all that it does."""

    writes = False

    def __init__(self, folder: Path):
        """The directory may not be there before host 0 has come."""
        self.folder = folder

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Nothing."""

    def cut_metrics(self, step: int) -> int:
        """Nothing."""
        return 0

    def write_metrics(self, row: Mapping[str, Any]) -> None:
        """Nothing."""

    def write_event(self, event: str, **facts: Any) -> None:
        """Nothing."""

    def abandon(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


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


class Life(NamedTuple):
    """Whether a run lives, and how it ended if it does not."""

    state: str
    """running, finished, stopped, failed, or killed (its process is gone without a word)."""
    pid: int | None
    """0 for a moment while a process takes the run."""
    message: str
    """Why it stopped or failed, where it did."""


@dataclass(frozen=True)
class Status:
    """What can be seen of a run from outside."""

    run: str
    state: str
    """As in Life."""
    pid: int | None
    recipe: str
    step: int
    steps: int
    tokens: int
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    message: str
    """Why it stopped or failed, where it did."""


def status(folder: Path) -> Status:
    """The status of a run; InputError if the folder is none."""
    config = read_config(folder)
    train: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for row in read_rows(folder / METRICS):
        if "eval_loss" in row:
            evaluation = row
        else:
            train = row
    life = read_life(folder)
    return Status(
        run=str(folder),
        state=life.state,
        pid=life.pid,
        recipe=config["recipe"]["name"],
        step=train.get("step", 0),
        steps=config["train"]["steps"],
        tokens=train.get("tokens", 0),
        loss=train.get("loss"),
        eval_loss=evaluation.get("eval_loss"),
        tokens_per_s=train.get("tokens_per_s"),
        message=life.message,
    )


def read_life(folder: Path) -> Life:
    """Whether a run lives, by its lock and its events."""
    pid = holder(folder)
    if pid is not None:
        return Life("running", pid, "")
    last: dict[str, Any] = {}
    for row in read_rows(folder / EVENTS):
        if row["event"] in ("started", *LAST):
            last = row
    if last.get("event") in LAST:
        return Life(last["event"], None, last.get("message", ""))
    return Life("killed", None, "")


def is_run(folder: Path) -> bool:
    """Whether a folder is a run, or was about to become one."""
    return (folder / CONFIG).exists() or (folder / LOCK).exists()


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run; InputError if the folder is no run."""
    try:
        config = tomllib.loads((folder / CONFIG).read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is no run (it has no config.toml)" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {what}; `tpuswarm status` lists the runs in ./runs") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{folder / CONFIG} cannot be read: {error}") from error
    if not {"recipe", "train"} <= config.keys():
        raise InputError(f"{folder} is no run: its config.toml is of something else")
    return config


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a JSON lines file; torn lines are left out."""
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            row = _parse(line)
            if row is not None:
                yield row


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and line.endswith(b"\n") else None


def holder(folder: Path) -> int | None:
    """The pid of the living process that holds a run; None where there is none."""
    try:
        with (folder / LOCK).open("r") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read().strip() or 0)
    except FileNotFoundError:
        pass
    return None


def find_run(name: str, runs: Path = Path("runs")) -> Path:
    """The folder meant by RUN: a path, the name of one in ./runs, or `last`, the one written to most recently."""
    if name == "last":
        found = list_runs(runs)
        if not found:
            raise InputError(f"there are no runs in {runs}; start one with `tpuswarm train`")
        return max(found, key=lambda folder: (folder / EVENTS).stat().st_mtime if (folder / EVENTS).exists() else 0)
    folder = Path(name)
    return runs / name if not folder.exists() and (runs / name).is_dir() else folder


def list_runs(runs: Path = Path("runs")) -> list[Path]:
    """The runs in a folder, by name."""
    found = []
    for folder in sorted(runs.glob("*")):
        with suppress(InputError):  # a folder of something else
            read_config(folder)
            found.append(folder)
    return found


def new_folder(name: str, runs: Path = Path("runs")) -> Path:
    """A new folder in ./runs with a name that was free: gpt2-tiny-1, gpt2-tiny-2, …"""
    runs.mkdir(exist_ok=True)
    for number in itertools.count(1):
        folder = runs / f"{name}-{number}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write into RunFailed with the way out."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        raise RunFailed(
            f"{path} could not be written: {reason}; what was saved or committed stands: "
            "make room and start the same command again"
        ) from error
