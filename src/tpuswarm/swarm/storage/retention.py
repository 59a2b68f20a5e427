"""Which arrays of a run may go: the disk holds some tens of versions, the ledger all of them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tpuswarm.swarm.core.arithmetic.quantize import bytes_per_element
from tpuswarm.swarm.core.values import Form, Record, Rule
from tpuswarm.swarm.storage.objects import object_name, payload_name
from tpuswarm.swarm.storage.store import Store

COMMITS = 20
"""So many last commits keep their state and the payloads they decided; records without contributors do not count."""
EVERY = 50
"""Each so many-th commit keeps its state for ever, but not the outer optimizer's: nothing goes on from there."""
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
    """Bytes that stay for ever of each EVERY-th version."""


def disk(elements: int, form: Form, rule: Rule, members: int, average: bool = False) -> Disk:
    """For so many shared float32 numbers, with a moving average or without; in both directions of that form. One
    version and one push of each member are on their way, and the buffer of a delayed momentum is counted, though
    members that push together leave it out.
    """
    sent, state = elements * bytes_per_element(form), 4.0 * elements
    outer = state * (2 * (rule == "nesterov") + average + (form != "plain"))
    update = sent if form != "plain" else 0.0
    return Disk((COMMITS + 1) * (state + outer + update + members * sent), state)


def is_recent(record: Record, changes: int, limit: int) -> bool:
    """Whether all arrays of a record stay; changes and limit as for `kept_objects`."""
    return changes - record.changes < max(COMMITS, limit + 1)


def kept_objects(record: Record, changes: int, limit: int) -> tuple[str, ...]:
    """The digests of those objects of a record that stay.

    changes: of the newest record; limit: the staleness up to which contributions count.
    """
    if is_recent(record, changes, limit):
        return record.objects
    return record.state if record.changes % EVERY == 0 else ()


class Holdings:
    """What the records of a ledger say of the arrays: what stays, and what may go. Each record is read once."""

    def __init__(self, limit: int):
        """limit: the staleness up to which contributions count."""
        self._limit = limit
        self._recent: deque[Record] = deque()
        """Those of which something may still go."""
        self._undecided: deque[Record] = deque()
        """Those that keep the payloads they decided."""
        self.named: set[str] = set()
        """Objects that any record names."""
        self._for_ever: set[str] = set()
        self.decided: set[str] = set()
        """Contributions whose payloads may go."""
        self.count = 0
        """Of the records it knows: those of versions 0 to count - 1."""

    def add(self, records: Iterable[Record]) -> None:
        """The next ones, in order."""
        for record in records:
            self.count += 1
            self.named |= _objects(record.objects)
            self._recent.append(record)
            self._undecided.append(record)
            while not is_recent(self._recent[0], record.changes, self._limit):
                old = self._recent.popleft()
                self._for_ever |= _objects(kept_objects(old, record.changes, self._limit))
            while record.changes - self._undecided[0].changes >= COMMITS:
                decisions = self._undecided.popleft().decisions
                self.decided |= {_contribution(payload_name(each.identity, 0)) for each in decisions}

    def needed(self) -> set[str]:
        """Objects that stay."""
        return self._for_ever.union(*(_objects(each.objects) for each in self._recent))


def deletable(held: Holdings, ages: Mapping[str, float], accepted: Callable[[str], bool]) -> list[str]:
    """The names of the arrays that may go, sorted.

    held: of all of the ledger; ages: seconds since writing of every stored object and payload; accepted: whether a
    header of that name is stored. A payload that was accepted stays until it has a verdict.
    """
    needed = held.needed()

    def goes(name: str, age: float) -> bool:
        if name.startswith("payloads/"):
            return _contribution(name) in held.decided or (age > UNNAMED and not accepted(_header(name)))
        named = name in held.named
        return name.startswith("objects/") and name not in needed and age > (SETTLING if named else UNNAMED)

    return sorted(name for name, age in ages.items() if goes(name, age))


def clean(store: Store, held: Holdings) -> list[str]:
    """Delete what may go; the names. For a coordinator, between two commits."""
    names = deletable(held, {**store.ages("objects/"), **store.ages("payloads/")}, store.exists)
    for name in names:
        store.delete(name)
    store.sweep(UNNAMED)
    return names


def _objects(digests: Iterable[str]) -> set[str]:
    return {object_name(digest) for digest in digests}


def _contribution(payload: str) -> str:
    """What the names of all fragments of a contribution have in common."""
    return payload.rpartition("-")[0]


def _header(payload: str) -> str:
    """The name of a payload's header, as `header_name` gives it."""
    return f"headers/{'-'.join(_contribution(payload).split('/')[1:])}.json"
