"""The state of a swarm in the executable model of docs/protocol.md.

Parameters are exact vectors: training row r in incarnation i of member m adds 1 to the coefficient of (r, m, i). A row
that is counted twice, lost, or claimed without being in the parameters shows as a wrong coefficient.
"""

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

Rows = frozenset[int]
Vector = frozenset[tuple[tuple, Fraction]]
"""Coefficients that are not 0, by basis element: (row, member, incarnation), or ("nan", member, incarnation)."""
NONE: Rows = frozenset()


@cache
def scaled_sum(factor: Fraction, x: Vector, y: Vector) -> Vector:
    """Return factor · x + y."""
    total: dict[tuple, Fraction] = defaultdict(Fraction, dict(y))
    for basis, value in x:
        total[basis] += factor * value
    return frozenset((basis, value) for basis, value in total.items() if value)


def add(x: Vector, y: Vector) -> Vector:
    return scaled_sum(Fraction(1), x, y)


def subtract(x: Vector, y: Vector) -> Vector:
    return scaled_sum(Fraction(-1), y, x)


def trained(rows: Rows, owner: tuple[int, int]) -> Vector:
    return frozenset(((row, *owner), Fraction(1)) for row in rows)


class Header(NamedTuple):
    """A contribution. Its identity is (member, incarnation, sequence)."""

    owner: tuple[int, int]
    sequence: int
    base: int
    rows: Rows
    is_finite: bool
    payload: Vector

    @property
    def identity(self) -> tuple[tuple[int, int], int]:
        return self.owner, self.sequence

    def __str__(self) -> str:
        return f"m{self.owner[0]}.{self.owner[1]}#{self.sequence}{sorted(self.rows)}@{self.base}"


class Verdict(NamedTuple):
    header: Header
    fate: str  # applied, returned, dropped or void
    weight: Fraction


class Record(NamedTuple):
    verdicts: tuple[Verdict, ...]
    shared: Vector


Ledger = tuple[Record, ...]
GENESIS: Ledger = (Record((), frozenset()),)


class Facts:
    """Sums of a ledger's verdicts."""

    def __init__(self, ledger: Ledger) -> None:
        verdicts = [verdict for record in ledger for verdict in record.verdicts]
        self.fates = {verdict.header.identity: verdict.fate for verdict in verdicts}
        self.counted = frozenset(row for item in verdicts if item.fate == "applied" for row in item.header.rows)
        self.skipped = frozenset(row for item in verdicts if item.fate == "dropped" for row in item.header.rows)
        self.decided = self.counted | self.skipped
        self.changes = [0]  # the number of records with contributors up to each version
        for record in ledger[1:]:
            self.changes.append(self.changes[-1] + any(verdict.fate == "applied" for verdict in record.verdicts))


facts = cache(Facts)


class Member(NamedTuple):
    incarnation: int = 1
    is_alive: bool = True
    base: int = 0
    params: Vector = frozenset()
    lease: Rows = NONE  # leased, not trained yet
    outstanding: Rows = NONE  # trained, without a verdict that was heard
    undecided: tuple[Header, Vector] | None = None  # the contribution and the snapshot of its push
    sequence: int = 1
    is_known: bool = False  # has been granted a lease in this incarnation
    own_tokens: int = 0  # what the schedule adds to the tokens of the base version
    is_poisoned: bool = False
    coordinator: int = 0


class Coordinator(NamedTuple):
    ledger: Ledger
    pending: frozenset[Header]
    is_recovering: bool = True
    leases: frozenset[tuple[tuple[int, int], Rows]] = frozenset()
    fenced: frozenset[tuple[int, int]] = frozenset()
    chosen: Record | None = None

    def leased(self) -> Rows:
        return frozenset(row for _, rows in self.leases for row in rows)

    def accepted(self) -> Rows:
        return frozenset(row for header in self.pending for row in header.rows)

    def lease(self, owner: tuple[int, int], rows: Rows) -> "Coordinator":
        others = {item for item in self.leases if item[0] != owner}
        return self._replace(leases=frozenset(others | {(owner, rows)}))

    def fence(self, owners: set[tuple[int, int]]) -> "Coordinator":
        leases = frozenset(item for item in self.leases if item[0] not in owners)
        return self._replace(leases=leases, fenced=self.fenced | owners)


class Faults(NamedTuple):
    """How many faults of each kind may still happen."""

    member_crash: int = 0
    coordinator_crash: int = 0
    second_coordinator: int = 0
    expired_lease: int = 0
    poisoned_row: int = 0
    lost_payload: int = 0
    lost_reply: int = 0
    switched_coordinator: int = 0


NO_FAULTS = Faults()


class State(NamedTuple):
    ledger: Ledger
    members: tuple[Member, ...]
    coordinators: tuple[Coordinator | None, Coordinator | None]
    faults: Faults
    network: frozenset[Header] = frozenset()  # pushes that may arrive at any time, any number of times
    headers: frozenset[Header] = frozenset()  # accepted, durable
    lost_payloads: frozenset[Header] = frozenset()
    objects: frozenset[Vector] = frozenset({frozenset()})  # versions of the shared parameters that can be read

    def member(self, number: int, member: Member) -> "State":
        return self._replace(members=(*self.members[:number], member, *self.members[number + 1 :]))

    def coordinator(self, number: int, coordinator: Coordinator | None) -> "State":
        both = (coordinator, self.coordinators[1]) if number == 0 else (self.coordinators[0], coordinator)
        return self._replace(coordinators=both)

    def spend(self, fault: str) -> "State":
        return self._replace(faults=self.faults._replace(**{fault: getattr(self.faults, fault) - 1}))


@dataclass(frozen=True)
class Config:
    """A run. `without` names one sentence of the protocol that is left out (see test_model.py)."""

    members: int = 2
    rows: int = 3
    cycle: int = 1
    has_overlap: bool = True
    max_staleness: int = 1
    kept_versions: int = 2
    faults: Faults = NO_FAULTS
    without: str = ""

    def start(self) -> State:
        return State(GENESIS, (Member(),) * self.members, (None, None), self.faults)


class Violation(Exception):
    """An invariant does not hold."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise Violation(message)
