"""Exact stand-ins for arrays and storage, for the simulated swarm in world.py.

Parameters are sparse vectors of fractions over (row, incarnation): training a row adds its element with coefficient 1.
There are two fragments, each with a shard: the even rows and the odd rows.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.member_state import Adopt
from tpuswarm.swarm.core.messages import Accepted, Merge, PayloadsLost, ShardResult, Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Digests, Header, Identity, Incarnation, Record
from tpuswarm.swarm.member.device_state import Payload
from tpuswarm.swarm.storage.bookmark import Bookmark, make_bookmark, restore_view

Vector = dict[tuple[int, Incarnation], Fraction]
DIGESTS = Digests("layout", "config", "data", "code")
TERMS = Terms(
    "run",
    DIGESTS,
    batch=1,
    tokens_per_row=10,
    horizon=100,
    cycle=4,
    members=("a", "b"),
    outer=OuterRule("average"),
)
SHARDS = 2
NAN = -1
"""The row whose element stands for a NaN."""


def combine(*terms: tuple[Fraction | int, Vector]) -> Vector:
    total: Vector = {}
    for factor, vector in terms:
        for basis, value in vector.items():
            term = value if factor == 1 else factor * value
            total[basis] = total[basis] + term if basis in total else term
    return {basis: value for basis, value in total.items() if value}


def trained_rows(rows: Rows, incarnation: Incarnation) -> Vector:
    return {(row, incarnation): Fraction(1) for start, stop in rows.ranges for row in range(start, stop)}


def split(vector: Vector) -> list[Vector]:
    return [{basis: value for basis, value in vector.items() if basis[0] % SHARDS == n} for n in range(SHARDS)]


def digests(vector: Vector) -> tuple[str, ...]:
    return tuple(map(digest, split(vector)))


def digest(of: Any) -> str:
    text = repr(sorted(of.items())) if isinstance(of, dict) else repr(of)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class MemoryLedger:
    """The ledger's interface over lists, with a bookmark at every second record."""

    records: list[Record] = field(default_factory=list)
    stored: dict[Identity, Header] = field(default_factory=dict)
    marked: tuple[Record, Bookmark] | None = None

    def view(self) -> LedgerView:
        whole = LedgerView.from_records(self.records[0], self.records[1:])
        if self.marked:
            newest, found = self.marked
            before = restore_view(found, newest)
            assert before and before.through(self.records[newest.version + 1 :]) == whole
        return whole

    def verdicts(self) -> dict[Identity, Decision]:
        return {decision.identity: decision for record in self.records for decision in record.decisions}

    def headers(self, view: LedgerView) -> list[Header]:
        known = self.records[: view.version + 1]  # another coordinator may have added one since
        decided = {decision.identity for record in known for decision in record.decisions}
        assert all(view.has_decided(identity) == (identity in decided) for identity in self.stored)
        return [header for identity, header in self.stored.items() if identity not in decided]

    def bookmark_due(self, view: LedgerView) -> bool:
        return view.version % 2 == 0

    def bookmark(self, view: LedgerView) -> None:
        self.marked = view.newest, make_bookmark(view, digest(view.newest))

    def digest(self, record: Record) -> str:
        return digest(record)

    def exists(self, version: int) -> bool:
        return version < len(self.records)

    def append(self, record: Record) -> str:
        if record.version < len(self.records):
            return "same" if self.records[record.version] == record else "lost"
        assert record.version == len(self.records) and record.parent == digest(self.records[-1])
        self.records.append(record)
        return "created"

    def create_header(self, header: Header) -> str:
        known = self.stored.setdefault(header.identity, header)
        return "created" if known is header else "same" if known == header else "lost"


@dataclass
class Shift:
    """The change of a fragment between two versions; some arrive damaged."""

    by: Vector
    digest: str

    def on(self, anchor: Vector) -> Vector | None:
        found = combine((1, anchor), (1, self.by))
        return found if digest(found) == self.digest else None


