"""Read and replace the record of a run in a bucket: its owner, and the objects of its files.

The record is one object. A process replaces it only if it has the generation that the process read last. So owning a
run and changing it are the same write: a former owner cannot change the run for readers, however late its requests
arrive. All other objects are written once, under names with the owner's epoch. Objects that no record names
are garbage.

An owner renews the record. A process that wants the run waits until the record has not changed for OWNER_TIMEOUT_S, by
its own clock: no two clocks are compared.
"""

import gzip
import json
import os
import re
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.computer import boot_time, computer_id, is_process_alive
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.storage.bucket import Bucket, BucketFailed

RECORD = "run.json"
DATA = "data/"
RENEW_INTERVAL_S, OWNER_TIMEOUT_S = 10.0, 30.0
"""The interval between renewals; how long a record without renewals still protects its owner."""
POLL_INTERVAL_S = 2.0
"""How often a waiting process reads the record of an owner that may have died."""
RENEWAL_TIMEOUT_S = 15.0
"""How long one renewal is tried before the owner checks whether it still owns the run."""


@dataclass(frozen=True)
class Part:
    """Consecutive bytes of a file of the run."""

    object: str
    size: int


@dataclass(frozen=True)
class File:
    """A file of the run: its parts in order, and when it was written (Unix seconds by its writer's clock)."""

    parts: tuple[Part, ...]
    written: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return sum(part.size for part in self.parts)


Files = Mapping[str, File]
"""Files of a run by their paths in its folder."""


def objects_of(files: Iterable[File]) -> set[str]:
    """Return the names of all objects of files."""
    return {part.object for file in files for part in file.parts}


@dataclass(frozen=True)
class Owner:
    """A process that owns, or owned, a run."""

    id: str
    """Random."""
    host: str
    pid: int
    computer: str
    """The computer that `pid` belongs to (`computer_id`)."""
    renewals: int = 0
    released: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether it was a process of this computer that has ended."""
        return is_process_alive(self.computer, self.pid) is False


@dataclass(frozen=True)
class Record:
    """The content of the object RECORD."""

    run: str
    """Random: a run that was deleted and begun anew in its place has another."""
    epoch: int
    """Counts owners; the names of new objects begin with it."""
    owner: Owner
    files: Files = field(default_factory=dict)
    changed_by: str = ""
    """The id of the owner that changed the files last; empty before the first change."""


_JSON: TypeAdapter[Record] = TypeAdapter(Record)
GZIP_FROM_BYTES = 2**16
"""Records from this size on are compressed: they grow, as they name every file of every checkpoint."""


def encode(record: Record) -> bytes:
    """Return the content of the object RECORD."""
    data = _JSON.dump_json(record)
    return gzip.compress(data, 1) if len(data) >= GZIP_FROM_BYTES else data


def decode(data: bytes) -> Record:
    """Read the content of the object RECORD. Raises ValueError."""
    try:
        return _JSON.validate_json(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class VersionedRecord:
    """A record and the generation of its object."""

    record: Record
    generation: int
    """0 if no record is stored yet: this one lists the objects of an earlier version's run."""
    object: str = RECORD
    """The object that the owner renewed last; an earlier version wrote a new one each time."""

    @property
    def is_owned(self) -> bool:
        """Whether its owner may be alive."""
        return not self.record.owner.released and not self.record.owner.is_gone


class Lost(RunFailed):
    """Another process owns the run now."""


def read_record(bucket: Bucket, retry_for_s: float | None = None) -> VersionedRecord | None:
    """Read the record of a run; return None if there is no run. Raises BucketFailed."""
    found = bucket.read_versioned(RECORD, retry_for_s)
    if found is None:
        return _of_earlier_version(bucket)
    try:
        return VersionedRecord(decode(found.data), found.generation)
    except ValueError as error:
        raise BucketFailed(
            f"{bucket.url}/{RECORD} is damaged ({len(found.data)} bytes); restore an earlier version of that object"
        ) from error


