"""The ledger: commit records and headers as JSON files that are created once and never changed.

A file is one line, {"record":…,"sha256":"…"}, with canonical JSON: keys sorted, no spaces, UTF-8, shortest floats. The
digest shows damage that no later record would reveal.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.ledger_view import InvalidRecord, LedgerView
from tpuswarm.swarm.core.values import Header, Identity, Record
from tpuswarm.swarm.storage.bookmark import (
    FOLDER,
    Bookmark,
    bookmark_name,
    bookmark_version,
    is_bookmark_due,
    make_bookmark,
    outdated_bookmarks,
    restore_view,
)
from tpuswarm.swarm.storage.objects import check_member_name
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

CreateOutcome = Literal["created", "same", "lost"]
"""Created now; existed with the same content; existed with other content."""

Content = TypeVar("Content", Record, Header, Bookmark)

_RECORD: TypeAdapter[Record] = TypeAdapter(Record)
_HEADER: TypeAdapter[Header] = TypeAdapter(Header)
_BOOKMARK: TypeAdapter[Bookmark] = TypeAdapter(Bookmark)
_COMMIT = re.compile(r"commits/(\d{6,})\.json")
_BEFORE, _AFTER = b'{"record":', b',"sha256":"%s"}\n'
_AFTER_BYTES = len(_AFTER % bytes(64))
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def commit_name(version: int) -> str:
    return f"commits/{version:06d}.json"


def header_name(identity: Identity) -> str:
    """Return the name of a header's file. Raise InputError if the member's name cannot be in a file name."""
    key = identity.incarnation
    return f"headers/{check_member_name(key.member)}-{key.name}-{identity.sequence}.json"


def decided_by(view: LedgerView) -> Callable[[str], bool]:
    """Return a function that tells from the name of a header's file whether the view has a verdict on it."""
    last_sequences = {
        header_name(last.identity).rpartition("-")[0]: last.identity.sequence for last, _ in view.verdicts.values()
    }

    def is_decided(name: str) -> bool:
        incarnation, _, sequence = name.removesuffix(".json").rpartition("-")
        return sequence.isdecimal() and int(sequence) <= last_sequences.get(incarnation, 0)

    return is_decided


def record_digest(record: Record) -> str:
    """Return the SHA-256, in hexadecimal, of a record's canonical JSON; the next record names it as its parent."""
    return hashlib.sha256(_canonical(record, _RECORD)).hexdigest()


def first_gap(versions: Sequence[int]) -> int:
    """Return the first number that is missing from a sorted sequence."""
    return next((expected for expected, number in enumerate(versions) if number != expected), len(versions))


