"""What a run's storage proves: the whole history by its digests, the last versions by computing them again."""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.values import Decision, Header, Identity, Record
from tpuswarm.swarm.core.view import View
from tpuswarm.swarm.storage import retention
from tpuswarm.swarm.storage.bookmark import bookmark_name
from tpuswarm.swarm.storage.ledger import READERS, Ledger, commit_name, first_gap, header_name
from tpuswarm.swarm.storage.objects import Objects, array_digest, object_name, payload_name, update_digest
from tpuswarm.swarm.storage.replay import Unreplayable, replay
from tpuswarm.swarm.storage.store import Missing, Store

Key = TypeVar("Key")
Found = TypeVar("Found")


@dataclass
class Report:
    """What was found. A problem is one sentence; without problems the run is sound."""

    problems: list[str] = field(default_factory=list)
    newest: int | None = None
    """The last version up to which the records are proved; None without a sound genesis."""
    recomputed: list[int] = field(default_factory=list)
    """Versions with contributors whose state and outer state were computed again, to the same bits."""
    not_recomputed: dict[int, str] = field(default_factory=dict)
    """The other versions with contributors, and why not."""
    processed: int = 0
    """Tokens trained, as members reported them last."""
    applied: int = 0
    """Tokens counted."""
    dropped: int = 0
    """Tokens of dropped contributions."""
    undecided: int = 0
    """Tokens of accepted contributions without a verdict."""


def verify(store: Store, say: Callable[[str], None]) -> Report:
    """Check everything that is stored. say: told what comes next.

    Needs up to 17 bytes of memory per element of the largest fragment, 25 with a moving average, and from a bucket what
    it reads. Raises RunFailed only where the storage cannot be listed; damage is in the report.
    """
    check = _Check(store)
    say("reading the records")
    view = check.read_records()
    if view is not None:
        say("reading the headers")
        check.list_files()
        check.read_headers()
        check.books(view)
        for fragment in range(len(view.newest.state)):
            say(f"recomputing fragment {fragment + 1} of {len(view.newest.state)}")
            check.recompute(fragment)
        say("checking the other arrays")
        check.rest(view)
    report = check.report
    changed = [each.version for each in check.records if any(one.fate == "applied" for one in each.decisions)]
    report.recomputed = [version for version in changed if version not in report.not_recomputed]
    return report


def newest_whole(store: Store) -> int:
    """The newest version whose state and outer state are undamaged: the run could go on from it.

    Raises RunFailed if there is none.
    """
    check = _Check(store)
    check.read_records()
    check.list_files()
    for record in reversed(check.records):
        if all(check.array(digest) is not None for digest in (*record.state, *record.outer)):
            return record.version
    raise RunFailed(f"no commit in {store.root} is intact; restore a copy of commits/ and objects/")


