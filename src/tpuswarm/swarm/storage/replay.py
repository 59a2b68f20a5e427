"""Recompute a version from the previous one and the payloads that it counted."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from tpuswarm.swarm.core.arithmetic.merge import Contribution
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, OuterRule, commit_fragment, initial_state, state_rows
from tpuswarm.swarm.core.arithmetic.quantize import BITS, Quantized, empty
from tpuswarm.swarm.core.values import Decision, Header, Identity, Record
from tpuswarm.swarm.storage.ledger import Ledger, header_name
from tpuswarm.swarm.storage.objects import Objects, array_digest, payload_fits, payload_name, to_quantized
from tpuswarm.swarm.storage.store import Corrupt, Missing

Found = TypeVar("Found")

ANY_AVERAGE = MovingAverage(1.0)
"""Stands for any moving average: the record has the share that the commit kept."""

Arrays = Callable[[str], np.ndarray | None]
"""Returns an object's array by its digest; None if it is missing or damaged."""
Payloads = Callable[[Header, int], Mapping[str, np.ndarray] | None]
"""Returns the payload of a fragment; None if it is missing or damaged."""


class Replayed(NamedTuple):
    """A fragment of a version."""

    state: np.ndarray
    """float32[n]."""
    outer: np.ndarray | None
    """float32[rows, n]; None for a rule without outer state."""
    update: Quantized | None
    """None for a plain downlink."""


class Unreplayable(Exception):
    """An input is missing or damaged."""


def replay(
    records: Callable[[int], Record],
    headers: Mapping[Identity, Header],
    version: int,
    fragment: int,
    arrays: Arrays,
    payloads: Payloads,
) -> Replayed:
    """Recompute one fragment, bit for bit.

    records: returns each version up to `version`, which has contributors. Raise Unreplayable, and ValueError for
    inputs that contradict each other.
    """
    record, before = records(version), records(version - 1)
    average = None if record.kept is None else ANY_AVERAGE
    outer = OuterRule(record.rule, record.momentum, downlink=record.downlink, averaged=record.averaged, average=average)
    theta = _require(arrays(before.state[fragment]), f"the state of commit {version - 1}")
    state = initial_state(outer, theta)
    if (kept := outer_before(before, outer, fragment)) is not None:
        state = _require(arrays(kept), f"the outer state of commit {version - 1}")
    contributions = []
    for decision in record.decisions:
        if decision.fate == "applied":
            if not 0 <= decision.base < version:
                raise ValueError(f"commit {version} counts a push based on commit {decision.base}")
            header = _require(headers.get(decision.identity), header_name(decision.identity))
            digest = records(decision.base).state[fragment]
            base = _require(arrays(digest), f"the state of commit {decision.base}")
            payload = _require(payloads(header, fragment), payload_name(decision.identity, fragment))
            contributions.append(contribution(decision, theta if digest == before.state[fragment] else base, payload))
    rows = state_rows(outer, record.gathered)
    new, new_outer = np.empty_like(theta), np.empty((rows, theta.size), np.float32) if rows else None
    sent = None if outer.downlink == "plain" else empty(theta.size, BITS[outer.downlink])
    means = outer.averaged_slices(fragment)
    left = record.kept or 0.0
    commit_fragment(theta, state, contributions, outer, record.rate, record.share, new, new_outer, sent, means, left)
    return Replayed(new, new_outer, sent)


def outer_before(before: Record, outer: OuterRule, fragment: int) -> str | None:
    """Return the digest of the outer state from which a commit continues; None if it starts with `initial_state`.

    before: the previous record. A change of the rule, the downlink's form or the moving average starts anew.
    """
    was = before.rule, before.downlink, before.kept is not None
    same = was == (outer.rule, outer.downlink, outer.average is not None)
    return before.outer[fragment] if same and before.outer else None


def contribution(decision: Decision, base: np.ndarray, payload: Mapping[str, np.ndarray]) -> Contribution:
    """Return one fragment of a contribution for a merge: base float32[n], payload as stored.

    Raise ValueError for a payload that does not have n elements.
    """
    if not payload_fits(payload, base.size):
        raise ValueError(f"the payload of {decision.identity} does not have the {base.size} elements of its base")
    sent = payload["s"] if "s" in payload else to_quantized(payload)
    return Contribution(decision.weight, decision.clip, base, sent)


def restore(ledger: Ledger, objects: Objects, fragment: int, digest: str) -> bool:
    """Recompute and store a missing or damaged array of a state or an outer state; return whether it was possible.

    The previous version and the payloads must exist. The result has the same bits, or nothing is stored.
    """

    def array(digest: str) -> np.ndarray | None:
        return _readable(lambda: objects.get_array(digest))

    def payload(header: Header, fragment: int) -> dict[str, np.ndarray] | None:
        return _readable(lambda: objects.get_payload(header.identity, fragment, header.digests[fragment]))

    for version in reversed(ledger.versions()):
        record = ledger.record(version)
        applied = [decision.identity for decision in record.decisions if decision.fate == "applied"]
        if applied and digest in (record.state[fragment], *record.outer[fragment : fragment + 1]):
            headers = {identity: ledger.header(header_name(identity)) for identity in applied}
            with suppress(Unreplayable, ValueError):
                made = replay(ledger.record, headers, version, fragment, array, payload)
                for recomputed in (made.state, made.outer):
                    if recomputed is not None and array_digest(recomputed) == digest:
                        objects.put_array(recomputed)
                        return True
    return False


def _readable(read: Callable[[], Found]) -> Found | None:
    try:
        return read()
    except (Missing, Corrupt):
        return None


def _require(found: Found | None, what: str) -> Found:
    if found is None:
        raise Unreplayable(f"{what} is gone")
    return found
