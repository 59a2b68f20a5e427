"""The ledger: commit records and headers as JSON files that are created once and never changed.

A file is one line, {"record":…,"sha256":"…"}, the content in canonical JSON: keys sorted, no spaces, UTF-8, floats with
the fewest digits that give them back. The digest in it shows damage where no later record would.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.values import Header, Identity, Record
from tpuswarm.swarm.core.view import Broken, View
from tpuswarm.swarm.storage.bookmark import (
    FOLDER,
    Bookmark,
    bookmark,
    bookmark_name,
    bookmark_version,
    due,
    opened,
    outlived,
)
from tpuswarm.swarm.storage.objects import checked_member
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

Outcome = Literal["created", "same", "lost"]
"""Of a creation: made now; there already, with the same content; there already, with another one."""

Content = TypeVar("Content", Record, Header, Bookmark)

_RECORD: TypeAdapter[Record] = TypeAdapter(Record)
_HEADER: TypeAdapter[Header] = TypeAdapter(Header)
_BOOKMARK: TypeAdapter[Bookmark] = TypeAdapter(Bookmark)
_COMMIT = re.compile(r"commits/(\d{6,})\.json")
_BEFORE, _AFTER = b'{"record":', b',"sha256":"%s"}\n'
READERS = 16
"""Files read at a time: from a bucket each takes tens of milliseconds."""
AHEAD = 8 * READERS
"""Records that are read before the first of them is looked at: a run's may be more than memory holds."""


def commit_name(version: int) -> str:
    """Of a record's file."""
    return f"commits/{version:06d}.json"


def header_name(identity: Identity) -> str:
    """Of a header's file; InputError for a member's name that cannot be part of it."""
    key = identity.incarnation
    return f"headers/{checked_member(key.member)}-{key.name}-{identity.sequence}.json"


def decided_by(view: View) -> Callable[[str], bool]:
    """Of the name of a header's file, whether the view has a verdict on it."""
    lives = {
        header_name(last.identity).rpartition("-")[0]: last.identity.sequence for last, _ in view.verdicts.values()
    }

    def decided(name: str) -> bool:
        life, _, sequence = name.removesuffix(".json").rpartition("-")
        return sequence.isdecimal() and int(sequence) <= lives.get(life, 0)

    return decided


def digest(record: Record) -> str:
    """SHA-256, in hexadecimal, of a record's canonical JSON: what the next record calls its parent."""
    return hashlib.sha256(_canonical(record, _RECORD)).hexdigest()


def first_gap(versions: Sequence[int]) -> int:
    """The first number that is missing in sorted ones."""
    return next((expected for expected, number in enumerate(versions) if number != expected), len(versions))