class Ledger:
    """The records and headers in a run's storage. Everything read is checked in full; RunFailed names a bad file."""

    def __init__(self, store: Store):
        self.store = store

    def digest(self, record: Record) -> str:
        return record_digest(record)

    def append(self, record: Record) -> CreateOutcome:
        """Create a record; `lost` means that another coordinator created this version."""
        return self._create(commit_name(record.version), _canonical(record, _RECORD))

    def create_header(self, header: Header) -> CreateOutcome:
        """Accept a contribution; `lost` means that a different one with the same identity was accepted."""
        return self._create(header_name(header.identity), _canonical(header, _HEADER))

    def record(self, version: int) -> Record:
        return self.digested_record(version)[0]

    def exists(self, version: int) -> bool:
        return self.store.exists(commit_name(version))

    def header(self, name: str) -> Header:
        """Read a header by the name of its file."""
        found, _ = self._read(name, _HEADER)
        try:
            misplaced = header_name(found.identity) != name
        except InputError:
            misplaced = True
        if misplaced:
            raise Corrupt(name, self.store.root, f"it holds the header of {found.identity}")
        return found

    def versions(self) -> list[int]:
        """Return the numbers of all stored records, sorted."""
        matches = (_COMMIT.fullmatch(name) for name in self.store.names("commits/"))
        return sorted(int(match[1]) for match in matches if match)

    def contiguous_versions(self) -> list[int]:
        """Return the numbers of all stored records. Raise Missing if there is a gap."""
        versions = self.versions()
        if (gap := first_gap(versions)) < len(versions):
            raise Missing(commit_name(gap), self.store.root)
        return versions

    def records(self, versions: Sequence[int]) -> Iterator[Record]:
        """Yield records as they are read."""
        return (record for record, _ in self._records(versions))

    def read_available(self, versions: Iterable[int]) -> tuple[list[Record], list[Missing | Corrupt]]:
        """Return the records that can be read, and the errors of the others."""

        def try_read(version: int) -> Record | Missing | Corrupt:
            try:
                return self.record(version)
            except (Missing, Corrupt) as error:
                return error

        results = list(self.store.read_each(try_read, versions))
        records = [result for result in results if isinstance(result, Record)]
        return records, [result for result in results if not isinstance(result, Record)]

    def headers(self, view: LedgerView | None = None) -> list[Header]:
        """Return all stored headers, sorted by name, without those on which `view` has a verdict."""
        names = self.store.names("headers/")
        is_skipped = decided_by(view) if view else lambda name: False
        return list(self.store.read_each(self.header, (name for name in names if not is_skipped(name))))

    def view(self) -> LedgerView:
        """Build the view of all records, starting from the newest valid bookmark."""
        versions = self.contiguous_versions()
        if not versions:
            raise RunFailed(f"{self.store.root} has no commits; use the folder or URL of a swarm's run")
        view = self._bookmarked_view(versions) or self.genesis(self.record(0))
        found = self._records(versions[view.version + 1 :])
        return self.refresh(self._extend(view, record_digest(view.newest), found))

    def bookmark_due(self, view: LedgerView) -> bool:
        """Whether to leave a bookmark at a view's newest record."""
        return is_bookmark_due(view)

    def bookmark(self, view: LedgerView) -> None:
        """Leave a bookmark at a view's newest record, and remove outdated ones."""
        self.store.put(bookmark_name(view.version), _bookmark(view))
        for version in outdated_bookmarks(self.bookmarks(), view.version):
            self.store.delete(bookmark_name(version))

    def has_valid_bookmark(self, view: LedgerView) -> bool:
        """Whether the bookmark at a view's newest record matches the view. Raise Missing if there is none."""
        return self.store.read(bookmark_name(view.version)) == _bookmark(view)

    def bookmarks(self) -> list[int]:
        """Return the versions that have a bookmark, sorted."""
        found = (bookmark_version(name) for name in self.store.names(FOLDER))
        return sorted(version for version in found if version is not None)

    def _bookmarked_view(self, versions: Iterable[int]) -> LedgerView | None:
        """Return the view of the newest intact bookmark whose record has the right digest.

        versions: of the stored records, without those of which only this machine has a copy.
        """
        for version in sorted({*versions}.intersection(self.bookmarks()), reverse=True):
            with suppress(RunFailed):  # reading all records will find a damaged one
                found, _ = self._read(bookmark_name(version), _BOOKMARK)
                record, made = self.digested_record(version)
                if made == found.digest and (view := restore_view(found, record)):
                    return view
        return None

    def refresh(self, view: LedgerView) -> LedgerView:
        """Add the records created since the view; read only these."""
        while True:
            try:
                found = self.digested_record(view.version + 1)
            except Missing:
                return view
            view = self._extend(view, record_digest(view.newest), [found])

    def genesis(self, record: Record) -> LedgerView:
        """Return the view of the first record."""
        try:
            return LedgerView.from_records(record)
        except InvalidRecord as error:
            raise self._corrupt(record.version, error) from error

    def after(self, view: LedgerView, record: Record) -> LedgerView:
        """Add one record to the view."""
        return self._extend(view, record_digest(view.newest), [(record, "")])

    def _extend(self, view: LedgerView, parent: str, found: Iterable[tuple[Record, str]]) -> LedgerView:
        """Add records with their digests to the view. parent: the digest of the view's newest record."""
        for view in self.growing(view, parent, found):  # noqa: B007, B020
            pass
        return view

    def growing(self, view: LedgerView, parent: str, found: Iterable[tuple[Record, str]]) -> Iterator[LedgerView]:
        """Do the same, and yield the view after each record; see LedgerView.growing."""
        newest, before, fragments = view.version, parent, len(view.newest.state)

        def checked_records() -> Iterator[Record]:
            nonlocal newest, before
            for record, made in found:
                if record.parent != before:
                    raise InvalidRecord(f"its parent is not record {newest}")
                counts = {"fragments": record.state, "updates": record.updates, "outer states": record.outer}
                for name, digests in counts.items():
                    if len(digests) != fragments and (digests or name == "fragments"):
                        raise InvalidRecord(f"it has {len(digests)} {name}, not {fragments}")
                yield record
                newest, before = record.version, made

        try:
            yield from view.growing(checked_records())
        except InvalidRecord as error:
            raise self._corrupt(newest + 1, error) from error

    def _records(self, versions: Sequence[int]) -> Iterator[tuple[Record, str]]:
        return self.store.read_each(self.digested_record, versions)

    def digested_record(self, version: int) -> tuple[Record, str]:
        """Read a record, and its digest."""
        name = commit_name(version)
        found, made = self._read(name, _RECORD)
        if found.version != version:
            raise Corrupt(name, self.store.root, f"it holds record {found.version}")
        return found, made

    def _corrupt(self, version: int, why: object) -> Corrupt:
        return Corrupt(commit_name(version), self.store.root, str(why))

    def _create(self, name: str, body: bytes) -> CreateOutcome:
        data = _seal(body)
        if self.store.create(name, data):
            return "created"
        return "same" if self.store.read(name) == data else "lost"

    def _read(self, name: str, adapter: TypeAdapter[Content]) -> tuple[Content, str]:
        """Return the content of a file and its SHA-256."""
        data = self.store.read(name)
        body = data[len(_BEFORE) : -_AFTER_BYTES]
        made = hashlib.sha256(body).hexdigest()
        if data != b"".join((_BEFORE, body, _AFTER % made.encode())):
            raise Corrupt(name, self.store.root, "it does not match the digest written in it")
        try:
            return _parse(body, adapter), made
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise Corrupt(name, self.store.root, f"{where}: {first['msg']}") from error
        except ValueError as error:
            raise Corrupt(name, self.store.root, str(error)) from error