class _Check:
    """Reads in the opposite order of writing, so that a run may go on meanwhile: records, then the arrays they name."""

    def __init__(self, store: Store):
        self.report = Report()
        self.records: list[Record] = []
        """The proved chain from genesis on."""
        self._store, self._ledger, self._objects = store, Ledger(store), Objects(store)
        self._header_names: list[str] = []
        self._stored: set[str] = set()
        """Names of arrays that are there."""
        self._seen: set[str] = set()
        """Those of them that were read, and so checked."""
        self._changes = 0
        """Commits with contributors by the time that the arrays were listed: what retention may have looked at."""
        self._headers: dict[Identity, Header] = {}
        self._verdicts: dict[Identity, tuple[Decision, int]] = {}
        """Each, with the version of its record."""
        self.array = lru_cache(maxsize=8)(self._array)  # neighbouring versions need mostly the same ones

    def read_records(self) -> View | None:
        """The chain, and the view of it, from the records alone; what bookmarks say is compared with it."""
        bookmarks = self._ledger.bookmarks()
        versions = self._ledger.versions()
        whole = versions[: first_gap(versions)]
        view: View | None = None
        for record in self._tried(self._ledger.record, whole):
            if record is None:
                break
            try:
                view = self._ledger.after(view, record) if view else self._ledger.genesis(record)
            except RunFailed as error:
                self._problem(str(error))
                break
            self.records.append(record)
            self._verdicts |= {each.identity: (each, record.version) for each in record.decisions}
            if record.version in bookmarks:
                self._check_bookmark(view)
        if len(whole) < len(versions) or not versions:
            self._problem(str(Missing(commit_name(len(whole)), self._store.root)))
        if rest := len(versions) - len(self.records):
            self._problem(f"{rest} records from {commit_name(len(self.records))} on are unproven")
        self.report.newest = view.version if view else None
        return view

    def _check_bookmark(self, view: View) -> None:
        try:
            right = self._ledger.is_right(view)
        except Missing:  # outlived since it was listed
            return
        except RunFailed as error:
            self._problem(str(error))
            return
        if not right:
            name = bookmark_name(view.version)
            self._problem(f"{name} does not say what the records say; remove it: nothing is lost with it")

    def list_files(self) -> None:
        """What is stored by now."""
        self._header_names = self._store.names("headers/")
        self._stored = {*self._store.names("objects/"), *self._store.names("payloads/")}
        if self.records:
            self._changes = self.records[-1].changes
            with suppress(RunFailed):
                self._changes = self._ledger.record(self._ledger.versions()[-1]).changes

    def read_headers(self) -> None:
        """All of them."""
        found = self._tried(self._ledger.header, self._header_names)
        self._headers = {header.identity: header for header in found if header}

    def books(self, view: View) -> None:
        """Every verdict against its header, weights and tokens; that no row counts twice follows from the view."""
        report, headers = self.report, self._headers
        report.processed, report.applied, report.dropped = sum(view.processed.values()), view.tokens, view.dropped
        report.undecided = sum(header.tokens for key, header in headers.items() if key not in self._verdicts)
        per_row = {header.tokens / max(1, len(header.rows)) for header in headers.values()}
        if len(per_row) > 1:
            self._problem(f"headers disagree on tokens per row: {min(per_row):g} to {max(per_row):g}")
        for identity in headers.keys() - self._verdicts.keys():
            if view.has_decided(identity):
                self._problem(f"{header_name(identity)} has no verdict, but a later push of its member has one")
        there = set(self._header_names)
        for identity, (decision, version) in self._verdicts.items():
            name, header = header_name(identity), headers.get(identity)
            if header is None and name not in there:
                self._problem(f"{name} is missing, but {commit_name(version)} lists it as {decision.fate}")
            elif header is not None and (wrong := _wrong(decision, header, self.records[version])):
                self._problem(f"{commit_name(version)} and {name} disagree: {wrong}")
        for record in self.records:
            weights = [each.weight for each in record.decisions if each.fate == "applied"]
            if weights and not math.isclose(math.fsum(weights), 1, rel_tol=1e-9):
                self._problem(f"{commit_name(record.version)}: its weights add up to {math.fsum(weights)}, not 1")

    def recompute(self, fragment: int) -> None:
        """One fragment of every version with contributors."""
        for record in self.records:
            if not any(each.fate == "applied" for each in record.decisions):
                continue
            name = f"{commit_name(record.version)}, fragment {fragment}"
            known = [each[fragment : fragment + 1] for each in (record.state, record.outer, record.updates)]
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

    def rest(self, view: View) -> None:
        """What has to be there is there, and what is there and was not read yet is whole."""
        for record in self.records:
            for digest in retention.kept_objects(record, self._changes, 0):
                self._require(object_name(digest))
            for digest in record.objects:
                if self._unseen(object_name(digest)):
                    self._loaded(object_name(digest), partial(self._objects.check, digest))
        for identity, header in self._headers.items():
            decision, version = self._verdicts.get(identity, (None, view.version))
            recent = self._changes - view.changes(version) < retention.COMMITS
            for fragment in range(len(header.digests)):
                name = payload_name(identity, fragment)
                if recent and (decision is None or decision.fate == "applied"):
                    self._require(name)
                if self._unseen(name):
                    self._payload(header, fragment)

    def _array(self, digest: str) -> np.ndarray | None:
        name = object_name(digest)
        return self._loaded(name, lambda: self._objects.get_array(digest))

    def _payload(self, header: Header, fragment: int) -> dict[str, np.ndarray] | None:
        identity, digest = header.identity, header.digests[fragment]
        return self._loaded(
            payload_name(identity, fragment), lambda: self._objects.get_payload(identity, fragment, digest)
        )

    def _loaded(self, name: str, load: Callable[[], Found]) -> Found | None:
        if name not in self._stored:
            return None
        self._seen.add(name)
        try:
            return load()
        except Missing:  # deleted since it was listed
            return None
        except RunFailed as error:
            self._problem(str(error))
            return None

    def _unseen(self, name: str) -> bool:
        return name in self._stored and name not in self._seen

    def _require(self, name: str) -> None:
        if name not in self._stored:
            self._problem(str(Missing(name, self._store.root)))

    def _tried(self, read: Callable[[Key], Found], keys: Iterable[Key]) -> list[Found | None]:
        """What can be read; None where it cannot, which is a problem."""

        def one(key: Key) -> Found | RunFailed:
            try:
                return read(key)
            except RunFailed as error:
                return error

        with ThreadPoolExecutor(READERS) as pool:
            found = list(pool.map(one, keys))
        for each in found:
            if isinstance(each, RunFailed):
                self._problem(str(each))
        return [None if isinstance(each, RunFailed) else each for each in found]

    def _problem(self, sentence: str) -> None:
        if sentence not in self.report.problems:  # what several versions need is found several times
            self.report.problems.append(sentence)


def _wrong(decision: Decision, header: Header, record: Record) -> str | None:
    """What does not agree between a verdict and the header it is on."""
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
