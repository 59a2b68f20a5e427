"""An aggregator: stores payloads, computes its fragments of the next version, and serves versions.

All its state is in the run's storage, so that another process can replace it at any time.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from tpuswarm.swarm.core.arithmetic.merge import Contribution, square
from tpuswarm.swarm.core.arithmetic.outer import (
    NotFinite,
    OuterRule,
    average_row,
    commit_fragment,
    initial_state,
    state_rows,
)
from tpuswarm.swarm.core.arithmetic.quantize import BITS
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.messages import (
    Accepted,
    Merge,
    PayloadDamaged,
    PayloadsLost,
    PayloadsNotFinite,
    Refused,
    ShardResult,
    VersionDamaged,
    VersionExpired,
)
from tpuswarm.swarm.core.people import person_of
from tpuswarm.swarm.core.values import Decision, Header, Identity, Record
from tpuswarm.swarm.processes.effects import Process, RunBlocking
from tpuswarm.swarm.processes.requests import Digest, is_array, request
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.downlink import Chain, chain
from tpuswarm.swarm.storage.founding import read_founding
from tpuswarm.swarm.storage.ledger import Ledger, header_name
from tpuswarm.swarm.storage.objects import Objects, payload_fits
from tpuswarm.swarm.storage.replay import contribution, outer_before, restore
from tpuswarm.swarm.storage.store import Conflict, Corrupt, Missing, Store

Arguments = ParamSpec("Arguments")
MAX_STALENESS = Staleness().limit
MAX_PART_BYTES = 2**26
"""Largest part of a data file that is read at once."""


def _blocking(name: str) -> Callable[[Callable[Arguments, Any]], Callable[Arguments, Process]]:
    """Turn a slow method into a process with one effect, so that the engine can run others meanwhile."""

    def decorate(method: Callable[Arguments, Any]) -> Callable[Arguments, Process]:
        @wraps(method)
        def process(*arguments: Arguments.args, **named: Arguments.kwargs) -> Process:
            return (yield RunBlocking(name, partial(method, *arguments, **named)))

        return process

    return decorate


class Aggregator:
    """Serves the fragments whose number modulo `shards` is `index`.

    Decorated methods are processes; their documented result is that of their one effect.
    """

    def __init__(self, ledger: Ledger, objects: Objects, sizes: Sequence[int], index: int, shards: int):
        """sizes: elements of each fragment of the run's layout."""
        self._ledger, self._objects, self._sizes = ledger, objects, tuple(sizes)
        self._index, self._shards = index, shards
        self._recent: deque[Record] = deque()
        """Records whose arrays stay on this disk if the run is in a bucket."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return self._sizes

    def _misplaced(self, fragment: int) -> Refused | None:
        if fragment in self._mine:
            return None
        return Refused(f"fragment {fragment} is not one of the {len(self._mine)} here")

    @request
    @_blocking("shard stores a payload")
    def put(
        self, identity: Identity, fragment: int, payload: Mapping[str, np.ndarray], digest: Digest
    ) -> Accepted | Refused | PayloadDamaged:
        """Store a payload durably. Repeating it changes nothing."""
        if refused := self._misplaced(fragment):
            return refused
        if not all(
            is_array(array, "uint8" if name == "codes" else "float32", 2 if name == "codes" else 1)
            for name, array in payload.items()
        ):
            return Refused(f"fragment {fragment} does not consist of arrays of float32, or of codes and scales")
        found = tensors.digest(payload)
        if found != digest:
            return PayloadDamaged(f"fragment {fragment} arrived with the digest {found[:12]}…, not {digest[:12]}…")
        if not payload_fits(payload, self.sizes[fragment]):
            return Refused(f"fragment {fragment} does not have the {self.sizes[fragment]} elements of the layout")
        try:
            self._objects.put_payload(identity, fragment, payload, digest)
        except Conflict as error:
            return Refused(str(error))
        return Accepted()

    @request
    @_blocking("shard reads a fragment")
    def fetch(self, fragment: int, digest: Digest) -> np.ndarray | VersionExpired | Refused:
        """Return a fragment of a version, float32[n]; VersionExpired if an old version cannot be read.

        Raise Missing or Corrupt if the newest version cannot be read: the run cannot continue without it.
        """
        if refused := self._misplaced(fragment):
            return refused
        try:
            return self._array(fragment, digest)
        except (Missing, Corrupt):
            if digest == self._newest().state[fragment]:
                raise
            return VersionExpired()

    @request
    @_blocking("shard reads an average")
    def average(self, fragment: int, version: int) -> np.ndarray | VersionExpired | Refused:
        """Return a fragment's moving average at a version, float32[n]; errors as for `fetch`.

        In a run that only now starts to keep one, it is the fragment itself, with which the average begins.
        """
        if refused := self._misplaced(fragment):
            return refused
        try:
            record = self._ledger.record(version)
        except Missing as error:
            return Refused(str(error))
        try:
            if record.kept is None:
                return self._array(fragment, record.state[fragment])
            return self._array(fragment, record.outer[fragment])[average_row(record.downlink)]
        except (Missing, Corrupt):
            if version == self._newest().version:
                raise
            return VersionExpired()

    @request
    @_blocking("shard reads updates")
    def updates(self, fragment: int, base: int, version: int) -> Chain | Refused | None:
        """Return the updates from one version to a later one; None if the fragment must be fetched whole."""
        if refused := self._misplaced(fragment):
            return refused
        if base > version:
            return Refused(f"there are no updates from commit {base} to commit {version}")
        try:
            return chain(self._ledger, self._objects, fragment, self.sizes[fragment], base, version)
        except Missing as error:
            return Refused(str(error))

    @request
    @_blocking("shard checks a version")
    def check(self, newest: Record) -> VersionDamaged | None:
        """Check that this shard's fragments of a version can be read or computed again."""
        try:
            for number in self._mine:
                for digest in (newest.state[number], *newest.outer[number : number + 1]):
                    self._array(number, digest)
        except (Missing, Corrupt) as error:
            return VersionDamaged(str(error))
        return None

    @request
    @_blocking("shard merges")
    def merge(self, newest: Record, merge: Merge) -> ShardResult | PayloadsLost | PayloadsNotFinite | VersionDamaged:
        """Store this shard's fragments of the next version, and return their digests.

        newest: the previous version. Return PayloadsLost if counted payloads cannot be read, PayloadsNotFinite if they
        have NaN or infinity, VersionDamaged if the previous version or the base of a contribution cannot be read.
        """
        self._drop_copies(newest)
        applied = [decision for decision in merge.decisions if decision.fate == "applied"]
        if not applied:
            kept = {number: newest.outer[number] for number in self._mine} if newest.outer else {}
            return ShardResult({number: newest.state[number] for number in self._mine}, kept, {})
        try:
            contributed = [(decision, self._ledger.header(header_name(decision.identity))) for decision in applied]
            bases = {base: self._ledger.record(base) for base in {decision.base for decision in applied}}
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy and hashlib release the interpreter's lock
                work = partial(self._merge, newest, merge, contributed, bases)
                made = dict(zip(self._mine, pool.map(work, self._mine), strict=True))
        except (Missing, Corrupt) as error:
            return VersionDamaged(str(error))
        done = {number: digests for number, digests in made.items() if isinstance(digests, _Digests)}
        for kind in (PayloadsLost, PayloadsNotFinite):
            if bad := [result for result in made.values() if isinstance(result, kind)]:
                return kind(frozenset[Identity]().union(*(result.identities for result in bad)))
        return ShardResult(
            {number: digests.state for number, digests in done.items()},
            {number: digests.outer for number, digests in done.items() if digests.outer},
            {number: digests.update for number, digests in done.items() if digests.update},
            sum_by_identity(digests.squares for digests in done.values()),
        )

    def _drop_copies(self, newest: Record) -> None:
        """Remove this disk's copies of decided payloads and of versions too old for a base; the bucket keeps them."""
        if self._recent and self._recent[-1].version == newest.version:
            return
        self._recent.append(newest)
        old = self._recent.popleft() if len(self._recent) > MAX_STALENESS + 1 else None
        needed = {digest for record in self._recent for digest in record.objects}
        self._objects.drop_copies(
            {*self._objects_of(old)} - needed if old else (),
            ((decision.identity, number) for decision in newest.decisions for number in self._mine),
        )

    def _objects_of(self, record: Record) -> list[str]:
        kinds = (record.state, record.outer, record.updates)
        return [digests[number] for digests in kinds if digests for number in self._mine]

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
    ) -> "_Digests | PayloadsLost | PayloadsNotFinite":
        """Merge one fragment. Raise Missing or Corrupt if anything but a payload cannot be read or is not finite."""
        arrays: dict[str, np.ndarray] = {}  # read and digest each array once
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
            return PayloadsLost(frozenset(lost))
        digest = newest.state[number]
        theta = arrays[digest] if digest in arrays else self._array(number, digest)
        try:
            made = self._commit(newest, merge, number, theta, contributions)
        except NotFinite as error:
            for stored in {newest.state[number], *newest.outer[number : number + 1], *arrays}:
                self._objects.get_finite(stored)  # no payload is to blame for a state that was not finite before
            return PayloadsNotFinite(frozenset(contributed[index][0].identity for index in error.contributions))
        squares = {
            decision.identity: square(sent)
            for (decision, _), sent in zip(contributed, contributions, strict=True)
            if person_of(decision.identity.incarnation.member)
        }
        return made._replace(squares=squares)

    def _commit(
        self, newest: Record, merge: Merge, number: int, theta: np.ndarray, contributions: Sequence[Contribution]
    ) -> "_Digests":
        outer = initial_state(merge.outer, theta)
        if (kept := outer_before(newest, merge.outer, number)) is not None:
            outer = self._array(number, kept)
        with ExitStack() as files:
            new, finish = files.enter_context(self._objects.writing_array(theta.shape))
            new_outer, sent = None, None
            finish_outer: Callable[[], str] = str
            finish_sent: Callable[[], str] = str
            if outer is not None:
                rows = state_rows(merge.outer, merge.gathered)
                new_outer, finish_outer = files.enter_context(self._objects.writing_array((rows, theta.size)))
            if merge.outer.downlink != "plain":
                room = self._objects.writing_update(theta.size, BITS[merge.outer.downlink])
                sent, finish_sent = files.enter_context(room)
            means = merge.outer.averaged_slices(number)
            commit_fragment(
                theta, outer, contributions, merge.outer, merge.rate, merge.share, new, new_outer, sent, means,
                merge.kept or 0.0,
            )  # fmt: skip
            return _Digests(finish(), finish_outer(), finish_sent())

    def _newest(self) -> Record:
        return self._ledger.record(self._ledger.versions()[-1])

    def _array(self, number: int, digest: str) -> np.ndarray:
        """Return a fragment of a state or an outer state, computing it again if it is missing or damaged."""
        try:
            return self._objects.get_array(digest)
        except (Missing, Corrupt):
            if not restore(self._ledger, self._objects, number, digest):
                raise
            return self._objects.get_array(digest)


