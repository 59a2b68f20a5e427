"""Verify a run's storage: the whole history by its digests, and recent versions by recomputing them."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import takewhile
from typing import TypeVar, cast

import numpy as np

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.values import Decision, Header, Identity, Record
from tpuswarm.swarm.storage import retention
from tpuswarm.swarm.storage.bookmark import bookmark_name
from tpuswarm.swarm.storage.ledger import Ledger, commit_name, first_gap, header_name
from tpuswarm.swarm.storage.objects import (
    Objects,
    array_digest,
    object_digest,
    object_name,
    payload_name,
    update_digest,
)
from tpuswarm.swarm.storage.replay import Unreplayable, replay
from tpuswarm.swarm.storage.store import Missing, Store
from tpuswarm.train.run import schema
from tpuswarm.train.run.directory import EVENTS

Key = TypeVar("Key")
Found = TypeVar("Found")


@dataclass
class Report:
    """The result. A problem is one sentence; without problems the run is sound."""

    problems: list[str] = field(default_factory=list)
    newest: int | None = None
    """The last version up to which the records are proved; None without a sound genesis."""
    recomputed: list[int] = field(default_factory=list)
    """Versions with contributors whose state and outer state were recomputed to the same bits."""
    not_recomputed: dict[int, str] = field(default_factory=dict)
    """The other versions with contributors, and why."""
    processed: int = 0
    """Tokens trained, from the last reports of the members."""
    applied: int = 0
    """Tokens counted."""
    dropped: int = 0
    """Tokens of dropped contributions."""
    undecided: int = 0
    """Tokens of accepted contributions without a verdict."""


def verify(store: Store, say: Callable[[str], None]) -> Report:
    """Check everything that is stored. say: called with each step.

    Needs up to 17 bytes of memory per element of the largest fragment, 25 with a moving average, and for a bucket the
    size of the files it reads. Raise RunFailed only if the storage cannot be listed; damage is in the report.
    """
    check = _Check(store)
    announced = announced_version(store)  # first, because the run may continue
    say("reading the records")
    with _no_collection():
        view = check.read_records()
    if view is not None:
        if announced > view.version:
            check.report.problems.append(f"{EVENTS} announces commit {announced}; {commit_name(announced)} is missing")
        say("reading the headers")
        check.list_files()
        with _no_collection():
            check.read_headers()
        check.check_verdicts(view)
        check.find_recomputable()
        for fragment in range(len(view.newest.state)):
            say(f"recomputing fragment {fragment + 1} of {len(view.newest.state)}")
            check.recompute(fragment)
        say("checking the other arrays")
        check.check_remaining(view)
    report = check.report
    report.recomputed = [record.version for record in check.recomputable if record.version not in report.not_recomputed]
    return report


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector, which would look again and again at all that was read."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def announced_version(store: Store) -> int:
    """Return the newest commit that events.jsonl announces; 0 for none."""
    try:
        lines = store.read(EVENTS).splitlines(keepends=True)
    except Missing:
        return 0
    rows = (schema.parse_row(EVENTS, line) for line in reversed(lines) if b'"commit"' in line)
    return next((row["version"] for row in rows if row and row["event"] == "commit"), 0)


def newest_whole(store: Store) -> int:
    """Return the newest version with an undamaged and finite state, from which a new run can start.

    Raise RunFailed if there is none.
    """
    check = _Check(store)
    check.read_records()
    check.list_files()
    for record in reversed(check.records):
        state = (check.array(digest) for digest in record.state)
        if all(array is not None and np.isfinite(array).all() for array in state) and all(
            check.array(digest) is not None for digest in record.outer
        ):
            return record.version
    raise RunFailed(f"no commit in {store.root} is intact; restore a copy of commits/ and objects/")


class _Check:
    """Reads in the opposite order of writing, so that a run may continue: records, then the arrays that they name."""

    def __init__(self, store: Store):
        self.report = Report()
        self.records: list[Record] = []
        """The proved chain from genesis on."""
        self.recomputable: list[Record] = []
        """Records with contributors of which at least one fragment can be recomputed."""
        self._store, self._ledger, self._objects = store, Ledger(store), Objects(store)
        self._header_names: list[str] = []
        self._stored: set[str] = set()
        """Names of stored arrays."""
        self._digests: set[str] = set()
        """Digests of stored objects."""
        self._checked: set[str] = set()
        """Stored arrays that were read, and so checked."""
        self._changes = 0
        """Commits with contributors when the arrays were listed, for retention."""
        self._headers: dict[Identity, Header] = {}
        self._verdicts: dict[Identity, tuple[Decision, int]] = {}
        """Verdicts with the version of their record."""
        self.array = lru_cache(maxsize=8)(self._array)  # neighbouring versions need mostly the same arrays

    def read_records(self) -> LedgerView | None:
        """Read the chain and its view from the records alone; compare bookmarks with it."""
        bookmarks = self._ledger.bookmarks()
        versions = self._ledger.versions()
        whole = versions[: first_gap(versions)]
        view: LedgerView | None = None
        try:
            for view in self._views(whole):
                record = view.newest
                self.records.append(record)
                self._verdicts |= {decision.identity: (decision, record.version) for decision in record.decisions}
                if record.version in bookmarks:
                    self._check_bookmark(view)
        except RunFailed as error:
            self._problem(str(error))
        if len(whole) < len(versions) or not versions:
            self._problem(str(Missing(commit_name(len(whole)), self._store.root)))
        if rest := len(versions) - len(self.records):
            self._problem(f"{rest} records from {commit_name(len(self.records))} on are unproven")
        self.report.newest = view.version if view else None
        return view

    def _views(self, versions: Sequence[int]) -> Iterator[LedgerView]:
        """Yield the view after each record up to the first that cannot be read or does not follow."""
        found = self._try_each(self._ledger.digested_record, versions)
        sound = takewhile(lambda record: record is not None, found)
        for first, digest in cast(Iterator[tuple[Record, str]], sound):
            yield (view := self._ledger.genesis(first))
            yield from self._ledger.growing(view, digest, cast(Iterator[tuple[Record, str]], sound))

    def _check_bookmark(self, view: LedgerView) -> None:
        try:
            is_valid = self._ledger.has_valid_bookmark(view)
        except Missing:  # removed since it was listed
            return
        except RunFailed as error:
            self._problem(str(error))
            return
        if not is_valid:
            name = bookmark_name(view.version)
            self._problem(f"{name} contradicts the records; remove it: nothing is lost with it")

    def list_files(self) -> None:
        self._header_names = self._store.names("headers/")
        objects = self._store.names("objects/")
        self._digests = set(map(object_digest, objects))
        self._stored = {*objects, *self._store.names("payloads/")}
        if self.records:
            self._changes = self.records[-1].changes
            with suppress(RunFailed):
                self._changes = self._ledger.record(self._ledger.versions()[-1]).changes

    def read_headers(self) -> None:
        found = self._try_each(self._ledger.header, self._header_names)
        self._headers = {header.identity: header for header in found if header}

    def check_verdicts(self, view: LedgerView) -> None:
        """Check every verdict against its header, weights and tokens; the view proves that no row counts twice."""
        report, headers = self.report, self._headers
        report.processed, report.applied, report.dropped = sum(view.processed.values()), view.tokens, view.dropped
        report.undecided = sum(header.tokens for key, header in headers.items() if key not in self._verdicts)
        per_row = {header.tokens / max(1, len(header.rows)) for header in headers.values()}
        if len(per_row) > 1:
            self._problem(f"headers disagree on tokens per row: {min(per_row):g} to {max(per_row):g}")
        for identity in headers.keys() - self._verdicts.keys():
            if view.has_decided(identity):
                self._problem(f"{header_name(identity)} has no verdict, but a later push of its member has one")
        stored = set(self._header_names)
        for identity, (decision, version) in self._verdicts.items():
            header = headers.get(identity)
            if header is None and (name := header_name(identity)) not in stored:
                self._problem(f"{name} is missing, but {commit_name(version)} lists it as {decision.fate}")
            elif header is not None and (wrong := _disagreement(decision, header, self.records[version])):
                self._problem(f"{commit_name(version)} and {header_name(identity)} disagree: {wrong}")
        for record in self.records:
            weights = [decision.weight for decision in record.decisions if decision.fate == "applied"]
            if weights and not math.isclose(math.fsum(weights), 1, rel_tol=1e-9):
                self._problem(f"{commit_name(record.version)}: its weights add up to {math.fsum(weights)}, not 1")

    def find_recomputable(self) -> None:
        """Find the versions with contributors whose previous state, or a part of it, is stored."""
        for record in self.records:
            if any(decision.fate == "applied" for decision in record.decisions):
                before = self.records[record.version - 1]
                if self._digests.isdisjoint(before.state):
                    self.report.not_recomputed[record.version] = f"the state of commit {before.version} is gone"
                else:
                    self.recomputable.append(record)

    def recompute(self, fragment: int) -> None:
        """Recompute one fragment of every version."""
        for record in self.recomputable:
            name = f"{commit_name(record.version)}, fragment {fragment}"
            known = [digests[fragment : fragment + 1] for digests in (record.state, record.outer, record.updates)]
            why = "recomputed, it is a different state"
            try:
                records = self.records.__getitem__
                made = replay(records, self._headers, record.version, fragment, self.array, self._payload)
                outer = () if made.outer is None else (array_digest(made.outer),)
                update = () if made.update is None else (update_digest(made.update),)
                if [(array_digest(made.state),), outer, update] == known:
                    continue
                self._problem(f"{name}: {why}")
            except Unreplayable as error:
                why = str(error)
            except ValueError as error:
                self._problem(f"{name}: {error}")
            self.report.not_recomputed.setdefault(record.version, why)

    def check_remaining(self, view: LedgerView) -> None:
        """Check that required files exist, that files which were not read yet are intact, and the newest state."""
        for fragment, digest in enumerate(view.newest.state):
            if (array := self.array(digest)) is not None and not np.isfinite(array).all():
                self._problem(
                    f"{commit_name(view.version)}, fragment {fragment}: its state is not finite; `--init-from` starts "
                    "a new run from the newest commit that is finite"
                )
        for record in self.records:
            for digest in retention.kept_objects(record, self._changes, 0):
                self._require(object_name(digest))
            for digest in record.objects:
                if digest in self._digests and self._is_unchecked(object_name(digest)):
                    self._load(object_name(digest), partial(self._objects.check, digest))
        stored = {name.rpartition("-")[0] for name in self._stored if name.startswith("payloads/")}
        for identity, header in self._headers.items():
            decision, version = self._verdicts.get(identity, (None, view.version))
            is_recent = self._changes - view.changes(version) < retention.RETAINED_COMMITS
            is_required = is_recent and (decision is None or decision.fate == "applied")
            if not is_required and (not stored or payload_name(identity, 0).rpartition("-")[0] not in stored):
                continue
            for fragment in range(len(header.digests)):
                name = payload_name(identity, fragment)
                if is_required:
                    self._require(name)
                if self._is_unchecked(name):
                    self._payload(header, fragment)

    def _array(self, digest: str) -> np.ndarray | None:
        name = object_name(digest)
        return self._load(name, lambda: self._objects.get_array(digest))

    def _payload(self, header: Header, fragment: int) -> dict[str, np.ndarray] | None:
        identity, digest = header.identity, header.digests[fragment]
        return self._load(
            payload_name(identity, fragment), lambda: self._objects.get_payload(identity, fragment, digest)
        )

    def _load(self, name: str, load: Callable[[], Found]) -> Found | None:
        if name not in self._stored:
            return None
        self._checked.add(name)
        try:
            return load()
        except Missing:  # deleted since it was listed
            return None
        except RunFailed as error:
            self._problem(str(error))
            return None

    def _is_unchecked(self, name: str) -> bool:
        return name in self._stored and name not in self._checked

    def _require(self, name: str) -> None:
        if name not in self._stored:
            self._problem(str(Missing(name, self._store.root)))

    def _try_each(self, read: Callable[[Key], Found], keys: Iterable[Key]) -> list[Found | None]:
        """Read each key; None stands for one that cannot be read, which is a problem."""

        def try_read(key: Key) -> Found | RunFailed:
            try:
                return read(key)
            except RunFailed as error:
                return error

        results = list(self._store.read_each(try_read, keys))
        for result in results:
            if isinstance(result, RunFailed):
                self._problem(str(result))
        return [None if isinstance(result, RunFailed) else result for result in results]

    def _problem(self, sentence: str) -> None:
        if sentence not in self.report.problems:  # several versions may need the same file
            self.report.problems.append(sentence)


def _disagreement(decision: Decision, header: Header, record: Record) -> str | None:
    """Describe how a verdict disagrees with the header that it is about."""
    if header.run != record.run:
        return f"the header belongs to run {header.run}"
    if (header.rows, header.tokens, header.base) != (decision.rows, decision.tokens, decision.base):
        return "rows, tokens or base differ"
    if header.base >= record.version:
        return f"its base {header.base} is not an earlier commit"
    if decision.fate == "applied" and not header.finite:
        return "it is not finite but was counted"
    if len(header.digests) != len(record.state):
        return f"the header has {len(header.digests)} fragments, the state {len(record.state)}"
    return None