def read_file(read: Callable[[str], bytes | None], path: str) -> bytes | None:
    """Return one file of a run as its record has it now; None if there is none.

    read: returns the content of an object by its name in the run's folder, None if there is none.
    """
    for _ in range(3):
        stored = read(RECORD)
        if stored is None:
            return read(f"files/{path}")  # an earlier version's run
        try:
            file = decode(stored).files.get(path)
        except ValueError:
            return None
        parts = [read(part.object) for part in file.parts] if file else []
        if None not in parts:  # else its owner has replaced it meanwhile
            return b"".join(part for part in parts if part is not None) if file else None
    return None


class OwnedRecord:
    """The record of a run that this process owns, or wants to own."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self._owner = Owner(secrets.token_hex(8), socket.gethostname(), os.getpid(), computer_id())
        self._lock = threading.RLock()
        self._read: VersionedRecord | None = None
        self._renewed_at = 0.0
        self._names = 0

    @property
    def record(self) -> Record:
        """The record as this process has written it last."""
        assert self._read is not None
        return self._read.record

    @property
    def age_s(self) -> float:
        """Seconds since the record was renewed: since before the request that did it was sent."""
        return boot_time() - self._renewed_at

    def acquire(self) -> Record:
        """Acquire the run; return its record as the previous owner left it.

        Waits for an owner that may be gone. Raises InputError while there is one, and BucketFailed.
        """
        with self._lock:
            found = read_record(self._bucket)
            if found and found.is_owned:
                found = self._wait_for_end(found)
            before = found.record if found else Record(secrets.token_hex(8), 0, replace(self._owner, id=""))
            self._read = found or VersionedRecord(before, 0)
            try:
                self._replace(replace(before, epoch=before.epoch + 1, owner=self._owner))
            except Lost as error:  # somebody else was faster
                raise self._in_use(read_record(self._bucket)) from error
            return before

    def renew(self) -> None:
        """Renew the record, so that nobody may take the run for OWNER_TIMEOUT_S. Raises Lost and BucketFailed."""
        self.change(lambda files: files)

    def change(self, change: Callable[[Files], Files], released: bool = False, copies_stay: bool = False) -> None:
        """Replace the files of the record, and renew it. Raises Lost and BucketFailed.

        copies_stay: local copies that earlier owners have on their disks stay valid.
        """
        with self._lock:
            before = self.record
            owner = replace(before.owner, renewals=before.owner.renewals + 1, released=released)
            files = change(before.files)
            changed_by = before.changed_by if files == before.files or copies_stay else owner.id
            self._replace(replace(before, owner=owner, files=files, changed_by=changed_by))

    def release(self) -> None:
        """Release the run: the next owner need not wait."""
        self.change(lambda files: files, released=True)

    def delete(self) -> None:
        """Delete the record. Raises Lost and BucketFailed."""
        self.renew()
        with self._lock:
            assert self._read is not None
            if not self._bucket.delete(RECORD, self._read.generation):
                raise self._lost(read_record(self._bucket, RENEWAL_TIMEOUT_S))

    @property
    def prefix(self) -> str:
        """Prefix of the names of all objects that this owner uploads."""
        return f"{DATA}{self.record.epoch:06d}-{self._owner.id}/"

    def new_object(self, name: str) -> str:
        """Return a unique name for a new object."""
        with self._lock:
            self._names += 1
            return f"{self.prefix}{self._names:06d}-{re.sub(r'[^A-Za-z0-9._-]', '-', name)[-60:]}"

    def _replace(self, record: Record) -> None:
        """Write the record in the place of the one that was read last, if that is still there."""
        data = encode(record)
        while True:
            assert self._read is not None
            sent = boot_time()
            generation = self._bucket.swap(RECORD, data, self._read.generation, RENEWAL_TIMEOUT_S)
            if generation is not None:
                self._read = VersionedRecord(record, generation)
                self._renewed_at = sent
                return
            there = read_record(self._bucket, RENEWAL_TIMEOUT_S)
            if there is None or (there.record.owner.id, there.record.epoch) != (self._owner.id, record.epoch):
                raise self._lost(there)
            # Ours, of an attempt whose answer was lost: go on from there.
            self._read = there

    def _wait_for_end(self, found: VersionedRecord) -> VersionedRecord:
        """Wait until the record has not been renewed for OWNER_TIMEOUT_S; return it."""
        owner = found.record.owner
        since = seen = boot_time()
        with waiting(f"{owner.host} may still own this run; waiting {OWNER_TIMEOUT_S:.0f} s for a sign of life"):
            while boot_time() - since < OWNER_TIMEOUT_S:
                time.sleep(POLL_INTERVAL_S)
                now = read_record(self._bucket)
                if boot_time() - seen > 3 * POLL_INTERVAL_S:  # an outage kept the owner from renewing
                    since = boot_time()
                seen = boot_time()
                if now is None or not now.is_owned:
                    return now or found
                if (now.generation, now.record.owner) != (found.generation, owner):
                    raise self._in_use(now)
        return found

    def _in_use(self, found: VersionedRecord | None) -> InputError:
        url = self._bucket.url
        who = f"by process {found.record.owner.pid} on {found.record.owner.host}" if found else "by another process"
        return InputError(f"{url} is in use {who}; stop it first with `tpuswarm stop {url}`, or use another --run")

    def _lost(self, there: VersionedRecord | None) -> Lost:
        url = self._bucket.url
        if there is None:
            return Lost(f"{url} was deleted, so this process ends")
        owner = there.record.owner
        return Lost(f"{url} was taken over by process {owner.pid} on {owner.host}, so this process ends")


def _of_earlier_version(bucket: Bucket) -> VersionedRecord | None:
    """Return the record of a run whose objects an earlier version stored without one.

    It kept whole files under files/, growing ones in pieces named by their bytes, checkpoints as folders with a
    manifest, and its owner in the last object of lease/.
    """
    objects = bucket.listed("")
    pieces: dict[str, dict[int, tuple[int, str]]] = {}
    files: dict[str, File] = {}
    for name, listed in objects.items():
        folder, _, rest = name.partition("/")
        if match := re.fullmatch(r"pieces/(.+)/(\d{15})-(\d{15})", name):
            start, end = int(match[2]), int(match[3])
            longest = pieces.setdefault(match[1], {})
            longest[start] = max(longest.get(start, (0, "")), (end, name))
        elif folder == "files" and rest != "born":
            files[rest] = File((Part(name, listed.size),), listed.written)
        elif folder == "checkpoints" and f"checkpoints/{rest.partition('/')[0]}/manifest.json" in objects:
            files[name] = File((Part(name, listed.size),), listed.written)
    for path, longest in pieces.items():
        parts: list[Part] = []
        end = 0
        while end in longest:
            start, (end, name) = end, longest[end]
            parts.append(Part(name, end - start))
        files[path] = File(tuple(parts), max(objects[part.object].written for part in parts) if parts else 0.0)
    if not files:
        return None
    run = bucket.read("files/born").decode()[:16] if "files/born" in objects else "earlier"
    owner, lease = _earlier_owner(bucket, (name for name in objects if name.startswith("lease/")))
    return VersionedRecord(Record(run, 0, owner, files, owner.id), 0, lease)


def _earlier_owner(bucket: Bucket, leases: Iterable[str]) -> tuple[Owner, str]:
    for name in sorted(leases, reverse=True):
        with suppress(ValueError, KeyError, TypeError):
            found = bucket.read_versioned(name)
            if found is None:
                continue
            lease = json.loads(found.data)
            number = int(re.sub(r"\D", "", name))
            owner = Owner(
                lease["owner"], lease["host"], lease["pid"], lease.get("computer", ""), number, lease["ended"]
            )
            return owner, name
    return Owner("", "", 0, "", released=True), RECORD
