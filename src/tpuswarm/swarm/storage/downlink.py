"""Choose how members fetch a commit: as quantized updates, or whole."""

from dataclasses import dataclass

import numpy as np

from tpuswarm.swarm.core.arithmetic.outer import apply_updates
from tpuswarm.swarm.core.arithmetic.quantize import Quantized, bytes_per_element
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, array_digest
from tpuswarm.swarm.storage.store import Corrupt, Missing

FULL_BYTES_PER_ELEMENT = 4.0


@dataclass(frozen=True, eq=False)
class Chain:
    """The updates that bring one fragment from a version to a later one."""

    updates: tuple[Quantized, ...]
    """In the order of their commits."""
    digest: str
    """Digest of the fragment of the later version."""

    def on(self, anchor: np.ndarray) -> np.ndarray | None:
        """Apply the updates to the earlier fragment, float32[n]; None if the result does not match the ledger."""
        found = apply_updates(anchor, self.updates)
        return found if array_digest(found) == self.digest else None


def chain(ledger: Ledger, objects: Objects, fragment: int, size: int, base: int, version: int) -> Chain | None:
    """Return the updates from version `base` to `version`; None if the whole is smaller, or updates are missing."""
    updates: list[Quantized] = []
    newest = record = ledger.record(version)
    cost = 0.0
    for number in reversed(range(base, version)):
        before = ledger.record(number)
        cost += bytes_per_update(record)
        if cost >= FULL_BYTES_PER_ELEMENT:
            return None
        if record.updates:
            try:
                updates.append(objects.get_update(record.updates[fragment], size))
            except (Missing, Corrupt):
                return None
        record = before
    return Chain(tuple(reversed(updates)), newest.state[fragment])


def bytes_per_update(record: Record) -> float:
    """Return the bytes per element that members receive for this version."""
    if record.updates:
        return bytes_per_element(record.downlink)
    changed = any(decision.fate == "applied" for decision in record.decisions)
    return FULL_BYTES_PER_ELEMENT if changed else 0.0
