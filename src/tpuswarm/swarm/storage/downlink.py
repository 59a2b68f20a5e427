"""What members are sent of a commit: what it added, in few bits, or the whole."""

from dataclasses import dataclass

import numpy as np

from tpuswarm.swarm.core.arithmetic.outer import follow
from tpuswarm.swarm.core.arithmetic.quantize import Quantized, bytes_per_element
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, array_digest
from tpuswarm.swarm.storage.store import Corrupt, Missing

WHOLE = 4.0
"""Bytes that an element has in full precision."""


@dataclass(frozen=True, eq=False)
class Chain:
    """What brings one fragment from a version to a later one."""

    updates: tuple[Quantized, ...]
    """In the order of their commits."""
    digest: str
    """Of the fragment of the later version."""

    def on(self, anchor: np.ndarray) -> np.ndarray | None:
        """The fragment of the later version, float32[n], from the earlier one; None where it is not the ledger's."""
        found = follow(anchor, self.updates)
        return found if array_digest(found) == self.digest else None


def chain(ledger: Ledger, objects: Objects, fragment: int, size: int, base: int, version: int) -> Chain | None:
    """From version `base` to `version`; None where the whole is fewer bytes, or the only thing there is."""
    updates: list[Quantized] = []
    newest = record = ledger.record(version)
    cost = 0.0
    for number in reversed(range(base, version)):
        before = ledger.record(number)
        cost += bytes_of(record)
        if cost >= WHOLE:
            return None
        if record.updates:
            try:
                updates.append(objects.get_update(record.updates[fragment], size))
            except (Missing, Corrupt):
                return None
        record = before
    return Chain(tuple(reversed(updates)), newest.state[fragment])


def bytes_of(record: Record) -> float:
    """Bytes of an element that members are sent for this version."""
    if record.updates:
        return bytes_per_element(record.downlink)
    changed = any(decision.fate == "applied" for decision in record.decisions)
    return WHOLE if changed else 0.0
