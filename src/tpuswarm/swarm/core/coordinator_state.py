"""The coordinator's state and what follows from it: who holds which rows, and when a round is over."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import Merge, Terms
from tpuswarm.swarm.core.rounds import RoundStatus, round_status
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.core.values import Header, Identity, Incarnation


@dataclass(frozen=True)
class Lease:
    """Rows that an incarnation holds until a time."""

    rows: Rows
    until: float
    base: int
    rows_per_s: float | None
    outstanding: Rows
    """Trained rows without a verdict that the member knows of."""


@dataclass(frozen=True)
class CoordinatorState:
    """The coordinator's state. The ledger and the stored headers are enough to rebuild it."""

    terms: Terms
    view: LedgerView
    epoch: int
    recovering_until: float
    awaited: frozenset[str]
    """Members that the run was started with, or that contributed just before this epoch."""
    awaited_until: float
    """Until then a round waits for awaited members that have not reported yet."""
    leases: Mapping[Incarnation, Lease] = field(default_factory=dict)
    fenced: frozenset[Incarnation] = frozenset()
    pending: Mapping[Identity, tuple[Header, float]] = field(default_factory=dict)
    """Accepted, undecided contributions with their times of acceptance."""
    storing: Mapping[Identity, Header] = field(default_factory=dict)
    """Checked headers that are being stored."""
    taken: Rows = NO_ROWS
    """Rows that cannot be leased: spent, leased, or in undecided contributions. Stored, because the union has few
    ranges and its parts have many."""
    fastest: float | None = None
    """Rows per second of the fastest member; rises at once, falls at the next tick."""
    merging: Merge | None = None
    unreadable: frozenset[Identity] = frozenset()
    not_finite: frozenset[Identity] = frozenset()
    contributed: frozenset[str] = frozenset()
    """Members with an accepted contribution in this epoch or in the ledger."""
    seen: frozenset[str] = frozenset()
    """Members that held a lease in this epoch."""
    processed: Mapping[Incarnation, int] = field(default_factory=dict)

    @property
    def recovering(self) -> bool:
        """Whether members still announce their rows; meanwhile nothing is granted or fenced."""
        return self.recovering_until > -math.inf

    @property
    def live(self) -> frozenset[str]:
        """Members that a round may wait for."""
        leased = {incarnation.member for incarnation in self.leases}
        first = frozenset(self.terms.members)
        return frozenset(leased & (self.contributed | first)) | (self.awaited - self.seen)

    @property
    def room(self) -> int:
        """Rows that may still be leased before the horizon."""
        return self.terms.horizon + len(self.view.skipped) - len(self.taken)

    @property
    def median_cycle(self) -> float | None:
        """Median cycle in seconds of the members whose speed is known."""
        known = [lease.rows_per_s for lease in self.leases.values() if lease.rows_per_s]
        return median(cycle_of(self.terms, speed, self.fastest) / speed for speed in known) if known else None

    def round_status(self, now: float) -> RoundStatus:
        first: dict[str, float] = {}
        for header, at in self.pending.values():
            member = header.identity.incarnation.member
            first[member] = min(at, first.get(member, at))
        return round_status(first, self.live, self.median_cycle, now, self.terms.timeouts)

    @property
    def ended(self) -> bool:
        """Whether the horizon is reached and no accepted contribution is undecided."""
        return len(self.view.counted) >= self.terms.horizon and not self.pending and not self.storing


def cycle_of(terms: Terms, rows_per_s: float | None, fastest: float | None) -> int:
    """Return the rows of a member's cycle: proportional to its speed, whole batches, at least one."""
    share = rows_per_s / fastest if rows_per_s and fastest else 1.0
    return max(1, round(share * terms.cycle / terms.batch)) * terms.batch


def rows_taken(state: CoordinatorState) -> Rows:
    """Compute `CoordinatorState.taken` from its parts."""
    return Rows.union(
        [
            state.view.spent,
            *(lease.rows for lease in state.leases.values()),
            *(header.rows for header, _ in state.pending.values()),
            *(header.rows for header in state.storing.values()),
        ]
    )


def accepted_rows(state: CoordinatorState, identity: Identity | None) -> Rows:
    """Return the rows of an undecided contribution."""
    if identity is None:
        return NO_ROWS
    accepted, _ = state.pending.get(identity, (state.storing.get(identity), 0.0))
    return accepted.rows if accepted else NO_ROWS


def undecided_headers(state: CoordinatorState, key: Incarnation) -> Iterable[Header]:
    """Yield the undecided contributions of an incarnation."""
    for header in (*(header for header, _ in state.pending.values()), *state.storing.values()):
        if header.identity.incarnation == key:
            yield header


def rows_of_others(state: CoordinatorState, key: Incarnation) -> Rows:
    """Return rows that other incarnations hold: leased, or in undecided contributions."""
    leases = [lease.rows for holder, lease in state.leases.items() if holder != key]
    headers = [*(header for header, _ in state.pending.values()), *state.storing.values()]
    return Rows.union([*leases, *(header.rows for header in headers if header.identity.incarnation != key)])
