"""Choose which contributions a commit counts, with which weight, and give every other one a verdict.

Only headers matter, so that anyone who reads the record can check the choice.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.people import person_of
from tpuswarm.swarm.core.values import Decision, Fate, Header, Identity

FALSELY_FINITE = "its payload is not finite, its header says that it is"
UNTRUE_NORM = "its payload has another norm than its header states"
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
    rejected: Mapping[Identity, str] = MappingProxyType({}),
    usual: Sequence[float] = (),
) -> list[Decision]:
    """Decide on each header, in the order of identities. The weights of the applied ones add up to 1.

    unreadable: contributions whose payload was lost; rejected: those that must not count, with the reason;
    usual: norms of contributions that were counted lately.
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
        elif header.identity in rejected:
            decisions.append(_decided(header, "dropped", rejected[header.identity]))
        elif stale > rule.limit:
            decisions.append(_decided(header, "dropped", f"{stale} commits stale, more than {rule.limit}"))
        else:
            contributors.append((header, header.tokens * rule.weight(stale)))
    people = [bool(person_of(header.identity.incarnation.member)) for header, _ in contributors]
    clips = clipping([header.norm for header, _ in contributors], people, usual)
    whole = math.fsum(weight for _, weight in contributors)
    for (header, weight), clip in zip(contributors, clips, strict=True):
        stale = view.staleness(header.base)
        reason = f"staleness {stale}" + (f", clipped to {clip:.3g} of its norm" if clip < 1 else "")
        decisions.append(_decided(header, "applied", reason, weight / whole, clip))
    return sorted(decisions, key=lambda decision: decision.identity)


def clipping(norms: Sequence[float], people: Sequence[bool] = (), usual: Sequence[float] = ()) -> list[float]:
    """Return the factor that brings each norm to at most CLIP_FACTOR times the median.

    With fewer than 3 norms only those of people are limited, by the median of the other ones and the usual ones.
    """
    if len(norms) >= 3:
        limit = CLIP_FACTOR * median(norms)
        return [1.0 if norm <= limit else limit / norm for norm in norms]
    found = []
    for number, (norm, is_persons) in enumerate(zip(norms, people or [False] * len(norms), strict=True)):
        known = [*usual, *norms[:number], *norms[number + 1 :]]
        limit = CLIP_FACTOR * median(known) if is_persons and known else math.inf
        found.append(1.0 if norm <= limit else limit / norm)
    return found


def effective(weights: Iterable[float]) -> float:
    """Return how many equal contributors these weights are worth: (sum w)^2 / sum w^2."""
    given = list(weights)
    return math.fsum(given) ** 2 / math.fsum(weight * weight for weight in given)


def _decided(header: Header, fate: Fate, reason: str, weight: float = 0.0, clip: float = 1.0) -> Decision:
    return Decision(header.identity, fate, reason, header.rows, header.base, header.tokens, weight, clip)
