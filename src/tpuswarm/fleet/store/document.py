"""The one document of a fleet: what is wanted, who keeps it, what it has cost, what happened last.

It lives in the fleet's bucket, so that any computer can go on with the fleet; without a bucket in a file of this one.
It is written only if nobody else has written it meanwhile.
"""

import os
import random
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from tpuswarm.cloud.errors import Changed, Unreachable
from tpuswarm.cloud.protocol import Bucket, Stored
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.flags import Flag
from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.fleet.decide.spending import Spending
from tpuswarm.fleet.decide.state import WorkStatus
from tpuswarm.fleet.decide.traffic import Traffic
from tpuswarm.train.process.computer import alive

FORMAT = 1
MAX_EVENTS = 200
"""Of the last ones; the rest are in the history of whoever kept the fleet."""
MAX_ENDED_JOBS = 200
"""Jobs that are over and still known."""
CHANGE_TIMEOUT_S, MAX_PAUSE_S = 60.0, 2.0
"""How long a change is tried while others write, or the bucket does not answer; the longest pause between two tries."""
MAX_COMMANDS = 100
"""More than others can carry out in that time."""


@dataclass(frozen=True)
class KeeperLease:
    """Who keeps the fleet. It ends when it stands still for TERM by the clock of whoever watches it."""

    holder: str
    """Random, of one process."""
    host: str
    pid: int
    beat: int
    """Counts its renewals."""
    at: float
    """Of the last one, Unix seconds by the holder's clock: for people."""
    computer: str = ""
    """Where `pid` means something, as `this_computer` has it; `host` may be the name of several."""


@dataclass(frozen=True)
class Document:
    """All of it."""

    name: str
    provider: str
    project: str
    desired: Desired
    zones: tuple[str, ...]
    """All in which it has ever asked for machines: something may still wait in line there."""
    lease: KeeperLease | None = None
    spending: Annotated[Spending, Field(alias="ledger")] = field(default_factory=Spending)
    traffic: Traffic = field(default_factory=Traffic)
    work: WorkStatus = field(default_factory=WorkStatus)
    jobs: tuple[Job, ...] = ()
    last_run: int = 0
    """The highest number of a run of jobs that are forgotten: hosts remember it, and later ones have higher ones."""
    flags: tuple[Flag, ...] = ()
    """Those that a command has set: they win over those of the file for the same machines."""
    events: tuple[Event, ...] = ()
    asked_by: str = ""
    """Who has changed what is wanted last, and on which computer; a keeper does not count."""
    asked_at: float = 0.0
    """When, Unix seconds by that computer's clock: for people."""
    commands: tuple[str, ...] = ()
    """Ids of the changes made last: one whose answer was lost is not made twice."""
    format: int = FORMAT


def is_holder_alive(lease: KeeperLease) -> bool | None:
    """Whether the process of a lease is alive; None: that cannot be told from here."""
    return alive(lease.computer, lease.pid)


class Damaged(RunFailed):
    """What is stored is no document."""


def document_path(name: str) -> str:
    """Where a fleet's document is in its bucket."""
    return f"tpuswarm/fleets/{name}.json"


@cache
def _adapter() -> TypeAdapter[Document]:
    return TypeAdapter(Document)


