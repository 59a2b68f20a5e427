"""What is exact in a swarm of fractions (world.py): parameters, the ledger's storage, shards, the arrays of a member.

Parameters are sparse vectors of fractions over (row, incarnation): training a row adds its element with coefficient 1.
There are two fragments, each with a shard: the even rows and the odd ones.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tpuswarm.swarm.core.books import Adopt
from tpuswarm.swarm.core.messages import Accepted, Lost, Merge, Part, Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Decision, Digests, Header, Identity, Incarnation, Record
from tpuswarm.swarm.core.view import View
from tpuswarm.swarm.member.contract import Payload
from tpuswarm.swarm.storage.bookmark import Bookmark, bookmark, opened

Vector = dict[tuple[int, Incarnation], Fraction]
DIGESTS = Digests("layout", "config", "data", "code")
SHARDS = 2
NAN = -1
"""The row number whose element stands for a NaN."""


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

    def view(self) -> View:
        whole = View.of(self.records[0], self.records[1:])
        if self.marked:
            newest, found = self.marked
            before = opened(found, newest)
            assert before and before.through(self.records[newest.version + 1 :]) == whole
        return whole

    def verdicts(self) -> dict[Identity, Decision]:
        return {each.identity: each for record in self.records for each in record.decisions}

    def headers(self, view: View) -> list[Header]:
        known = self.records[: view.version + 1]  # another coordinator may have made one since
        decided = {each.identity for record in known for each in record.decisions}
        assert all(view.has_decided(identity) == (identity in decided) for identity in self.stored)
        return [header for identity, header in self.stored.items() if identity not in decided]

    def bookmark_due(self, view: View) -> bool:
        return view.version % 2 == 0

    def bookmark(self, view: View) -> None:
        self.marked = view.newest, bookmark(view, digest(view.newest))

    def digest(self, record: Record) -> str:
        return digest(record)

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
    """What a fragment was moved by; some arrive wrong."""

    by: Vector
    digest: str

    def on(self, anchor: Vector) -> Vector | None:
        found = combine((1, anchor), (1, self.by))
        return found if digest(found) == self.digest else None


@dataclass
class Shard:
    """A shard that computes with fractions; its storage is the run's, its process can die."""

    index: int
    ledger: MemoryLedger
    payloads: dict[tuple[Identity, int], Vector]
    objects: dict[str, Vector]
    sent: dict[tuple[Identity, int], Vector]
    """All payloads that ever arrived, for the checks."""
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
        before, after = (self.ledger.records[each].state[number] for each in (base, version))
        by = combine((1, self.objects[after]), (-1, self.objects[before]))
        wrong = self.rnd.random() < 0.2
        return None if self.rnd.random() < 0.2 else Shift(combine((2 if wrong else 1, by)), after)

    def check(self, newest: Record) -> None:
        assert newest.state[self.index] in self.objects

    def merge(self, newest: Record, merge: Merge) -> Part | Lost:
        number = self.index
        applied = [each for each in merge.decisions if each.fate == "applied"]
        gone = {each.identity for each in applied if (each.identity, number) not in self.payloads}
        if gone:
            return Lost(frozenset(gone))
        theta = self.objects[newest.state[number]]
        if applied:
            whole = sum(Fraction(each.weight) for each in applied)
            terms = []
            for each in applied:
                base = self.objects[self.ledger.records[each.base].state[number]]
                delta = combine((1, self.payloads[each.identity, number]), (-1, base))
                terms.append((Fraction(each.weight) / whole, delta))
            theta = combine((1, theta), *terms)
        self.objects[digest(theta)] = theta
        quantized = applied and merge.outer.downlink != "plain"
        return Part({number: digest(theta)}, {}, {number: "update"} if quantized else {})


@dataclass
class ExactHolder:
    incarnation: Incarnation
    theta: Vector
    anchor: Vector
    poison: set[int]
    """Rows that give a NaN to whoever trains them first; shared by all."""
    processed: dict[Incarnation, int]
    sent: Vector = field(default_factory=dict)

    def train(self, rows: Rows, progress: tuple[int, int], ahead: Rows) -> int:
        assert len(rows.ranges) == 1, "a batch is read in one piece"
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
        """Steps are counted here, whatever their size."""

    def adopt(self, adopt: Adopt, new: Vector, keep: float) -> None:
        """By adding, where members mix: coefficients stay whole, and say what was lost or doubled."""
        if adopt.how == "snapshot":
            self.theta = combine((1, self.theta), (1, new), (-1, self.sent))
        elif adopt.how == "anchor":
            self.theta = combine((1, self.theta), (1, new), (-1, self.anchor))
        else:
            self.theta = new
        self.anchor = new


def genesis(terms: Terms) -> Record:
    return Record(
        run=terms.run, version=0, epoch=1, parent="", state=digests({}), outer=(), decisions=(), rule="average",
        rate=1.0, momentum=0.0, share=1.0, gathered=0.0, tokens=0, changes=0, processed=(), digests=terms.digests,
        time=0.0,
    )  # fmt: skip
