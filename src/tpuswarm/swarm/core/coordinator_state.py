"""The coordinator's state and what follows from it: who holds which rows, and when a round is over."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rpds import HashTrieMap, HashTrieSet

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
    exchange_s: float = 0.0
    """As in Heartbeat, of a member that dialled in; 0 for others, whose network is no bottleneck."""


@dataclass(frozen=True)
class CoordinatorState:
    """The coordinator's state. The ledger and the stored headers are enough to rebuild it.

    What grows with the members is in persistent maps and sets: a message changes them without a copy.
    """

    terms: Terms
    view: LedgerView
    epoch: int
    recovering_until: float
    awaited: frozenset[str]
    """Members that the run was started with, or that contributed just before this epoch."""
    awaited_until: float
    """Until then a round waits for awaited members that have not reported yet."""
    leases: "HashTrieMap[Incarnation, Lease]" = HashTrieMap()  # noqa: RUF009  # immutable, as the others
    fenced: "HashTrieSet[Incarnation]" = HashTrieSet()  # noqa: RUF009
    pending: "HashTrieMap[Identity, tuple[Header, float]]" = HashTrieMap()  # noqa: RUF009
    """Accepted, undecided contributions with their times of acceptance."""
    storing: "HashTrieMap[Identity, Header]" = HashTrieMap()  # noqa: RUF009
    """Checked headers that are being stored."""
    undecided: "HashTrieMap[Incarnation, tuple[Identity, ...]]" = HashTrieMap()  # noqa: RUF009
    """Contributions in `pending` or `storing` by incarnation: one, or several after two coordinators."""
    taken: Rows = NO_ROWS
    """Rows that cannot be leased: spent, leased, or in undecided contributions. Stored, because the union has few
    ranges and its parts have many."""
    contested: Rows = NO_ROWS
    """Rows that several incarnations hold, leased or in undecided contributions: none but after two coordinators."""
    fastest: float | None = None
    """Rows per second of the fastest member; rises at once, falls at the next tick."""
    far_cycle_s: float = 0.0
    """Median cycle at the last tick if some members dialled in: their links lengthen the rounds of all; else 0."""
    merging: Merge | None = None
    unreadable: frozenset[Identity] = frozenset()
    rejected: "HashTrieMap[Identity, str]" = HashTrieMap()  # noqa: RUF009
    """Contributions that must not count, with the reason."""
    norms: tuple[float, ...] = ()
    """Of the contributions that this epoch counted last, as they were clipped."""
    contributed: "HashTrieSet[str]" = HashTrieSet()  # noqa: RUF009
    """Members with an accepted contribution in this epoch or in the ledger."""
    seen: "HashTrieSet[str]" = HashTrieSet()  # noqa: RUF009
    """Members that held a lease in this epoch."""
    processed: "HashTrieMap[Incarnation, int]" = HashTrieMap()  # noqa: RUF009

    @property
    def recovering(self) -> bool:
        """Whether members still announce their rows; meanwhile nothing is granted or fenced."""
        return self.recovering_until > -math.inf

    @property
    def live(self) -> frozenset[str]:
        """Members that a round may wait for."""
        leased = {incarnation.member for incarnation in self.leases}
        first = leased.intersection(self.terms.members)
        awaited = {member for member in self.awaited if member not in self.seen}
        return frozenset(first | awaited | {member for member in leased if member in self.contributed})

    @property
    def room(self) -> int:
        """Rows that may still be leased before the horizon."""
        return self.terms.horizon + len(self.view.skipped) - len(self.taken)

    @property
    def median_cycle(self) -> float | None:
        """Median cycle in seconds of the members whose speed is known."""
        known = [(lease.rows_per_s, lease.exchange_s) for lease in self.leases.values() if lease.rows_per_s]
        times = [max(cycle_of(self.terms, speed, self.fastest) / speed, exchange_s) for speed, exchange_s in known]
        return median(times) if times else None

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


def updated(state: CoordinatorState, **fields: Any) -> CoordinatorState:
    """Return the state with other fields. dataclasses.replace would take a fifth of a push."""
    assert fields.keys() <= vars(state).keys()
    new = object.__new__(CoordinatorState)
    vars(new).update(vars(state), **fields)
    return new


def cycle_of(terms: Terms, rows_per_s: float | None, fastest: float | None) -> int:
    """Return the rows of a member's cycle: proportional to its speed, whole batches, at least one."""
    share = rows_per_s / fastest if rows_per_s and fastest else 1.0
    return max(1, round(share * terms.cycle / terms.batch)) * terms.batch


def with_claims(state: CoordinatorState) -> CoordinatorState:
    """Compute `undecided`, `taken` and `contested` anew from the other fields."""
    headers = [*(header for header, _ in state.pending.values()), *state.storing.values()]
    undecided: dict[Incarnation, tuple[Identity, ...]] = {}
    claims = {key: [lease.rows] for key, lease in state.leases.items()}
    for header in headers:
        key = header.identity.incarnation
        undecided[key] = (*undecided.get(key, ()), header.identity)
        claims.setdefault(key, []).append(header.rows)
    held = [Rows.union(claim) for claim in claims.values()]
    union, contested = Rows.union(held), NO_ROWS
    if sum(map(len, held)) > len(union):
        union = NO_ROWS
        for rows in held:
            union, contested = union | rows, contested | (union & rows)
    taken = union | state.view.spent
    return updated(state, undecided=HashTrieMap(undecided), taken=taken, contested=contested)


def accepted_rows(state: CoordinatorState, identity: Identity | None) -> Rows:
    """Return the rows of an undecided contribution."""
    if identity is None:
        return NO_ROWS
    accepted, _ = state.pending.get(identity, (state.storing.get(identity), 0.0))
    return accepted.rows if accepted else NO_ROWS


def undecided_rows(state: CoordinatorState, key: Incarnation) -> Rows:
    """Return the rows of an incarnation's undecided contributions."""
    return Rows.union(accepted_rows(state, identity) for identity in state.undecided.get(key, ()))


def held_by_others(state: CoordinatorState, key: Incarnation, rows: Rows) -> Rows:
    """Return those of the rows, none spent, that incarnations other than `key` hold. It must have no lease."""
    return (rows & state.taken) - (undecided_rows(state, key) - state.contested)


def without_leases(state: CoordinatorState, keys: Sequence[Incarnation]) -> CoordinatorState:
    """Fence incarnations; rows that nobody else holds can be leased again."""
    if not keys:
        return state
    leases, freed = state.leases, NO_ROWS
    for key in keys:
        freed |= state.leases[key].rows - undecided_rows(state, key)
        leases = leases.remove(key)
    is_shared = bool(freed & state.contested)
    state = updated(state, leases=leases, fenced=state.fenced.update(keys), taken=state.taken - freed)
    return with_claims(state) if is_shared else state