class DocumentStore:
    """The document of one fleet, in a bucket."""

    def __init__(self, bucket: Bucket, name: str, where: str):
        """`where`: how a person would call the bucket."""
        self._bucket, self._path = bucket, document_path(name)
        self.where = f"{where}/{self._path}"
        self._generation = 0

    def load(self) -> Document | None:
        """As it is now; None: there is none. Raises Damaged."""
        found = self._bucket.read(self._path)
        self._generation = found.generation if found else 0
        return None if found is None else self._parse(found)

    def save(self, document: Document) -> None:
        """Write what was loaded last, changed. Raises Changed if somebody else wrote meanwhile."""
        data = _adapter().dump_json(document, indent=1, by_alias=True)
        self._generation = self._bucket.write(self._path, data, self._generation)

    def change(self, make: Callable[[Document | None], Document]) -> Document:
        """Read, change and write, again if others write meanwhile; return the document as it is now. Raises Damaged.

        The change is made once, also if the answer to a write is lost.
        """
        command, give_up = secrets.token_hex(8), time.monotonic() + CHANGE_TIMEOUT_S
        while True:
            try:
                found = self.load()
                if found is not None and command in found.commands:
                    return found
                document = make(found)
                document = replace(document, commands=(*document.commands, command)[-MAX_COMMANDS:])
                self.save(document)
            except (Changed, Unreachable):
                if time.monotonic() > give_up:
                    raise
            else:
                return document
            time.sleep(random.uniform(0, MAX_PAUSE_S))

    def _parse(self, found: Stored) -> Document:
        try:
            document = _adapter().validate_json(found.data)
        except ValidationError as error:
            raise Damaged(
                f"{self.where} is damaged ({len(found.data)} bytes): `tpuswarm up` makes it again from swarm.toml and "
                "the labels of the machines"
            ) from error
        if document.format != FORMAT:
            raise Damaged(f"{self.where} was written by another version of tpuswarm; use that one")
        return document


class LocalBucket:
    """Files of this computer as a `Bucket`, for a fleet that has none: no other computer can go on with it."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self, path: str) -> Stored | None:
        """See Bucket."""
        try:
            generation, _, data = (self._folder / path).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return Stored(data, int(generation) if generation.isdigit() else 1)

    def write(self, path: str, data: bytes, generation: int) -> int:
        """See Bucket. A file that cannot be written, as on a full disk, is one that may be written later."""
        file = self._folder / path
        try:
            return self._write(file, path, data, generation)
        except OSError as error:
            raise Unreachable(f"{file} cannot be written: {error.strerror}") from error

    def _write(self, file: Path, path: str, data: bytes, generation: int) -> int:
        from tpuswarm.train.process.atomic import part, sync

        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            there = self.read(path)
            if (there.generation if there else 0) != generation:
                raise Changed(f"{file} was written by another process meanwhile")
            with part(file).open("wb") as new:
                new.write(b"%d\n" % (generation + 1) + data)
                new.flush()
                os.fsync(new.fileno())
            part(file).replace(file)
            sync(file.parent)
        return generation + 1


@contextmanager
def _locked(path: Path) -> Any:
    import fcntl

    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def state_folder() -> Path:
    """Where this computer keeps what it knows of fleets: lines of jobs, variables, logs. Nobody else may read it."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(base).expanduser() / "tpuswarm"
    with suppress(OSError):  # what is written into it then fails with the reason
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    return folder


def state_folder_mark() -> str:
    """Random letters of this folder: another person, and another computer with its own home, has others."""
    path = state_folder() / "mark"
    if not path.exists():
        mine = path.with_name(f"{path.name}.{os.getpid()}")
        mine.write_text(secrets.token_hex(16))
        with suppress(FileExistsError):  # another process was first
            os.link(mine, path)
        mine.unlink()
    return path.read_text()


def with_job(document: Document, job: Job) -> Document:
    """With a job in the place of one of its name; of those that are over the oldest are forgotten."""
    jobs = [each for each in document.jobs if each.name != job.name]
    over = [each for each in jobs if each.is_over]
    gone = over[: max(0, len(over) - MAX_ENDED_JOBS)]
    last = max((seat.run for each in gone for seat in each.assignments), default=0)
    kept = tuple(each for each in jobs if each not in gone)
    work = replace(document.work, done=False)  # a fleet that comes down when it is done is not, from now on
    return replace(document, jobs=(*kept, job), last_run=max(document.last_run, last), work=work)


def with_events(document: Document, events: Iterable[Event]) -> Document:
    """With what happened."""
    return replace(document, events=(*document.events, *events)[-MAX_EVENTS:])
