"""An aggregator shard: takes payloads in, computes its fragments of the next version, hands out versions.

It keeps nothing that is not in the run's storage: one that dies is replaced by another.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from tpuswarm.swarm.core.arithmetic.merge import Contribution
from tpuswarm.swarm.core.arithmetic.outer import average_row, commit, first_state, state_rows
from tpuswarm.swarm.core.arithmetic.quantize import BITS
from tpuswarm.swarm.core.messages import Accepted, Damage, Damaged, Gone, Lost, Merge, Part, Refused
from tpuswarm.swarm.core.values import Decision, Header, Identity, Record
from tpuswarm.swarm.processes.effects import Do, Process
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.downlink import Chain, chain
from tpuswarm.swarm.storage.ledger import Ledger, header_name
from tpuswarm.swarm.storage.objects import Objects, fits
from tpuswarm.swarm.storage.replay import contribution, outer_before, restore
from tpuswarm.swarm.storage.store import Conflict, Corrupt, Missing

Given = ParamSpec("Given")


def _slowly(name: str) -> Callable[[Callable[Given, Any]], Callable[Given, Process]]:
    """Of a method that takes time: the engine carries it out as one effect, and others of the node beside it."""

    def decorate(method: Callable[Given, Any]) -> Callable[Given, Process]:
        @wraps(method)
        def process(*arguments: Given.args, **named: Given.kwargs) -> Process:
            return (yield Do(name, partial(method, *arguments, **named)))

        return process

    return decorate


class Aggregator:
    """One of `shards` shards: the fragments whose number modulo `shards` is `index`.

    Its methods are processes; what they are said to return and raise is the result of their one effect.
    """

    def __init__(self, ledger: Ledger, objects: Objects, sizes: Sequence[int], index: int, shards: int):
        """sizes: elements of each fragment of the run's layout."""
        self._ledger, self._objects, self._sizes = ledger, objects, tuple(sizes)
        self._index, self._shards = index, shards

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return self._sizes

    @_slowly("shard stores a payload")
    def put(
        self, identity: Identity, fragment: int, payload: Mapping[str, np.ndarray], digest: str
    ) -> Accepted | Refused | Damaged:
        """Store a payload, durably; the same again changes nothing."""
        found = tensors.digest(payload)
        if found != digest:
            return Damaged(f"fragment {fragment} arrived with the digest {found[:12]}…, not {digest[:12]}…")
        if not fits(payload, self.sizes[fragment]):
            return Refused(f"fragment {fragment} does not have the {self.sizes[fragment]} elements of the layout")
        try:
            self._objects.put_payload(identity, fragment, payload, digest)
        except Conflict as error:
            return Refused(str(error))
        return Accepted()

    @_slowly("shard reads a fragment")
    def fetch(self, fragment: int, digest: str) -> np.ndarray | Gone:
        """A fragment of a version, float32[n]; Gone where it can be had no longer, and is not of the newest.

        Of the newest it raises Missing and Corrupt then: no run goes on without.
        """
        try:
            return self._array(fragment, digest)
        except (Missing, Corrupt):
            if digest == self._newest().state[fragment]:
                raise
            return Gone()

    @_slowly("shard reads an average")
    def average(self, fragment: int, version: int) -> np.ndarray | Gone:
        """The moving average of a fragment at a version, float32[n]; Gone, or raised, as `fetch` says.

        Of a run that was only now asked to keep one: the fragment itself, with which the average will begin.
        """
        record = self._ledger.record(version)
        try:
            if record.kept is None:
                return self._array(fragment, record.state[fragment])
            return self._array(fragment, record.outer[fragment])[average_row(record.downlink)]
        except (Missing, Corrupt):
            if version == self._newest().version:
                raise
            return Gone()

    @_slowly("shard reads updates")
    def updates(self, fragment: int, base: int, version: int) -> Chain | None:
        """What brings a fragment from one version to a later one; None where the whole has to be fetched."""
        return chain(self._ledger, self._objects, fragment, self.sizes[fragment], base, version)

    @_slowly("shard checks a version")
    def check(self, newest: Record) -> Damage | None:
        """Whether this shard's fragments of a version are there, or can be computed again."""
        try:
            for number in self._mine:
                for digest in (newest.state[number], *newest.outer[number : number + 1]):
                    self._array(number, digest)
        except (Missing, Corrupt) as error:
            return Damage(str(error))
        return None

    @_slowly("shard merges")
    def merge(self, newest: Record, merge: Merge) -> Part | Lost | Damage:
        """The digests of this shard's fragments of the next version, whose arrays are stored then.

        newest: the version before it. Lost where payloads that the merge counts cannot be read, Damage where the
        version before or the base of a contribution cannot.
        """
        applied = [decision for decision in merge.decisions if decision.fate == "applied"]
        if not applied:
            kept = {number: newest.outer[number] for number in self._mine} if newest.outer else {}
            return Part({number: newest.state[number] for number in self._mine}, kept, {})
        contributed = [(decision, self._ledger.header(header_name(decision.identity))) for decision in applied]
        bases = {base: self._ledger.record(base) for base in {decision.base for decision in applied}}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy and hashlib let other threads work meanwhile
            work = partial(self._merge, newest, merge, contributed, bases)
            try:
                made = dict(zip(self._mine, pool.map(work, self._mine), strict=True))
            except (Missing, Corrupt) as error:
                return Damage(str(error))
        whole = {number: digests for number, digests in made.items() if isinstance(digests, _Digests)}
        if lost := [each for each in made.values() if isinstance(each, Lost)]:
            return Lost(frozenset[Identity]().union(*(each.identities for each in lost)))
        return Part(
            {number: each.state for number, each in whole.items()},
            {number: each.outer for number, each in whole.items() if each.outer},
            {number: each.update for number, each in whole.items() if each.update},
        )

    @property
    def _mine(self) -> range:
        return range(self._index, len(self.sizes), self._shards)

    def _merge(
        self,
        newest: Record,
        merge: Merge,
        contributed: Sequence[tuple[Decision, Header]],
        bases: Mapping[int, Record],
        number: int,
    ) -> "_Digests | Lost":
        """One fragment; raises Missing and Corrupt for anything but payloads."""
        arrays: dict[str, np.ndarray] = {}  # each is read, and its digest computed, once
        contributions, lost = [], set()
        for decision, header in contributed:
            digest = bases[decision.base].state[number]
            arrays[digest] = base = arrays[digest] if digest in arrays else self._array(number, digest)
            try:
                payload = self._objects.get_payload(decision.identity, number, header.digests[number])
            except (Missing, Corrupt):
                lost.add(decision.identity)
            else:
                contributions.append(contribution(decision, base, payload))
        if lost:
            return Lost(frozenset(lost))
        digest = newest.state[number]
        theta = arrays[digest] if digest in arrays else self._array(number, digest)
        return self._commit(newest, merge, number, theta, contributions)

    def _commit(
        self, newest: Record, merge: Merge, number: int, theta: np.ndarray, contributions: Sequence[Contribution]
    ) -> "_Digests":
        outer = first_state(merge.outer, theta)
        if (kept := outer_before(newest, merge.outer, number)) is not None:
            outer = self._array(number, kept)
        with ExitStack() as files:
            new, finish = files.enter_context(self._objects.writing_array(theta.shape))
            new_outer, sent = None, None
            finish_outer = finish_sent = _nothing
            if outer is not None:
                rows = state_rows(merge.outer, merge.gathered)
                new_outer, finish_outer = files.enter_context(self._objects.writing_array((rows, theta.size)))
            if merge.outer.downlink != "plain":
                room = self._objects.writing_update(theta.size, BITS[merge.outer.downlink])
                sent, finish_sent = files.enter_context(room)
            means = merge.outer.averaged_in(number)
            commit(
                theta, outer, contributions, merge.outer, merge.rate, merge.share, new, new_outer, sent, means,
                merge.kept or 0.0,
            )  # fmt: skip
            return _Digests(finish(), finish_outer(), finish_sent())

    def _newest(self) -> Record:
        return self._ledger.record(self._ledger.versions()[-1])

    def _array(self, number: int, digest: str) -> np.ndarray:
        """A fragment of a state or an outer state; one that is missing or damaged is computed again if that can be."""
        try:
            return self._objects.get_array(digest)
        except (Missing, Corrupt):
            if not restore(self._ledger, self._objects, number, digest):
                raise
            return self._objects.get_array(digest)


class _Digests(NamedTuple):
    """Of what a shard stored for one fragment of a version; empty for what there is not."""

    state: str
    outer: str
    update: str


def _nothing() -> str:
    return ""
