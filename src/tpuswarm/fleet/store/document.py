"""The fleet's one document: the desired state, the keeper's lease, costs, jobs and recent events.

It lies in the fleet's bucket, so that any computer can take over; without a bucket, in a file of this computer. A write
fails if somebody else has written since the document was read.
"""

import json
import random
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from tpuswarm.cloud.errors import Changed, Unreachable
from tpuswarm.cloud.protocol import Bucket, Stored
from tpuswarm.errors import RunFailed, UnknownFormat
from tpuswarm.fleet.decide.actions import Event, Wait
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.flags import Flag
from tpuswarm.fleet.decide.fleet_state import WorkStatus
from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.fleet.decide.spending import Spending
from tpuswarm.fleet.decide.traffic import Traffic
from tpuswarm.train.process.atomic import create_atomically, write_atomically
from tpuswarm.train.process.computer import is_process_alive, state_folder
from tpuswarm.train.process.locks import locked

FORMAT = 1
MAX_EVENTS, MAX_ENDED_JOBS = 200, 200
CHANGE_TIMEOUT_S, MAX_PAUSE_S = 60.0, 2.0
MAX_COMMANDS = 100
"""More changes than others can make within CHANGE_TIMEOUT_S."""


@dataclass(frozen=True)
class KeeperLease:
    """Names the keeper that leads. It ends when an observer sees no renewal for `keeper.LEASE_S`."""

    holder: str
    """A random id of the process."""
    host: str
    pid: int
    beat: int
    """Counts renewals."""
    at: float
    """The last renewal by the holder's clock, to show to people."""
    computer: str = ""
    """The computer of `pid`, as `computer_id` names it; several may share a `host` name."""


@dataclass(frozen=True)
class Document:
    name: str
    provider: str
    project: str
    desired: Desired
    zones: tuple[str, ...]
    """All zones ever used: a request may still wait there."""
    used_zones: tuple[str, ...] | None = None
    """Zones where a machine was ever requested, stored before the request; None: possibly all."""
    lease: KeeperLease | None = None
    spending: Annotated[Spending, Field(alias="ledger")] = field(default_factory=Spending)
    traffic: Traffic = field(default_factory=Traffic)
    work: WorkStatus = field(default_factory=WorkStatus)
    jobs: tuple[Job, ...] = ()
    last_run: int = 0
    """The highest run number of deleted jobs: new jobs need higher ones, as hosts remember them."""
    flags: tuple[Flag, ...] = ()
    """Set by `tpuswarm flags`; they win over the file's."""
    events: tuple[Event, ...] = ()
    waits: tuple[Wait, ...] = ()
    """Why machines are missing, as the last keeper saw it."""
    asked_by: str = ""
    """USER@HOST who last changed the desired state."""
    asked_at: float = 0.0
    commands: tuple[str, ...] = ()
    """Ids of recent changes, so that none is made twice if an answer is lost."""
    format: int = FORMAT

    @property
    def unused_zones(self) -> frozenset[str]:
        """Zones where nothing of the fleet can exist, even if they do not answer."""
        return frozenset() if self.used_zones is None else frozenset(self.zones).difference(self.used_zones)

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """The flags of the file, and those of `tpuswarm flags`, which win."""
        return (*self.desired.flags, *self.flags)


class Damaged(RunFailed):
    """The stored document cannot be read."""


def is_holder_alive(lease: KeeperLease) -> bool | None:
    """Whether the lease's process runs; None if it is on another computer."""
    return is_process_alive(lease.computer, lease.pid)


def document_path(name: str) -> str:
    return f"tpuswarm/fleets/{name}.json"


@cache
def _adapter() -> TypeAdapter[Document]:
    return TypeAdapter(Document)


