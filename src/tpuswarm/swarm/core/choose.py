"""Choose which contributions a commit counts, with which weight, and give every other one a verdict.

Only headers matter, so that anyone who reads the record can check the choice.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median

from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.values import Decision, Fate, Header, Identity

FALSELY_FINITE = "its payload is not finite, its header says that it is"
CLIP_FACTOR = 3.0
"""A delta's norm may be this many times the median norm of its round."""


@dataclass(frozen=True)
class Staleness:
    """Weight of a contribution from an old base: 1/(1 + discount * staleness) up to `limit`, then 0."""

    limit: int = 4
    discount: float = 0.5

    def weight(self, staleness: int) -> float:
        return 1.0 / (1.0 + self.discount * staleness)


def choose(
    view: LedgerView,
    headers: Iterable[Header],
    unreadable: Collection[Identity],
    rule: Staleness,
    not_finite: Collection[Identity] = (),
) -> list[Decision]:
    """Decide on each header, in the order of identities. The weights of the applied ones add up to 1.

    unreadable: contributions whose payload was lost; not_finite: those whose payload contradicts a finite header.
    """
    decisions: list[Decision] = []
    contributors: list[tuple[Header, float]] = []
    taken = view.spent
    for header in sorted(headers, key=lambda header: header.identity):
        stale = view.staleness(header.base)
        if header.rows & taken:
            decisions.append(_decided(header, "void", f"rows {header.rows & taken} were already counted or skipped"))
            continue
        if header.identity in unreadable and header.finite and stale <= rule.limit:
            decisions.append(_decided(header, "returned", "its payload can no longer be read"))
            continue
        taken |= header.rows
        if not header.finite:
            decisions.append(_decided(header, "dropped", "not finite"))
        elif header.identity in not_finite:
            decisions.append(_decided(header, "dropped", FALSELY_FINITE))
        elif stale > rule.limit:
            decisions.append(_decided(header, "dropped", f"{stale} commits stale, more than {rule.limit}"))
        else:
            contributors.append((header, header.tokens * rule.weight(stale)))
    clips = clipping([header.norm for header, _ in contributors])
    whole = math.fsum(weight for _, weight in contributors)
    for (header, weight), clip in zip(contributors, clips, strict=True):
        stale = view.staleness(header.base)
        reason = f"staleness {stale}" + (f", clipped to {clip:.3g} of its norm" if clip < 1 else "")
        decisions.append(_decided(header, "applied", reason, weight / whole, clip))
    return sorted(decisions, key=lambda decision: decision.identity)


def clipping(norms: list[float]) -> list[float]:
    """Return the factor that brings each norm to at most CLIP_FACTOR times the median; 1 for fewer than 3 norms."""
    if len(norms) < 3:
        return [1.0] * len(norms)
    limit = CLIP_FACTOR * median(norms)
    return [1.0 if norm <= limit else limit / norm for norm in norms]


def effective(weights: Iterable[float]) -> float:
    """Return how many equal contributors these weights are worth: (sum w)^2 / sum w^2."""
    given = list(weights)
    return math.fsum(given) ** 2 / math.fsum(weight * weight for weight in given)


def _decided(header: Header, fate: Fate, reason: str, weight: float = 0.0, clip: float = 1.0) -> Decision:
    return Decision(header.identity, fate, reason, header.rows, header.base, header.tokens, weight, clip)
