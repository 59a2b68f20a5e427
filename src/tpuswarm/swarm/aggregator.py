"""An aggregator shard: takes payloads in, computes its fragments of the next version, hands out versions.

It keeps nothing that is not in the run's storage: one that dies is replaced by another.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from tpuswarm.swarm import tensors
from tpuswarm.swarm.core.merge import Contribution
from tpuswarm.swarm.core.messages import Accepted, Damaged, Lost, Merge, Part, Refused
from tpuswarm.swarm.core.outer import commit
from tpuswarm.swarm.core.values import Identity, Record
from tpuswarm.swarm.ledger import Ledger, header_name
from tpuswarm.swarm.objects import Objects
from tpuswarm.swarm.replay import contribution, fits
from tpuswarm.swarm.store import Conflict, Corrupt, Missing


class Aggregator:
    """One of `shards` shards: the fragments whose number modulo `shards` is `index`."""

    def __init__(self, ledger: Ledger, objects: Objects, sizes: Sequence[int], index: int, shards: int):
        """sizes: elements of each fragment of the run's layout."""
        self._ledger, self._objects, self._sizes = ledger, objects, tuple(sizes)
        self._index, self._shards = index, shards

    def put(
        self, identity: Identity, fragment: int, payload: Mapping[str, np.ndarray], digest: str
    ) -> Accepted | Refused | Damaged:
        """Store a payload, durably; the same again changes nothing."""
        found = tensors.digest(payload)
        if found != digest:
            return Damaged(f"fragment {fragment} arrived with the digest {found[:12]}…, not {digest[:12]}…")
        if not fits(payload, self._sizes[fragment]):
            return Refused(f"fragment {fragment} does not have the {self._sizes[fragment]} elements of the layout")
        try:
            self._objects.put_payload(identity, fragment, payload)
        except Conflict as error:
            return Refused(str(error))
        return Accepted()

    def fetch(self, fragment: int, digest: str) -> np.ndarray:
        """A fragment of a version, float32[n]; raises Missing and Corrupt."""
        return self._objects.get_array(digest)

    def merge(self, newest: Record, merge: Merge) -> Part | Lost:
        """The digests of this shard's fragments of the next version, whose arrays are stored then.

        newest: the version before it. Lost where payloads that the merge counts cannot be read; Missing and Corrupt
        are raised for anything else.
        """
        mine = range(self._index, len(self._sizes), self._shards)
        applied = [decision for decision in merge.decisions if decision.fate == "applied"]
        if not applied:
            kept = {number: newest.outer[number] for number in mine} if newest.outer else {}
            return Part({number: newest.state[number] for number in mine}, kept)
        headers = [self._ledger.header(header_name(decision.identity)) for decision in applied]
        bases = {base: self._ledger.record(base) for base in {decision.base for decision in applied}}
        lost: set[Identity] = set()
        state: dict[int, str] = {}
        outer: dict[int, str] = {}
        for number in mine:
            contributions = []
            for decision, header in zip(applied, headers, strict=True):
                base = self._objects.get_array(bases[decision.base].state[number])
                try:
                    payload = self._objects.get_payload(decision.identity, number, header.digests[number])
                except (Missing, Corrupt):
                    lost.add(decision.identity)
                else:
                    contributions.append(contribution(decision, base, payload))
            if not lost:
                state[number], made = self._commit(newest, merge, number, contributions)
                outer |= {number: made} if made else {}
        return Lost(frozenset(lost)) if lost else Part(state, outer)

    def _commit(
        self, newest: Record, merge: Merge, number: int, contributions: Sequence[Contribution]
    ) -> tuple[str, str | None]:
        theta = self._objects.get_array(newest.state[number])
        with ExitStack() as files:
            new, finish = files.enter_context(self._objects.writing_array(theta.shape))
            outer = new_outer = finish_outer = None
            if merge.outer.rule != "average":
                outer = self._objects.get_array(newest.outer[number], (2, *theta.shape))
                new_outer, finish_outer = files.enter_context(self._objects.writing_array(outer.shape))
            commit(
                theta, outer, contributions, merge.outer, merge.rate, merge.share, merge.gathered == 0, new, new_outer
            )
            return finish(), finish_outer() if finish_outer else None
