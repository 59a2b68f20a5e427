"""All that a coordinator knows, and what follows from it: who holds which rows, and when a round is over."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from tpuswarm.swarm.core.messages import Merge, Terms
from tpuswarm.swarm.core.rounds import Due, due
from tpuswarm.swarm.core.rows import NOTHING, Rows
from tpuswarm.swarm.core.values import Header, Identity, Incarnation
from tpuswarm.swarm.core.view import View


@dataclass(frozen=True)
class Lease:
    """What an incarnation holds."""

    rows: Rows
    until: float
    base: int
    rows_per_s: float | None
    outstanding: Rows
    """Trained and without a verdict that its holder heard of."""


@dataclass(frozen=True)
class State:
    """All that a coordinator knows; the ledger and the stored headers are enough to make it again."""

    terms: Terms
    view: View
    epoch: int
    recovering_until: float
    awaited: frozenset[str]
    """Members that the run was started with, or that contributed just before this epoch."""
    awaited_until: float
    """Until then a round waits for those of them that were not heard of yet."""
    leases: Mapping[Incarnation, Lease] = field(default_factory=dict)
    fenced: frozenset[Incarnation] = frozenset()
    pending: Mapping[Identity, tuple[Header, float]] = field(default_factory=dict)
    """Accepted and undecided, with the time of acceptance."""
    storing: Mapping[Identity, Header] = field(default_factory=dict)
    """Checked, the creation of their headers under way."""
    taken: Rows = NOTHING
    """Rows that are not leasable: spent, leased, or in contributions without a verdict. Kept, because each of the
    others is in many pieces and all of them together are in few."""
    fastest: float | None = None
    """Rows a second of the fastest member; follows at once upwards and at the next tick downwards."""
    merging: Merge | None = None
    unreadable: frozenset[Identity] = frozenset()
    contributed: frozenset[str] = frozenset()
    """Members with an accepted contribution in this epoch or in the ledger."""
    seen: frozenset[str] = frozenset()
    """Members that were leased to in this epoch."""
    processed: Mapping[Incarnation, int] = field(default_factory=dict)

    @property
    def recovering(self) -> bool:
        """Members are announcing what they hold; nothing is granted, nobody fenced."""
        return self.recovering_until > -math.inf

    @property
    def live(self) -> frozenset[str]:
        """Members a round may wait for."""
        leased = {incarnation.member for incarnation in self.leases}
        first = frozenset(self.terms.members)
        return frozenset(leased & (self.contributed | first)) | (self.awaited - self.seen)

    @property
    def room(self) -> int:
        """Rows that may still be leased before the horizon."""
        return self.terms.horizon + len(self.view.skipped) - len(self.taken)

    @property
    def median_cycle(self) -> float | None:
        """Seconds of a cycle, the median of the members whose speed is known."""
        known = [lease.rows_per_s for lease in self.leases.values() if lease.rows_per_s]
        return median(cycle_of(self.terms, each, self.fastest) / each for each in known) if known else None

    def round(self, now: float) -> Due:
        """Whether the round under way is over."""
        first: dict[str, float] = {}
        for header, at in self.pending.values():
            member = header.identity.incarnation.member
            first[member] = min(at, first.get(member, at))
        return due(first, self.live, self.median_cycle, now, self.terms.patience)

    @property
    def ended(self) -> bool:
        """The horizon is reached and nothing accepted is undecided."""
        return len(self.view.counted) >= self.terms.horizon and not self.pending and not self.storing


def cycle_of(terms: Terms, rows_per_s: float | None, fastest: float | None) -> int:
    """Rows of a member's cycle: in proportion to its speed, whole batches, at least one."""
    share = rows_per_s / fastest if rows_per_s and fastest else 1.0
    return max(1, round(share * terms.cycle / terms.batch)) * terms.batch


def rows_taken(state: State) -> Rows:
    """Those that are not leasable, put together anew: see `State.taken`."""
    return Rows.union(
        [
            state.view.spent,
            *(lease.rows for lease in state.leases.values()),
            *(header.rows for header, _ in state.pending.values()),
            *(header.rows for header in state.storing.values()),
        ]
    )


def accepted_rows(state: State, identity: Identity | None) -> Rows:
    """The rows of a contribution without a verdict."""
    if identity is None:
        return NOTHING
    accepted, _ = state.pending.get(identity, (state.storing.get(identity), 0.0))
    return accepted.rows if accepted else NOTHING


def undecided_of(state: State, key: Incarnation) -> Iterable[Header]:
    """The contributions of an incarnation without a verdict."""
    for header in (*(header for header, _ in state.pending.values()), *state.storing.values()):
        if header.identity.incarnation == key:
            yield header


def held_by_others(state: State, key: Incarnation) -> Rows:
    """The rows of all others: leased, or in contributions without a verdict."""
    leases = [lease.rows for each, lease in state.leases.items() if each != key]
    headers = [*(header for header, _ in state.pending.values()), *state.storing.values()]
    return Rows.union([*leases, *(each.rows for each in headers if each.identity.incarnation != key)])