class DocumentStore:
    """The document of one fleet in a bucket; `where` names the bucket in messages."""

    def __init__(self, bucket: Bucket, name: str, where: str):
        self._bucket, self._path = bucket, document_path(name)
        self.where = f"{where}/{self._path}"
        self._generation = 0

    def load(self) -> Document | None:
        """Read the document, if there is one. Raise Damaged."""
        stored = self._bucket.read(self._path)
        self._generation = stored.generation if stored else 0
        return None if stored is None else self._parse(stored)

    def save(self, document: Document) -> None:
        """Write a new version of the document loaded last. Raise Changed if somebody else has written since."""
        data = _adapter().dump_json(document, indent=1, by_alias=True)
        self._generation = self._bucket.write(self._path, data, self._generation)

    def change(self, make: Callable[[Document | None], Document]) -> Document:
        """Read, change and write, and retry if others write meanwhile; return the new document. Raise Damaged.

        The change is made once, even if the answer to a write is lost.
        """
        command, deadline = secrets.token_hex(8), time.monotonic() + CHANGE_TIMEOUT_S
        while True:
            try:
                before = self.load()
                if before is not None and command in before.commands:
                    return before
                document = make(before)
                document = replace(document, commands=(*document.commands, command)[-MAX_COMMANDS:])
                self.save(document)
            except (Changed, Unreachable):
                if time.monotonic() > deadline:
                    raise
            else:
                return document
            time.sleep(random.uniform(0, MAX_PAUSE_S))

    def _parse(self, stored: Stored) -> Document:
        try:
            document = _adapter().validate_json(stored.data)
        except ValidationError as error:
            self._require_known_format(_find_format(stored.data))
            raise Damaged(
                f"{self.where} is damaged ({len(stored.data)} bytes): `tpuswarm up` makes it again from swarm.toml and "
                "the labels of the machines"
            ) from error
        self._require_known_format(document.format)
        return document

    def _require_known_format(self, found: object) -> None:
        if found != FORMAT:
            raise UnknownFormat(self.where, found, FORMAT)


def _find_format(data: bytes) -> object:
    """Return the format of a document that is not as expected; this version's, if it names none."""
    try:
        return json.loads(data)["format"]
    except (ValueError, TypeError, KeyError):
        return FORMAT


class MemoryBucket:
    """A bucket for a single file that ends with this process."""

    def __init__(self) -> None:
        self._stored: Stored | None = None

    def read(self, path: str) -> Stored | None:
        return self._stored

    def write(self, path: str, data: bytes, generation: int) -> int:
        self._stored = Stored(data, generation + 1)
        return generation + 1


class LocalBucket:
    """Files of this computer as a `Bucket`."""

    def __init__(self, folder: Path):
        self._folder = folder

    def read(self, path: str) -> Stored | None:
        try:
            generation, _, data = (self._folder / path).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        return Stored(data, int(generation) if generation.isdigit() else 1)

    def write(self, path: str, data: bytes, generation: int) -> int:
        file = self._folder / path
        try:
            return self._write(file, path, data, generation)
        except OSError as error:  # such as a full disk: retry later
            raise Unreachable(f"{file} cannot be written: {error.strerror}") from error

    def _write(self, file: Path, path: str, data: bytes, generation: int) -> int:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock"), "set XDG_STATE_HOME to a folder on a local disk"):
            stored = self.read(path)
            if (stored.generation if stored else 0) != generation:
                raise Changed(f"{file} was written by another process meanwhile")
            write_atomically(file, b"%d\n" % (generation + 1) + data)
        return generation + 1


def state_folder_mark() -> str:
    """Return a random text that identifies the folder: of this user, on this computer."""
    path = state_folder() / "mark"
    if not path.exists():
        create_atomically(path, secrets.token_hex(16))
    return path.read_text()


def with_job(document: Document, job: Job) -> Document:
    """Add a job, or replace one of its name, and delete the oldest ended jobs."""
    jobs = [other for other in document.jobs if other.name != job.name]
    ended = [other for other in jobs if other.is_over]
    deleted = ended[: max(0, len(ended) - MAX_ENDED_JOBS)]
    last_run = max((assignment.run for other in deleted for assignment in other.assignments), default=0)
    kept = tuple(other for other in jobs if other not in deleted)
    work = replace(document.work, done=False)  # `down_when = "done"` waits for the new job
    return replace(document, jobs=(*kept, job), last_run=max(document.last_run, last_run), work=work)


def with_events(document: Document, events: Iterable[Event]) -> Document:
    return replace(document, events=(*document.events, *events)[-MAX_EVENTS:])
