"""How a run stands, from what its coordinator knows."""

from dataclasses import dataclass

from tpuswarm.swarm.core.known import State
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Incarnation


@dataclass(frozen=True)
class Tokens:
    """Where every trained token is: processed = applied + dropped + outstanding + lost."""

    processed: int
    applied: int
    dropped: int
    outstanding: int
    """Trained and without a verdict: in accepted contributions, or with members that are alive."""
    lost: int
    """The rest: never booked, because work thought lost may be found and counted."""


@dataclass(frozen=True)
class Summary:
    """A look at a coordinator."""

    version: int
    epoch: int
    recovering: bool
    """A new coordinator still listens to what members hold, and leases nothing."""
    phase: str
    """Of the round, in words."""
    tokens: Tokens
    leased: tuple[Incarnation, ...]
    """Those that hold a lease."""
    median_cycle: float | None
    """Seconds."""


def summary(state: State, now: float) -> Summary:
    """What there is to see of a coordinator's state."""
    view = state.view
    accepted = (header.rows for header, _ in state.pending.values())
    held = (lease.outstanding for lease in state.leases.values())
    under_way = len(Rows.union([*accepted, *held]) - view.spent) * state.terms.tokens_per_row
    known = view.tokens + view.dropped + under_way
    processed = max(sum(state.processed.values()), known)  # a contribution may be here before its member's next report
    return Summary(
        version=view.version,
        epoch=state.epoch,
        recovering=state.recovering,
        phase=_phase(state, now),
        tokens=Tokens(processed, view.tokens, view.dropped, under_way, processed - known),
        leased=tuple(sorted(state.leases)),
        median_cycle=state.median_cycle,
    )


def _phase(state: State, now: float) -> str:
    if state.ended:
        return "all rows are counted"
    if state.recovering:
        return f"recovering: members report what they hold, for another {state.recovering_until - now:.0f} s"
    if state.merging:
        return f"merging commit {state.merging.version}: {state.merging.reason}"
    return state.round(now).reason
