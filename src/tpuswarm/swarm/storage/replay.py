"""A version computed again from the version before it and the payloads that it counted."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np

from tpuswarm.swarm.core.arithmetic.merge import Contribution
from tpuswarm.swarm.core.arithmetic.outer import Average, Outer, commit, first_state, state_rows
from tpuswarm.swarm.core.arithmetic.quantize import BITS, Quantized, empty
from tpuswarm.swarm.core.values import Decision, Header, Identity, Record
from tpuswarm.swarm.storage.ledger import Ledger, header_name
from tpuswarm.swarm.storage.objects import Objects, array_digest, fits, payload_name, quantized
from tpuswarm.swarm.storage.store import Corrupt, Missing

Found = TypeVar("Found")

KEPT = Average(1.0)
"""Stands for any: how much of it a commit has kept is in its record."""

Arrays = Callable[[str], np.ndarray | None]
"""An object's array by its digest; None where it is gone or damaged."""
Payloads = Callable[[Header, int], Mapping[str, np.ndarray] | None]
"""The payload of a fragment; None where it is gone or damaged."""


class Replayed(NamedTuple):
    """A fragment of a version."""

    state: np.ndarray
    """float32[n]."""
    outer: np.ndarray | None
    """float32[rows, n], None for a rule without outer state."""
    update: Quantized | None
    """None for a plain downlink."""


class Unreplayable(Exception):
    """What is needed for it is gone or damaged; says what."""


def replay(
    records: Callable[[int], Record],
    headers: Mapping[Identity, Header],
    version: int,
    fragment: int,
    arrays: Arrays,
    payloads: Payloads,
) -> Replayed:
    """One fragment, bit for bit.

    records: of each version up to `version`, which has contributors. Raises Unreplayable, and ValueError where what
    is there does not fit together.
    """
    record, before = records(version), records(version - 1)
    average = None if record.kept is None else KEPT
    outer = Outer(record.rule, record.momentum, downlink=record.downlink, averaged=record.averaged, average=average)
    theta = _there(arrays(before.state[fragment]), f"the state of commit {version - 1}")
    state = first_state(outer, theta)
    if (kept := outer_before(before, outer, fragment)) is not None:
        state = _there(arrays(kept), f"the outer state of commit {version - 1}")
    contributions = []
    for decision in record.decisions:
        if decision.fate == "applied":
            if not 0 <= decision.base < version:
                raise ValueError(f"commit {version} counts a push based on commit {decision.base}")
            header = _there(headers.get(decision.identity), header_name(decision.identity))
            digest = records(decision.base).state[fragment]
            base = _there(arrays(digest), f"the state of commit {decision.base}")
            payload = _there(payloads(header, fragment), payload_name(decision.identity, fragment))
            contributions.append(contribution(decision, theta if digest == before.state[fragment] else base, payload))
    rows = state_rows(outer, record.gathered)
    new, new_outer = np.empty_like(theta), np.empty((rows, theta.size), np.float32) if rows else None
    sent = None if outer.downlink == "plain" else empty(theta.size, BITS[outer.downlink])
    means = outer.averaged_in(fragment)
    left = record.kept or 0.0
    commit(theta, state, contributions, outer, record.rate, record.share, new, new_outer, sent, means, left)
    return Replayed(new, new_outer, sent)


def outer_before(before: Record, outer: Outer, fragment: int) -> str | None:
    """The digest of the outer state that a commit goes on with; None where it begins with `first_state`.

    before: the record before the commit. Another rule, another form of the downlink, and a moving average where there
    was none or none where there was one, begin anew.
    """
    was = before.rule, before.downlink, before.kept is not None
    same = was == (outer.rule, outer.downlink, outer.average is not None)
    return before.outer[fragment] if same and before.outer else None


def contribution(decision: Decision, base: np.ndarray, payload: Mapping[str, np.ndarray]) -> Contribution:
    """One fragment of a contribution as a merge takes it: base float32[n], payload as stored.

    Raises ValueError for a payload that is not of n elements.
    """
    if not fits(payload, base.size):
        raise ValueError(f"the payload of {decision.identity} does not have the {base.size} elements of its base")
    sent = payload["s"] if "s" in payload else quantized(payload)
    return Contribution(decision.weight, decision.clip, base, sent)


def restore(ledger: Ledger, objects: Objects, fragment: int, digest: str) -> bool:
    """Store an array of a state or an outer state, which is missing or damaged, anew; whether that could be done.

    It can as long as the version before and the payloads are there, and gives the same bits or nothing.
    """

    def array(digest: str) -> np.ndarray | None:
        return _readable(lambda: objects.get_array(digest))

    def payload(header: Header, fragment: int) -> dict[str, np.ndarray] | None:
        return _readable(lambda: objects.get_payload(header.identity, fragment, header.digests[fragment]))

    for version in reversed(ledger.versions()):
        record = ledger.record(version)
        applied = [each.identity for each in record.decisions if each.fate == "applied"]
        if applied and digest in (record.state[fragment], *record.outer[fragment : fragment + 1]):
            headers = {identity: ledger.header(header_name(identity)) for identity in applied}
            with suppress(Unreplayable, ValueError):
                made = replay(ledger.record, headers, version, fragment, array, payload)
                for again in (made.state, made.outer):
                    if again is not None and array_digest(again) == digest:
                        objects.put_array(again)
                        return True
    return False


def _readable(read: Callable[[], Found]) -> Found | None:
    try:
        return read()
    except (Missing, Corrupt):
        return None


def _there(found: Found | None, what: str) -> Found:
    if found is None:
        raise Unreplayable(f"{what} is gone")
    return found