@dataclass
class Shard:
    """An aggregator that computes with fractions. Its storage outlives its process."""

    index: int
    ledger: MemoryLedger
    payloads: dict[tuple[Identity, int], Vector]
    objects: dict[str, Vector]
    sent: dict[tuple[Identity, int], Vector]
    """All payloads that ever arrived, for World.check_ledger."""
    rnd: random.Random

    def put(self, identity: Identity, number: int, arrays: dict[str, Vector], name: str) -> Accepted:
        assert number == self.index
        assert self.sent.setdefault((identity, number), arrays["s"]) == arrays["s"], "one identity, two contents"
        self.payloads[identity, number] = arrays["s"]
        return Accepted()

    def fetch(self, number: int, name: str) -> Vector:
        assert number == self.index
        return self.objects[name]

    def updates(self, number: int, base: int, version: int) -> Shift | None:
        assert number == self.index
        before, after = (self.ledger.records[at].state[number] for at in (base, version))
        by = combine((1, self.objects[after]), (-1, self.objects[before]))
        wrong = self.rnd.random() < 0.2
        return None if self.rnd.random() < 0.2 else Shift(combine((2 if wrong else 1, by)), after)

    def check(self, newest: Record) -> None:
        assert newest.state[self.index] in self.objects

    def merge(self, newest: Record, merge: Merge) -> ShardResult | PayloadsLost:
        number = self.index
        applied = [decision for decision in merge.decisions if decision.fate == "applied"]
        lost = {decision.identity for decision in applied if (decision.identity, number) not in self.payloads}
        if lost:
            return PayloadsLost(frozenset(lost))
        theta = self.objects[newest.state[number]]
        total = sum(Fraction(decision.weight) for decision in applied)
        for decision in applied:
            base = self.objects[self.ledger.records[decision.base].state[number]]
            delta = combine((1, self.payloads[decision.identity, number]), (-1, base))
            theta = combine((1, theta), (Fraction(decision.weight) / total, delta))
        self.objects[digest(theta)] = theta
        quantized = applied and merge.outer.downlink != "plain"
        return ShardResult({number: digest(theta)}, {}, {number: "update"} if quantized else {})


@dataclass
class ExactDeviceState:
    incarnation: Incarnation
    theta: Vector
    anchor: Vector
    poison: set[int]
    """Rows that give a NaN to the first member that trains them; shared by all members."""
    processed: dict[Incarnation, int]
    sent: Vector = field(default_factory=dict)

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        assert len(rows.ranges) == 1, "a batch is one range of rows"
        self.theta = combine((1, self.theta), (1, trained_rows(rows, self.incarnation)))
        self.processed[self.incarnation] = self.processed.get(self.incarnation, 0) + len(rows)
        if bad := {row for row in self.poison for start, stop in rows.ranges if start <= row < stop}:
            self.poison -= bad
            self.theta = combine((1, self.theta), (1, {(NAN, self.incarnation): Fraction(1)}))
        return len(rows)

    def snapshot(self) -> Vector:
        self.sent = self.theta
        return self.theta

    def payload(self, snapshot: Vector) -> Payload:
        finite = not any(row == NAN for row, _ in snapshot)
        parts = tuple({"s": part} for part in split(snapshot))
        return Payload(parts, digests(snapshot), 1.0 if finite else 0.0, finite)

    def place(self, fragments: Sequence[Vector]) -> Vector:
        return combine(*((1, fragment) for fragment in fragments))

    def ramp(self) -> None:
        pass

    def adopt(self, adopt: Adopt, new: Vector, keep: float) -> None:
        """Add where real members mix: coefficients stay whole, and show lost and doubled rows."""
        if adopt.how == "snapshot":
            self.theta = combine((1, self.theta), (1, new), (-1, self.sent))
        elif adopt.how == "anchor":
            self.theta = combine((1, self.theta), (1, new), (-1, self.anchor))
        else:
            self.theta = new
        self.anchor = new


def genesis(terms: Terms, **changes: Any) -> Record:
    """Return a run's first record, or with some changes another record."""
    first = Record(
        run=terms.run, version=0, epoch=1, parent="", state=digests({}), outer=(), decisions=(), rule="average",
        rate=1.0, momentum=0.0, share=1.0, gathered=0.0, tokens=0, changes=0, processed=(), digests=terms.digests,
        time=0.0,
    )  # fmt: skip
    return replace(first, **changes)
