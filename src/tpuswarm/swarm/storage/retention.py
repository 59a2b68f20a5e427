"""Which arrays of a run may go: the disk holds some tens of versions, the ledger all of them."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tpuswarm.swarm.core.arithmetic.quantize import bytes_per_element
from tpuswarm.swarm.core.values import Form, Record, Rule
from tpuswarm.swarm.core.view import LANDMARK, View
from tpuswarm.swarm.storage.ledger import Ledger, decided_by, header_name
from tpuswarm.swarm.storage.objects import object_name
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

COMMITS = 20
"""So many last commits keep their state and the payloads they decided; records without contributors do not count."""
BACK = 500
"""So many last commits are looked at anew after a restart: their files may have been too young to go before."""
UNNAMED = 24 * 3600.0
"""Seconds after which an object that no record names goes, and a payload without a header: its commit, or its push,
never came."""
SETTLING = 600.0
"""Seconds for which nothing written goes: a commit under way may be about to name it, though an old one did too."""


class Disk(NamedTuple):
    """What a swarm's run keeps."""

    held: float
    """Bytes at any time: the last versions and their payloads."""
    version: float
    """Bytes that stay for ever of each LANDMARK-th version."""


def disk(elements: int, form: Form, rule: Rule, members: int, average: bool = False) -> Disk:
    """For so many shared float32 numbers, with a moving average or without; in both directions of that form. One
    version and one push of each member are on their way, and the buffer of a delayed momentum is counted, though
    members that push together leave it out.
    """
    sent, state = elements * bytes_per_element(form), 4.0 * elements
    outer = state * (2 * (rule == "nesterov") + average + (form != "plain"))
    update = sent if form != "plain" else 0.0
    return Disk((COMMITS + 1) * (state + outer + update + members * sent), state)


def is_recent(at: int, changes: int, limit: int) -> bool:
    """Whether all arrays of a record stay, by the changes that it counts; changes and limit as for `kept_objects`."""
    return changes - at < max(COMMITS, limit + 1)


def kept_objects(record: Record, changes: int, limit: int) -> tuple[str, ...]:
    """The digests of those objects of a record that stay.

    changes: of the newest record; limit: the staleness up to which contributions count.
    """
    if is_recent(record.changes, changes, limit):
        return record.objects
    return record.state if record.changes % LANDMARK == 0 else ()  # not the outer state: nothing goes on from there


class Holdings:
    """What the ledger says of the arrays: what stays, and what may go."""

    def __init__(self, limit: int):
        """limit: the staleness up to which contributions count."""
        self._limit = limit
        self._recent: deque[Record] = deque()
        """Those of which all arrays stay."""
        self.named: set[str] = set()
        """Objects of the records that it was given, but for those that went."""
        self.view: View | None = None
        """As far as it knows the ledger."""

    def follow(self, ledger: Ledger, view: View) -> list[Missing | Corrupt]:
        """Read on, up to the newest record of a view; the first time from BACK records before it on, at least.

        Raises RunFailed for a record that cannot be read and of which arrays stay: which ones, nobody knows then. An
        older one is passed over and returned; what only it names is not missed by anybody, and waits for a day.
        """
        versions, changes = range(view.version + 1), view.newest.changes
        stay = bisect_left(versions, True, key=lambda each: is_recent(view.changes(each), changes, self._limit))
        first = self.view.version + 1 if self.view else min(stay, max(0, view.version + 1 - BACK))
        needed = list(ledger.records(range(max(first, stay), view.version + 1)))
        older, damage = ledger.readable(range(first, stay))
        self.add(view, [*older, *needed])
        return damage

    def add(self, view: View, records: Iterable[Record]) -> None:
        """The next records, in order, up to the newest of the view: those of which arrays stay, and any before them."""
        self.view = view
        for record in records:
            self._recent.append(record)
            self.named |= _objects(record.objects)
        while not is_recent(self._recent[0].changes, view.newest.changes, self._limit):
            self._recent.popleft()

    def needed(self) -> set[str]:
        """Objects that stay."""
        landmarks = self.view.landmarks if self.view else ()
        return _objects(landmarks).union(*(_objects(each.objects) for each in self._recent))

    def expired(self) -> Callable[[str], bool]:
        """Of the name of a header, whether the payloads of its contribution may go."""
        assert self.view is not None
        changes, known = self.view.newest.changes, decided_by(self.view)
        lately = [record for record in self._recent if changes - record.changes < COMMITS]
        fresh = {header_name(each.identity) for record in lately for each in record.decisions}
        return lambda header: known(header) and header not in fresh


def deletable(held: Holdings, ages: Mapping[str, float], accepted: Callable[[str], bool]) -> list[str]:
    """The names of the arrays that may go, sorted.

    ages: seconds since writing of every stored object and payload; accepted: whether a header of that name is stored.
    A payload that was accepted stays until it has a verdict.
    """
    needed, expired = held.needed(), held.expired()

    def goes(name: str, age: float) -> bool:
        if name.startswith("payloads/"):
            header = _header(name)
            return expired(header) or (age > UNNAMED and not accepted(header))
        named = name in held.named
        return name.startswith("objects/") and name not in needed and age > (SETTLING if named else UNNAMED)

    return sorted(name for name, age in ages.items() if goes(name, age))


def clean(store: Store, held: Holdings) -> list[str]:
    """Delete what may go; the names. Commits may be made beside it."""
    names = deletable(held, {**store.ages("objects/"), **store.ages("payloads/")}, store.exists)
    for name in names:
        store.delete(name)
    held.named.difference_update(names)
    store.sweep(UNNAMED)
    return names


def _objects(digests: Iterable[str]) -> set[str]:
    return {object_name(digest) for digest in digests}


def _header(payload: str) -> str:
    """The name of a payload's header, as `header_name` gives it."""
    return f"headers/{'-'.join(payload.rpartition('-')[0].split('/')[1:])}.json"
