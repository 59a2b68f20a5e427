"""Stand-ins for the ledger and the aggregators in the simulation: the same answers without storage."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpuswarm.swarm.core.arithmetic.quantize import sent_bytes
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import Accepted, Merge, ShardResult, Terms
from tpuswarm.swarm.core.values import Header, Identity, Record
from tpuswarm.swarm.processes.effects import Process, Sleep
from tpuswarm.swarm.storage.downlink import FULL_BYTES_PER_ELEMENT, bytes_per_update

MERGED_PARAMETERS_PER_S = 4e8
"""Approximate speed at which an aggregator reads, checks and adds contributions."""


class NoLedger:
    """Stores nothing: the coordinator of a simulation never restarts."""

    def __init__(self, genesis: Record):
        self._genesis = genesis

    def view(self) -> LedgerView:
        return LedgerView.from_records(self._genesis)

    def headers(self, view: LedgerView) -> list[Header]:
        return []

    def exists(self, version: int) -> bool:
        return False

    def bookmark_due(self, view: LedgerView) -> bool:
        return False

    def digest(self, record: Record) -> str:
        return hashlib.sha256(str(record.version).encode()).hexdigest()

    def append(self, record: Record) -> str:
        return "created"

    def create_header(self, header: Header) -> str:
        return "created"


def genesis(terms: Terms, fragments: int) -> Record:
    """Return the first record of a run without parameters."""
    return Record(
        run=terms.run, version=0, epoch=1, parent="", state=("0" * 64,) * fragments, outer=(), decisions=(),
        rule=terms.outer.rule, rate=1.0, momentum=terms.outer.momentum, share=1.0, gathered=0.0, tokens=0,
        changes=0, processed=(), digests=terms.digests, time=0.0,
    )  # fmt: skip


@dataclass(frozen=True)
class TimedUpdates:
    """Stands for a Chain of updates."""

    digest: str

    def on(self, anchor: str) -> str:
        return self.digest


def update_bytes(records: Mapping[int, Record], base: int, version: int, size: int) -> float | None:
    """Return the bytes of a fragment's updates; None if the whole fragment, of so many parameters, is smaller."""
    made = [records[number] for number in range(base + 1, version + 1)]
    if sum(map(bytes_per_update, made)) >= FULL_BYTES_PER_ELEMENT:
        return None
    return sum(sent_bytes(size, record.downlink) for record in made if bytes_per_update(record))


@dataclass
class TimedShard:
    """Answers like an aggregator, and takes as long to merge."""

    records: dict[int, Record]
    own: range
    """Fragments of this shard."""
    sizes: tuple[int, ...]
    """Parameters of each fragment."""
    received: float = 0.0
    """Bytes received."""
    sent: float = 0.0

    def put(self, identity: Identity, number: int, arrays: Any, digest: str) -> Accepted:
        return Accepted()

    def fetch(self, number: int, digest: str) -> str:
        return digest

    def updates(self, number: int, base: int, version: int) -> TimedUpdates | None:
        cost = update_bytes(self.records, base, version, self.sizes[number])
        return None if cost is None else TimedUpdates(self.records[version].state[number])

    def merge(self, newest: Record, merge: Merge) -> Process:
        applied = sum(decision.fate == "applied" for decision in merge.decisions)
        if not applied:
            return ShardResult({number: newest.state[number] for number in self.own}, {}, {})
        plain = merge.outer.downlink == "plain"
        yield Sleep(applied * sum(self.sizes[number] for number in self.own) / MERGED_PARAMETERS_PER_S)
        name = hashlib.sha256(f"{merge.version}".encode()).hexdigest()
        made = dict.fromkeys(self.own, name)
        return ShardResult(made, {}, {} if plain else made)