def _canonical(value: Content, adapter: TypeAdapter[Content]) -> bytes:
    """Return canonical JSON. Raise ValueError if it would not give the value back, like a number that is not finite."""
    found = adapter.validate_json(adapter.dump_json(value, warnings="error"))  # a whole number may stand for a float
    if found != value:
        raise ValueError(f"{value} would not come back from JSON unchanged")
    return _dump(found, adapter)


def _dump(value: Content, adapter: TypeAdapter[Content]) -> bytes:
    plain = adapter.dump_python(value, mode="json", warnings="error")
    for name, absent in (("averaged", []), ("kept", None)):  # absent from records of runs without them
        if name in plain and plain[name] == absent:
            del plain[name]
    return _ENCODER.encode(plain).encode()


def _parse(body: bytes, adapter: TypeAdapter[Content]) -> Content:
    value = adapter.validate_json(body, strict=True, extra="forbid")
    if _dump(value, adapter) != body:
        raise ValueError("a field is missing, or it is not canonical JSON")
    return value


def _bookmark(view: LedgerView) -> bytes:
    """Return a bookmark's file. It need not be checked: a bad one would only be ignored."""
    return _seal(_dump(make_bookmark(view, record_digest(view.newest)), _BOOKMARK))


def _seal(body: bytes) -> bytes:
    return _BEFORE + body + _AFTER % hashlib.sha256(body).hexdigest().encode()
