"""A version computed again from the version before it and the payloads that it counted."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from tpuswarm.swarm.core.merge import Contribution
from tpuswarm.swarm.core.outer import Outer, commit
from tpuswarm.swarm.core.quantize import BLOCK, Quantized
from tpuswarm.swarm.core.values import Decision, Header, Identity, Record
from tpuswarm.swarm.ledger import header_name
from tpuswarm.swarm.objects import payload_name

Found = TypeVar("Found")

Arrays = Callable[[str], np.ndarray | None]
"""An object's array by its digest; None where it is gone or damaged."""
Payloads = Callable[[Header, int], Mapping[str, np.ndarray] | None]
"""The payload of a fragment; None where it is gone or damaged."""


class Gone(Exception):
    """What is needed for it is gone or damaged; says what."""


def replay(
    records: Sequence[Record],
    headers: Mapping[Identity, Header],
    version: int,
    fragment: int,
    arrays: Arrays,
    payloads: Payloads,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The state, float32[n], and the outer state of one fragment, bit for bit; None for a rule without outer state.

    records: from genesis on, up to `version` at least, which has contributors. Raises Gone, and ValueError where what
    is there does not fit together.
    """
    record, before = records[version], records[version - 1]
    theta = _there(arrays(before.state[fragment]), f"the state of version {version - 1}")
    state = None
    if record.rule != "average":
        found = arrays(before.outer[fragment]) if fragment < len(before.outer) else None
        state = _there(found, f"the outer state of version {version - 1}")
    contributions = []
    for decision in record.decisions:
        if decision.fate == "applied":
            if not 0 <= decision.base < version:
                raise ValueError(f"version {version} counts a contribution to version {decision.base}")
            header = _there(headers.get(decision.identity), header_name(decision.identity))
            base = _there(arrays(records[decision.base].state[fragment]), f"the state of version {decision.base}")
            payload = _there(payloads(header, fragment), payload_name(decision.identity, fragment))
            contributions.append(contribution(decision, base, payload))
    new, new_outer = np.empty_like(theta), None if state is None else np.empty_like(state)
    outer = Outer(record.rule, record.momentum)
    commit(theta, state, contributions, outer, record.rate, record.share, record.gathered == 0, new, new_outer)
    return new, new_outer


def contribution(decision: Decision, base: np.ndarray, payload: Mapping[str, np.ndarray]) -> Contribution:
    """One fragment of a contribution as a merge takes it: base float32[n], payload as stored.

    Raises ValueError for a payload that is not of n elements.
    """
    if not fits(payload, base.size):
        raise ValueError(f"the payload of {decision.identity} does not have the {base.size} elements of its base")
    if "s" in payload:
        return Contribution(decision.weight, decision.clip, base, payload["s"])
    quantized = Quantized(payload["codes"], payload["scales"], _bits(payload["codes"]))
    return Contribution(decision.weight, decision.clip, base, quantized)


def fits(payload: Mapping[str, np.ndarray], size: int) -> bool:
    """Whether a payload is one of a fragment of `size` elements."""
    if "s" in payload:
        return payload["s"].shape == (size,)
    codes, blocks = payload["codes"], -(-size // BLOCK)
    bits = _bits(codes)
    return bits in (2, 4, 8) and codes.shape == (blocks, BLOCK * bits // 8) and payload["scales"].shape == (blocks,)


def _bits(codes: np.ndarray) -> int:
    return codes.shape[-1] * 8 // BLOCK


def _there(found: Found | None, what: str) -> Found:
    if found is None:
        raise Gone(f"{what} is gone")
    return found
