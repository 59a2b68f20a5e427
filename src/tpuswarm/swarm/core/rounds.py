"""Decide from the accepted pushes and their times when a round is over."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class RoundTimeouts:
    """How long a round waits, in seconds or in median cycles."""

    min_quorum: int = 1
    grace_cycles: float = 0.5
    first_grace_s: float = 30.0
    """Grace until a median cycle is known."""
    deadline_cycles: float = 3.0
    first_deadline_s: float = 600.0
    """Deadline until a median cycle is known."""
    min_stall_s: float = 60.0
    stall_cycles: float = 3.0
    """A member's lease ends if one device action takes `min_stall_s` and this many of its cycles."""
    first_stall_s: float = 600.0
    """Stall limit until the member's speed is known: its first step may have to be compiled."""


class RoundStatus(NamedTuple):
    """Whether a round is over; if not, when to check again, and why."""

    is_over: bool
    check_at: float
    reason: str


def quorum(live: int, least: int) -> int:
    """Return how many distinct members a round waits for."""
    return max(least, math.ceil(live / 2))


def round_status(
    accepted: Mapping[str, float], live: Set[str], median_cycle: float | None, now: float, timeouts: RoundTimeouts
) -> RoundStatus:
    """Decide whether a round is over.

    accepted: the time of the first accepted contribution of each member with undecided ones; live: the members that a
    round may wait for.
    """
    if not accepted:
        return RoundStatus(False, math.inf, "waiting for pushes" if live else "waiting for members")
    opened = min(accepted.values())
    need = quorum(len(live), timeouts.min_quorum)
    known = median_cycle is not None
    length = median_cycle or 0.0
    deadline = opened + (timeouts.deadline_cycles * length if known else timeouts.first_deadline_s)
    if live <= accepted.keys() and len(accepted) >= timeouts.min_quorum:
        return RoundStatus(True, now, f"all {len(live)} live members have pushed")
    if len(accepted) >= need:
        reached = sorted(accepted.values())[need - 1]
        grace = reached + (timeouts.grace_cycles * length if known else timeouts.first_grace_s)
        end = min(grace, deadline)
        if now >= end:
            return RoundStatus(
                True, now, f"{len(accepted)} of {len(live)} live members have pushed; the wait for the rest is over"
            )
        return RoundStatus(
            False, end, f"{len(accepted)} of {len(live)} live members have pushed; waiting briefly for the rest"
        )
    if now >= deadline:
        if len(accepted) >= timeouts.min_quorum:
            return RoundStatus(
                True, now, f"deadline: {len(accepted)} of the {need} pushes that a commit needs are here"
            )
        return RoundStatus(
            False, math.inf, f"past the deadline with {len(accepted)} of at least {timeouts.min_quorum} members"
        )
    return RoundStatus(False, deadline, f"{len(accepted)} of the {need} pushes that a commit needs are here")
