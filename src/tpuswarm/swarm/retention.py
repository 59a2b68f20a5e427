"""Which arrays of a run may go: the disk holds some tens of versions, the ledger all of them."""

from collections.abc import Mapping, Sequence

from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.objects import object_name, payload_name
from tpuswarm.swarm.store import Store

COMMITS = 20
"""So many last commits keep their state and the payloads they decided; records without contributors do not count."""
EVERY = 50
"""Each so many-th commit keeps its state for ever."""
UNNAMED = 24 * 3600.0
"""Seconds after which an object that no record names goes: its commit never came."""
SETTLING = 600.0
"""Seconds for which nothing written goes: a commit under way may be about to name it, though an old one did too."""


def keeps_state(record: Record, changes: int, limit: int) -> bool:
    """Whether the objects of a record stay: its state, its outer state and what members were sent.

    changes: of the newest record; limit: the staleness up to which contributions count.
    """
    return changes - record.changes < max(COMMITS, limit + 1) or record.changes % EVERY == 0


def deletable(records: Sequence[Record], ages: Mapping[str, float], limit: int) -> list[str]:
    """The names of the arrays that may go, sorted.

    records: all of the ledger; ages: seconds since writing of every stored object and payload; limit: the staleness up
    to which contributions count. A payload without a verdict never goes.
    """
    newest = records[-1].changes
    named = {object_name(digest) for each in records for digest in each.objects}
    stay = [each for each in records if keeps_state(each, newest, limit)]
    needed = {object_name(digest) for each in stay for digest in each.objects}
    old = [each for each in records if newest - each.changes >= COMMITS]
    decided = {_contribution(payload_name(decision.identity, 0)) for each in old for decision in each.decisions}
    return sorted(
        name
        for name, age in ages.items()
        if (name.startswith("payloads/") and _contribution(name) in decided)
        or (name.startswith("objects/") and name not in needed and age > (SETTLING if name in named else UNNAMED))
    )


def clean(store: Store, records: Sequence[Record], limit: int) -> list[str]:
    """Delete what may go; the names. For a coordinator, between two commits."""
    names = deletable(records, {**store.ages("objects/"), **store.ages("payloads/")}, limit)
    for name in names:
        store.delete(name)
    store.sweep(UNNAMED)
    return names


def _contribution(payload: str) -> str:
    """What the names of all fragments of a contribution have in common."""
    return payload.rpartition("-")[0]