class Ledger:
    """The records and headers in a run's storage. What is read is checked in full: RunFailed names the bad file."""

    def __init__(self, store: Store):
        self.store = store

    def digest(self, record: Record) -> str:
        """As the function of that name."""
        return digest(record)

    def append(self, record: Record) -> Outcome:
        """Create a record; `lost` means that another coordinator made this version."""
        return self._create(commit_name(record.version), _canonical(record, _RECORD))

    def create_header(self, header: Header) -> Outcome:
        """Accept a contribution; `lost` means that another one of the same identity was accepted."""
        return self._create(header_name(header.identity), _canonical(header, _HEADER))

    def record(self, version: int) -> Record:
        """One record."""
        return self._record(version)[0]

    def header(self, name: str) -> Header:
        """One header, by the name of its file."""
        found, _ = self._read(name, _HEADER)
        try:
            misplaced = header_name(found.identity) != name
        except InputError:
            misplaced = True
        if misplaced:
            raise Corrupt(name, self.store.root, f"it holds the header of {found.identity}")
        return found

    def versions(self) -> list[int]:
        """The numbers of all records that are there, sorted."""
        matches = (_COMMIT.fullmatch(name) for name in self.store.names("commits/"))
        return sorted(int(match[1]) for match in matches if match)

    def unbroken(self) -> list[int]:
        """As `versions`; Missing where one between two is not there."""
        versions = self.versions()
        if (gap := first_gap(versions)) < len(versions):
            raise Missing(commit_name(gap), self.store.root)
        return versions

    def records(self, versions: Sequence[int]) -> Iterator[Record]:
        """Several records, never more than AHEAD of them in memory unless the caller keeps them."""
        return (record for record, _ in self._records(versions))

    def readable(self, versions: Iterable[int]) -> tuple[list[Record], list[Missing | Corrupt]]:
        """Several records as far as they can be read, and what is wrong with the others."""

        def tried(version: int) -> Record | Missing | Corrupt:
            try:
                return self.record(version)
            except (Missing, Corrupt) as error:
                return error

        with ThreadPoolExecutor(READERS) as pool:
            found = list(pool.map(tried, versions))
        return [each for each in found if isinstance(each, Record)], [
            each for each in found if not isinstance(each, Record)
        ]

    def headers(self, view: View | None = None) -> list[Header]:
        """All stored headers, in the order of their names; those on which a view has a verdict are not even read."""
        names = self.store.names("headers/")
        skipped = decided_by(view) if view else lambda name: False
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self.header, (name for name in names if not skipped(name))))

    def view(self) -> View:
        """What follows from all records. Those up to a bookmark that can be believed are not read again."""
        versions = self.unbroken()
        if not versions:
            raise RunFailed(f"{self.store.root} has no commits; use the folder or URL of a swarm's run")
        view = self._bookmarked(versions) or self.genesis(self.record(0))
        found = self._records(versions[view.version + 1 :])
        return self.refresh(self._through(view, digest(view.newest), found))

    def bookmark_due(self, view: View) -> bool:
        """Whether a bookmark belongs at a view's newest record."""
        return due(view)

    def bookmark(self, view: View) -> None:
        """Leave a bookmark at a view's newest record, and remove those that it outlives."""
        self.store.put(bookmark_name(view.version), _bookmark(view))
        for version in outlived(self.bookmarks(), view.version):
            self.store.delete(bookmark_name(version))

    def is_right(self, view: View) -> bool:
        """Whether the bookmark at a view's newest record says what the view says; raises Missing without one."""
        return self.store.read(bookmark_name(view.version)) == _bookmark(view)

    def bookmarks(self) -> list[int]:
        """The versions at which there is one, sorted."""
        found = (bookmark_version(name) for name in self.store.names(FOLDER))
        return sorted(version for version in found if version is not None)

    def _bookmarked(self, versions: Iterable[int]) -> View | None:
        """Of the newest bookmark that can be believed: it is whole, and its record is there and has that digest.

        versions: of the records that are there; one that only this machine has a copy of is not.
        """
        for version in sorted({*versions}.intersection(self.bookmarks()), reverse=True):
            with suppress(RunFailed):  # nor the record: whoever reads them all will find it
                found, _ = self._read(bookmark_name(version), _BOOKMARK)
                record, made = self._record(version)
                if made == found.digest and (view := opened(found, record)):
                    return view
        return None

    def refresh(self, view: View) -> View:
        """The view with the records made since; reads only these."""
        while True:
            try:
                found = self._record(view.version + 1)
            except Missing:
                return view
            view = self._through(view, digest(view.newest), [found])

    def genesis(self, record: Record) -> View:
        """The view of the first record."""
        try:
            return View.of(record)
        except Broken as error:
            raise self._broken(record.version, error) from error

    def after(self, view: View, record: Record) -> View:
        """The view with one more record."""
        return self._through(view, digest(view.newest), [(record, "")])

    def _through(self, view: View, parent: str, found: Iterable[tuple[Record, str]]) -> View:
        """The view with more records, each with its digest. parent: the digest of the view's newest."""
        newest, before, fragments = view.version, parent, len(view.newest.state)

        def follow() -> Iterator[Record]:
            nonlocal newest, before
            for record, made in found:
                if record.parent != before:
                    raise Broken(f"its parent is not record {newest}")
                counts = {"fragments": record.state, "updates": record.updates, "outer states": record.outer}
                for what, digests in counts.items():
                    if len(digests) != fragments and (digests or what == "fragments"):
                        raise Broken(f"it has {len(digests)} {what}, not {fragments}")
                yield record
                newest, before = record.version, made

        try:
            return view.through(follow())
        except Broken as error:
            raise self._broken(newest + 1, error) from error

    def _records(self, versions: Sequence[int]) -> Iterator[tuple[Record, str]]:
        """Several records, each with its digest."""
        with ThreadPoolExecutor(READERS) as pool:
            for first in range(0, len(versions), AHEAD):
                yield from pool.map(self._record, versions[first : first + AHEAD])

    def _record(self, version: int) -> tuple[Record, str]:
        """One record and its digest."""
        name = commit_name(version)
        found, made = self._read(name, _RECORD)
        if found.version != version:
            raise Corrupt(name, self.store.root, f"it holds record {found.version}")
        return found, made

    def _broken(self, version: int, why: object) -> Corrupt:
        return Corrupt(commit_name(version), self.store.root, str(why))

    def _create(self, name: str, body: bytes) -> Outcome:
        data = _sealed(body)
        if self.store.create(name, data):
            return "created"
        return "same" if self.store.read(name) == data else "lost"

    def _read(self, name: str, adapter: TypeAdapter[Content]) -> tuple[Content, str]:
        """What a file holds, and the SHA-256 of it."""
        data = self.store.read(name)
        body = data[len(_BEFORE) : -(len(_sealed(b"")) - len(_BEFORE))]
        if data != _sealed(body):
            raise Corrupt(name, self.store.root, "it does not match the digest written in it")
        try:
            return _parsed(body, adapter), data[len(_BEFORE) + len(body) :].split(b'"')[3].decode()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise Corrupt(name, self.store.root, f"{where}: {first['msg']}") from error
        except ValueError as error:
            raise Corrupt(name, self.store.root, str(error)) from error


def _canonical(value: Content, adapter: TypeAdapter[Content]) -> bytes:
    """Canonical JSON; ValueError for what would not come back as it is, like a number that is not finite."""
    body = _dumped(adapter.validate_json(_dumped(value, adapter)), adapter)  # a whole number may stand for a float
    if _parsed(body, adapter) != value:
        raise ValueError(f"{value} would not come back from JSON as it is")
    return body


def _dumped(value: Content, adapter: TypeAdapter[Content]) -> bytes:
    plain = adapter.dump_python(value, mode="json", warnings="error")
    for name, absent in (("averaged", []), ("kept", None)):  # a run without them has the records it always had
        if name in plain and plain[name] == absent:
            del plain[name]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _parsed(body: bytes, adapter: TypeAdapter[Content]) -> Content:
    value = adapter.validate_json(body, strict=True, extra="forbid")
    if _dumped(value, adapter) != body:
        raise ValueError("a field is missing, or it is not canonical JSON")
    return value


def _bookmark(view: View) -> bytes:
    """The file. One that would not come back as it is would only be passed over, so that is not proved as elsewhere."""
    return _sealed(_dumped(bookmark(view, digest(view.newest)), _BOOKMARK))


def _sealed(body: bytes) -> bytes:
    return _BEFORE + body + _AFTER % hashlib.sha256(body).hexdigest().encode()
