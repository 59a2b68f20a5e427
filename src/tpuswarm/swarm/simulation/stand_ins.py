"""What stands in for an aggregator and for the ledger in the simulation: the same answers, nothing kept."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import Accepted, Merge, ShardResult, Terms
from tpuswarm.swarm.core.values import Header, Identity, Record
from tpuswarm.swarm.processes.effects import Process, Sleep
from tpuswarm.swarm.storage.downlink import FULL_BYTES_PER_ELEMENT, bytes_per_update

MERGE = 4e8
"""Parameters of contributions that a shard reads, checks and adds up in a second, about."""


class NoLedger:
    """Keeps nothing: the coordinator of a simulation lives for ever."""

    def __init__(self, genesis: Record):
        self._genesis = genesis

    def view(self) -> LedgerView:
        """Genesis."""
        return LedgerView.from_records(self._genesis)

    def headers(self, view: LedgerView) -> list[Header]:
        """None."""
        return []

    def bookmark_due(self, view: LedgerView) -> bool:
        """Never: nobody will read it."""
        return False

    def digest(self, record: Record) -> str:
        """Of its number."""
        return hashlib.sha256(str(record.version).encode()).hexdigest()

    def append(self, record: Record) -> str:
        """Always created."""
        return "created"

    def create_header(self, header: Header) -> str:
        """Always created."""
        return "created"


def genesis(terms: Terms, fragments: int) -> Record:
    """The first record of a run without parameters."""
    return Record(
        run=terms.run, version=0, epoch=1, parent="", state=("0" * 64,) * fragments, outer=(), decisions=(),
        rule=terms.outer.rule, rate=1.0, momentum=terms.outer.momentum, share=1.0, gathered=0.0, tokens=0,
        changes=0, processed=(), digests=terms.digests, time=0.0,
    )  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """Updates, if there were any."""

    digest: str

    def on(self, anchor: str) -> str:
        """The later version."""
        return self.digest


def update_bytes(records: Mapping[int, Record], base: int, version: int) -> float | None:
    """Bytes of a parameter that bring it from one version to a later one; None where the whole is fewer."""
    cost = sum(bytes_per_update(records[each]) for each in range(base + 1, version + 1))
    return cost if cost < FULL_BYTES_PER_ELEMENT else None


@dataclass
class TimedShard:
    """Answers as an aggregator does, and takes the time of a merge."""

    records: dict[int, Record]
    own: range
    """The fragments of this shard."""
    fragment: float
    """Parameters of each."""
    received: float = 0.0
    """Bytes."""
    sent: float = 0.0

    def put(self, identity: Identity, number: int, arrays: Any, digest: str) -> Accepted:
        """Stored."""
        return Accepted()

    def fetch(self, number: int, digest: str) -> str:
        """Sent."""
        return digest

    def updates(self, number: int, base: int, version: int) -> "Sent | None":
        """What was added since, where that is fewer bytes than the whole."""
        cost = update_bytes(self.records, base, version)
        return None if cost is None else Sent(self.records[version].state[number])

    def merge(self, newest: Record, merge: Merge) -> Process:
        """The next version of its fragments."""
        applied = sum(decision.fate == "applied" for decision in merge.decisions)
        if not applied:
            return ShardResult({number: newest.state[number] for number in self.own}, {}, {})
        plain = merge.outer.downlink == "plain"
        yield Sleep(applied * self.fragment * len(self.own) / MERGE)
        name = hashlib.sha256(f"{merge.version}".encode()).hexdigest()
        made = dict.fromkeys(self.own, name)
        return ShardResult(made, {}, {} if plain else made)
