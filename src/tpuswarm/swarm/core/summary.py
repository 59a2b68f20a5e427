"""Summarize a coordinator's state for people."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Incarnation

if TYPE_CHECKING:  # commands that read a status should not import NumPy
    from tpuswarm.swarm.core.coordinator_state import CoordinatorState


@dataclass(frozen=True)
class Tokens:
    """All trained tokens: processed = applied + dropped + outstanding + lost."""

    processed: int
    applied: int
    dropped: int
    outstanding: int
    """Trained, without a verdict: in accepted contributions, or held by live members."""
    lost: int
    """The rest. Derived, never recorded, because work thought lost may be found and counted."""


@dataclass(frozen=True)
class Summary:
    """A coordinator's state, as shown to people."""

    version: int
    epoch: int
    recovering: bool
    """A new coordinator still collects what members hold, and leases nothing."""
    phase: str
    """Phase of the round, in words."""
    tokens: Tokens
    leased: tuple[Incarnation, ...]
    median_cycle: float | None
    """Seconds."""
    has_undecided: bool
    """Whether an accepted contribution has no verdict."""


def summary(state: "CoordinatorState", now: float) -> Summary:
    view = state.view
    accepted = (header.rows for header, _ in state.pending.values())
    held = (lease.outstanding for lease in state.leases.values())
    under_way = len(Rows.union([*accepted, *held]) - view.spent) * state.terms.tokens_per_row
    known = view.tokens + view.dropped + under_way
    processed = max(sum(state.processed.values()), known)  # a contribution may arrive before its member's next report
    return Summary(
        version=view.version,
        epoch=state.epoch,
        recovering=state.recovering,
        phase=_phase(state, now),
        tokens=Tokens(processed, view.tokens, view.dropped, under_way, processed - known),
        leased=tuple(sorted(state.leases)),
        median_cycle=state.median_cycle,
        has_undecided=bool(state.pending or state.storing),
    )


def _phase(state: "CoordinatorState", now: float) -> str:
    if state.ended:
        return "all rows are counted"
    if state.recovering:
        return f"recovering: members report what they hold for another {state.recovering_until - now:.0f} s"
    if state.merging:
        return f"merging commit {state.merging.version}: {state.merging.reason}"
    return state.round_status(now).reason