class _Digests(NamedTuple):
    """Digests of the stored objects for one fragment of a version; empty for absent ones. Sums as in ShardResult."""

    state: str
    outer: str
    update: str
    squares: Mapping[Identity, float] = {}


def sum_by_identity(parts: Iterable[Mapping[Identity, float]]) -> dict[Identity, float]:
    """Add up the values of each contribution."""
    total: dict[Identity, float] = {}
    for part in parts:
        for identity, value in part.items():
            total[identity] = total.get(identity, 0.0) + value
    return total


class Shard(Aggregator):
    """An aggregator's process, which also stores a run's first state and serves its data files."""

    def __init__(self, store: Store, data: Path, index: int, shards: int):
        """data: the folder of the files that members fetch."""
        super().__init__(Ledger(store), Objects(store), (), index, shards)
        self._store, self._data = store, data

    @request
    def found(self, fragment: np.ndarray, outer: OuterRule) -> tuple[str, str | None] | Refused:
        """Store a fragment, float32[n], of the first state; return its digest and its outer state's, if any."""
        if not is_array(fragment, "float32", 1):
            return Refused("a fragment is a vector of float32")
        first = initial_state(outer, fragment)
        return self._objects.put_array(fragment), None if first is None else self._objects.put_array(first)

    @request
    def file(self, name: str, start: int, count: int) -> bytes | Refused:
        """Read a part of one of the run's data files."""
        names = {path.relative_to(self._data).as_posix() for path in self._data.rglob("*") if path.is_file()}
        if name not in names or count > MAX_PART_BYTES:
            return Refused(f"there is no data file {name!r} with a part of {count} bytes")
        path = self._data / name
        with path.open("rb") as file:
            file.seek(min(start, path.stat().st_size))  # the system refuses a far larger position
            return file.read(count)

    @request
    @_blocking("shard reads rows")
    def ranges(self, name: str, starts: np.ndarray, length: int) -> np.ndarray | Refused:
        """Read parts of a data file: uint8[n, length] from the positions int64[n]."""
        names = {path.relative_to(self._data).as_posix() for path in self._data.rglob("*") if path.is_file()}
        if name not in names or not is_array(starts, "int64", 1) or starts.size * length > MAX_PART_BYTES or not length:
            return Refused(f"there is no data file {name!r} with {starts.size} parts of {length} bytes")
        size = (self._data / name).stat().st_size
        if not starts.size or not 0 <= starts.min() <= starts.max() <= size - length:
            return Refused(f"{name} has {size} bytes; these parts are not all within it")
        windows = np.lib.stride_tricks.sliding_window_view(np.memmap(self._data / name, np.uint8, "r"), length)
        return np.asarray(windows[starts])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment, read at first use, when the run is founded."""
        if not self._sizes and (founding := read_founding(self._store)) is not None:
            self._sizes = founding.layout.sizes
        return self._sizes
