"""Decide which arrays of a run to delete: the disk holds some tens of versions, the ledger all versions."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.arithmetic.quantize import bytes_per_element
from tpuswarm.swarm.core.ledger_view import LANDMARK_INTERVAL, LedgerView
from tpuswarm.swarm.core.values import Form, Record, Rule
from tpuswarm.swarm.storage.ledger import Ledger, decided_by, header_name
from tpuswarm.swarm.storage.objects import object_name
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

RETAINED_COMMITS = 20
"""Last commits whose state and decided payloads are kept; records without contributors do not count."""
RESCAN_COUNT = 500
"""Last commits checked again after a restart: their files may have been too young to delete before."""
UNNAMED_RETENTION_S = 24 * 3600.0
"""Age at which an object that no record names is deleted, and a payload without a header: its commit or push failed."""
MIN_AGE_S = 600.0
"""Younger files are never deleted: a commit in progress may be about to name one that an old record names too."""


class DiskUsage(NamedTuple):
    """The size of a swarm's run, in bytes."""

    commit: float
    """A version and its payloads."""
    version: float
    """Each LANDMARK_INTERVAL-th version, which is kept for ever."""

    @property
    def held(self) -> float:
        """At any time: the last versions and their payloads."""
        return (RETAINED_COMMITS + 1) * self.commit


def estimate_disk(elements: int, form: Form, rule: Rule, members: int, average: bool = False) -> DiskUsage:
    """Estimate the disk usage for shared float32 elements, sent in this form in both directions.

    It includes one version and one push of each member in transit, and the buffer of a delayed momentum, which members
    that push together do not need. average: whether the run keeps a moving average.
    """
    sent, state = elements * bytes_per_element(form), 4.0 * elements
    outer = state * (2 * (rule == "nesterov") + average + (form != "plain"))
    update = sent if form != "plain" else 0.0
    return DiskUsage(state + outer + update + members * sent, state)


def is_recent(record_changes: int, changes: int, limit: int) -> bool:
    """Whether all arrays of a record are kept; changes and limit as for `kept_objects`."""
    return changes - record_changes < max(RETAINED_COMMITS, limit + 1)


def kept_objects(record: Record, changes: int, limit: int) -> tuple[str, ...]:
    """Return the digests of a record's objects that are kept.

    changes: of the newest record; limit: the staleness up to which contributions count.
    """
    if is_recent(record.changes, changes, limit):
        return record.objects
    is_landmark = record.changes % LANDMARK_INTERVAL == 0
    return record.state if is_landmark else ()  # not the outer state: no run continues from there


class Holdings:
    """Which arrays the ledger keeps, and which may be deleted."""

    def __init__(self, limit: int, payload_commits: int | None = RETAINED_COMMITS):
        """limit: the staleness up to which contributions count; payload_commits: last commits with contributors whose
        payloads are kept, None for all.
        """
        self._limit, self._payload_commits = limit, payload_commits
        self._decided: deque[tuple[int, tuple[str, ...]]] = deque()
        """Changes of the last records, and the headers that each decided: their payloads are kept."""
        self._recent: deque[Record] = deque()
        """Records whose arrays are all kept."""
        self.named: set[str] = set()
        """Objects that the known records name, without deleted ones."""
        self.view: LedgerView | None = None
        """The known part of the ledger."""

    def follow(self, ledger: Ledger, view: LedgerView) -> list[Missing | Corrupt]:
        """Read records up to the newest of a view; the first time from at least RESCAN_COUNT records before it.

        Raise RunFailed for an unreadable record whose arrays are kept: nothing says which. An older one is skipped and
        returned; objects that only it names are deleted after a day.
        """
        versions, changes = range(view.version + 1), view.newest.changes
        kept_from = bisect_left(
            versions, True, key=lambda version: is_recent(view.changes(version), changes, self._limit)
        )
        payloads_from = bisect_left(versions, True, key=lambda version: self._keeps(view.changes(version), changes))
        rescan_from = min(kept_from, payloads_from, max(0, view.version + 1 - RESCAN_COUNT))
        first = self.view.version + 1 if self.view else rescan_from
        needed = list(ledger.records(range(max(first, kept_from), view.version + 1)))
        older, damage = ledger.read_available(range(first, kept_from))
        self.add(view, [*older, *needed])
        return damage

    def add(self, view: LedgerView, records: Iterable[Record]) -> None:
        """Add the next records, in order, up to the view's newest: those with kept arrays, and any before them."""
        self.view = view
        for record in records:
            self._recent.append(record)
            self.named |= _object_names(record.objects)
            if self._payload_commits is not None:
                names = tuple(header_name(decision.identity) for decision in record.decisions)
                self._decided.append((record.changes, names))
        while not is_recent(self._recent[0].changes, view.newest.changes, self._limit):
            self._recent.popleft()
        while self._decided and not self._keeps(self._decided[0][0], view.newest.changes):
            self._decided.popleft()

    def _keeps(self, record_changes: int, changes: int) -> bool:
        """Whether the payloads that a record decided are kept; with None, no record has to be read for that."""
        return self._payload_commits is not None and changes - record_changes < self._payload_commits

    def needed(self) -> set[str]:
        """Return the objects that are kept."""
        landmarks = self.view.landmarks if self.view else ()
        return _object_names(landmarks).union(*(_object_names(record.objects) for record in self._recent))

    def expired(self) -> Callable[[str], bool]:
        """Return a function that tells from a header's name whether its payloads may be deleted."""
        assert self.view is not None
        if self._payload_commits is None:
            return lambda header: False
        is_decided = decided_by(self.view)
        fresh = {name for _, names in self._decided for name in names}
        return lambda header: is_decided(header) and header not in fresh


def deletable(holdings: Holdings, ages: Mapping[str, float], accepted: Callable[[str], bool]) -> list[str]:
    """Return the names of the arrays that may be deleted, sorted.

    ages: seconds since every stored object and payload was written; accepted: whether a header of that name is stored.
    An accepted payload is kept until it has a verdict.
    """
    needed, is_expired = holdings.needed(), holdings.expired()

    def is_deletable(name: str, age: float) -> bool:
        if name.startswith("payloads/"):
            header = _header_of(name)
            return is_expired(header) or (age > UNNAMED_RETENTION_S and not accepted(header))
        min_age = MIN_AGE_S if name in holdings.named else UNNAMED_RETENTION_S
        return name.startswith("objects/") and name not in needed and age > min_age

    return sorted(name for name, age in ages.items() if is_deletable(name, age))


def clean(store: Store, holdings: Holdings) -> list[str]:
    """Delete unneeded arrays; return their names. Raise RunFailed at the end if some could not be deleted.

    Commits may be made meanwhile.
    """
    names = deletable(holdings, {**store.ages("objects/"), **store.ages("payloads/")}, store.exists)
    deleted, failed = [], None
    for name in names:
        try:
            store.delete(name)
            deleted.append(name)
        except RunFailed as error:
            failed = failed or error
    holdings.named.difference_update(deleted)
    if failed:
        raise failed
    store.sweep(UNNAMED_RETENTION_S)
    return deleted


def _object_names(digests: Iterable[str]) -> set[str]:
    return {object_name(digest) for digest in digests}


def _header_of(payload: str) -> str:
    return f"headers/{'-'.join(payload.rpartition('-')[0].split('/')[1:])}.json"
