"""Merge contributions into one sum, in NumPy float32, one operation at a time, chunk by chunk.

No compiler may touch these sums: fused multiply-adds differ in the last bit between compilers and processors, and a
commit must have the same bits wherever it is computed. Arrays may be memory maps larger than memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tpuswarm.swarm.core.arithmetic.quantize import BLOCK_SIZE, Quantized

CHUNK_SIZE = 2**15
"""Elements at a time, a multiple of the quantization block. The buffers fit a core's cache; no result depends on it."""


@dataclass(frozen=True, eq=False)
class Contribution:
    """One fragment of a contribution that a commit counts."""

    weight: float
    """Share of the sum; the weights of a commit add up to 1."""
    clip: float
    """Factor applied to its delta; 1 if it is not clipped."""
    base: np.ndarray
    """The published state A that the member started from, float32[n]."""
    payload: np.ndarray | Quantized
    """The snapshot s, float32[n], or the delta A - s, quantized."""

    def sent(self, part: slice, out: np.ndarray) -> np.ndarray:
        """Return the payload, float32: decoded in the buffer `out`, or a view."""
        return (
            self.payload.decode(part.start, part.stop, out)
            if isinstance(self.payload, Quantized)
            else self.payload[part]
        )

    def snapshot(self, part: slice, out: np.ndarray) -> np.ndarray:
        """Return s clipped to A + clip x (s - A), float32: in the buffer `out`, or a view of the payload."""
        base, s = self.base[part], self.sent(part, out)
        if isinstance(self.payload, Quantized):
            np.subtract(base, s, out=s)
        if self.clip == 1:
            return s
        moved = np.subtract(s, base, out=out[: s.size])
        moved *= np.float32(self.clip)
        return np.add(base, moved, out=moved)

    def delta(self, part: slice, out: np.ndarray) -> np.ndarray:
        """Return A - s, clipped, float32, in the buffer `out`. A quantized delta is not rounded again."""
        if isinstance(self.payload, Quantized):
            delta = self.payload.decode(part.start, part.stop, out)
        else:
            delta = np.subtract(self.base[part], self.payload[part], out=out[: part.stop - part.start])
        if self.clip != 1:
            delta *= np.float32(self.clip)
        return delta


class Buffers:
    """Work space for one chunk of arrays of `size` elements; not for two threads at once."""

    def __init__(self, size: int):
        length = min(CHUNK_SIZE, -(-size // BLOCK_SIZE) * BLOCK_SIZE)
        self.sum, self.term, self.new = np.empty((3, length), np.float32)


def average(theta: np.ndarray, contributions: Sequence[Contribution], out: np.ndarray) -> None:
    """Write the sum of weight x (s + (theta - A)) to `out`, in the order given; all float32[n], out may be theta.

    If theta and A have the same bits, the term is weight x s, so a single contribution gives back its snapshot.
    """
    buffers = Buffers(out.size)
    for part in chunks(out.size):
        out[part] = average_chunk(theta, contributions, part, buffers)


def average_chunk(
    theta: np.ndarray, contributions: Sequence[Contribution], part: slice, buffers: Buffers
) -> np.ndarray:
    """Compute one chunk of `average` in the buffers."""
    length = part.stop - part.start
    for number, contribution in enumerate(contributions):
        room = buffers.term if number else buffers.sum
        term = room[:length]
        moved = _rebase(theta, contribution, part, contribution.snapshot(part, room))
        np.multiply(moved, np.float32(contribution.weight), out=term)
        if number:
            buffers.sum[:length] += term
    return buffers.sum[:length]


def mean_chunk(contributions: Sequence[Contribution], part: slice, buffers: Buffers) -> np.ndarray:
    """Compute one chunk of the sum of weight x s in the buffers. It lies between the snapshots."""
    length = part.stop - part.start
    for number, contribution in enumerate(contributions):
        room = buffers.term if number else buffers.sum
        np.multiply(contribution.snapshot(part, room), np.float32(contribution.weight), out=room[:length])
        if number:
            buffers.sum[:length] += room[:length]
    return buffers.sum[:length]


def update(contributions: Sequence[Contribution], out: np.ndarray) -> None:
    """Write the sum of weight x (A - s) to `out`, float32[n], in the order given."""
    buffers = Buffers(out.size)
    for part in chunks(out.size):
        out[part] = update_chunk(contributions, part, buffers)


def update_chunk(contributions: Sequence[Contribution], part: slice, buffers: Buffers) -> np.ndarray:
    """Compute one chunk of `update` in the buffers."""
    length = part.stop - part.start
    for number, contribution in enumerate(contributions):
        delta = contribution.delta(part, buffers.term if number else buffers.sum)
        delta *= np.float32(contribution.weight)
        if number:
            buffers.sum[:length] += delta
    return buffers.sum[:length]


def square(contribution: Contribution) -> float:
    """Return the squared norm of the delta, not clipped; infinite or NaN if it overflows."""
    buffers, whole = Buffers(contribution.base.size), replace(contribution, clip=1.0)
    with np.errstate(all="ignore"):
        deltas = (whole.delta(part, buffers.term) for part in chunks(contribution.base.size))
        return float(sum(float(np.dot(delta, delta)) for delta in deltas))


def chunks(size: int) -> Iterator[slice]:
    """Yield slices of at most CHUNK_SIZE elements that cover `size` elements."""
    for start in range(0, size, CHUNK_SIZE):
        yield slice(start, min(start + CHUNK_SIZE, size))


def _rebase(theta: np.ndarray, contribution: Contribution, part: slice, s: np.ndarray) -> np.ndarray:
    """Return s + (theta - A), but s itself for elements of theta and A with the same bits."""
    if contribution.base is theta:
        return s
    now, base = theta[part], contribution.base[part]
    same = now.view(np.uint32) == base.view(np.uint32)
    return np.where(same, s, s + (now - base))
