"""When a round is over: OPEN, QUORUM, GRACE, CHOOSE as one function of what has been accepted and when."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Patience:
    """How long a round waits; all in seconds or shares of the median cycle."""

    quorum_min: int = 1
    grace_cycles: float = 0.5
    grace_first: float = 30.0
    """Grace until a median cycle is known."""
    deadline_cycles: float = 3.0
    deadline_first: float = 600.0
    """Deadline until a median cycle is known."""
    stall_least: float = 60.0
    stall_cycles: float = 3.0
    """Cycles of a member, beside `stall_least`, that its devices may be at one thing until its lease ends."""
    stall_first: float = 600.0
    """Until its speed is known: a first step may have to be compiled."""


class Due(NamedTuple):
    """Whether to choose now; if not, when to look again, and in which phase the round is."""

    now: bool
    look_at: float
    reason: str


def quorum(live: int, least: int) -> int:
    """Distinct members a round waits for."""
    return max(least, math.ceil(live / 2))


def due(
    accepted: Mapping[str, float], live: Set[str], median_cycle: float | None, now: float, patience: Patience
) -> Due:
    """Whether a round is over.

    accepted: of each member with an undecided contribution, when its first was accepted; live: the members a round
    may wait for.
    """
    if not accepted:
        return Due(False, math.inf, "waiting for pushes")
    opened = min(accepted.values())
    need = quorum(len(live), patience.quorum_min)
    known = median_cycle is not None
    length = median_cycle or 0.0
    deadline = opened + (patience.deadline_cycles * length if known else patience.deadline_first)
    if live <= accepted.keys() and len(accepted) >= patience.quorum_min:
        return Due(True, now, f"all {len(live)} live members have pushed")
    if len(accepted) >= need:
        reached = sorted(accepted.values())[need - 1]
        grace = reached + (patience.grace_cycles * length if known else patience.grace_first)
        end = min(grace, deadline)
        if now >= end:
            return Due(
                True, now, f"{len(accepted)} of {len(live)} live members have pushed; the wait for the rest is over"
            )
        return Due(False, end, f"{len(accepted)} of {len(live)} live members have pushed; waiting briefly for the rest")
    if now >= deadline:
        if len(accepted) >= patience.quorum_min:
            return Due(True, now, f"deadline: {len(accepted)} of the {need} pushes that a commit needs are here")
        return Due(False, math.inf, f"past the deadline with {len(accepted)} of at least {patience.quorum_min} members")
    return Due(False, deadline, f"{len(accepted)} of the {need} pushes that a commit needs are here")
