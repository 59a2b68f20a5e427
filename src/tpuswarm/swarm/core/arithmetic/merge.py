"""MERGE: contributions become one sum, in NumPy float32, one operation at a time, chunk by chunk.

No compiler may touch these sums: fused multiply-adds differ in the last bit between compilers and processors, and a
commit must have the same bits wherever it is made or replayed. Arrays may be memory maps larger than memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tpuswarm.swarm.core.arithmetic.quantize import BLOCK, Quantized

CHUNK = 2**15
"""Elements at a time, a multiple of the quantization block: the buffers then stay in a core's own cache. No result
depends on it."""


@dataclass(frozen=True, eq=False)
class Contribution:
    """One fragment of a contribution that a commit counts."""

    weight: float
    """Share in the sum; those of a commit add up to 1."""
    clip: float
    """Factor on its delta, 1 where it is not clipped."""
    base: np.ndarray
    """The published state that its member trained from, A, float32[n]."""
    payload: np.ndarray | Quantized
    """The snapshot s, float32[n], or the delta A - s, quantized."""

    def snapshot(self, part: slice, out: np.ndarray) -> np.ndarray:
        """s, clipped to A + clip x (s - A); float32, in the buffer `out` or as it is stored."""
        base = self.base[part]
        if isinstance(self.payload, Quantized):
            s = self.payload.decode(part.start, part.stop, out)
            np.subtract(base, s, out=s)
        else:
            s = self.payload[part]
        if self.clip == 1:
            return s
        moved = np.subtract(s, base, out=out[: s.size])
        moved *= np.float32(self.clip)
        return np.add(base, moved, out=moved)

    def delta(self, part: slice, out: np.ndarray) -> np.ndarray:
        """A - s, clipped; float32, in the buffer `out`. A quantized delta is taken as it is, without the rounding of a
        way over s.
        """
        if isinstance(self.payload, Quantized):
            delta = self.payload.decode(part.start, part.stop, out)
        else:
            delta = np.subtract(self.base[part], self.payload[part], out=out[: part.stop - part.start])
        if self.clip != 1:
            delta *= np.float32(self.clip)
        return delta


class Buffers:
    """Room for the work on one chunk of arrays of `size` elements; not for two threads at once."""

    def __init__(self, size: int):
        length = min(CHUNK, -(-size // BLOCK) * BLOCK)
        self.sum, self.term, self.new = np.empty((3, length), np.float32)


def average(theta: np.ndarray, contributions: Sequence[Contribution], out: np.ndarray) -> None:
    """out = sum of weight x (s + (theta - A)), in the order given; all float32[n], out may be theta.

    Where theta and A have the same bits the term is weight x s: one contribution of weight 1 gives its snapshot back.
    At least one contribution.
    """
    buffers = Buffers(out.size)
    for part in chunks(out.size):
        out[part] = average_of(theta, contributions, part, buffers)


def average_of(theta: np.ndarray, contributions: Sequence[Contribution], part: slice, buffers: Buffers) -> np.ndarray:
    """One chunk of `average`, in the buffers."""
    length = part.stop - part.start
    for number, each in enumerate(contributions):
        room = buffers.term if number else buffers.sum
        term = room[:length]
        moved = _moved(theta, each, part, each.snapshot(part, room))
        np.multiply(moved, np.float32(each.weight), out=term)
        if number:
            buffers.sum[:length] += term
    return buffers.sum[:length]


def mean_of(contributions: Sequence[Contribution], part: slice, buffers: Buffers) -> np.ndarray:
    """One chunk of the sum of weight x s, in the buffers: it lies between the snapshots, whatever their bases."""
    length = part.stop - part.start
    for number, each in enumerate(contributions):
        room = buffers.term if number else buffers.sum
        np.multiply(each.snapshot(part, room), np.float32(each.weight), out=room[:length])
        if number:
            buffers.sum[:length] += room[:length]
    return buffers.sum[:length]


def update(contributions: Sequence[Contribution], out: np.ndarray) -> None:
    """out = sum of weight x (A - s), in the order given; float32[n]. At least one contribution."""
    buffers = Buffers(out.size)
    for part in chunks(out.size):
        out[part] = update_of(contributions, part, buffers)


def update_of(contributions: Sequence[Contribution], part: slice, buffers: Buffers) -> np.ndarray:
    """One chunk of `update`, in the buffers."""
    length = part.stop - part.start
    for number, each in enumerate(contributions):
        delta = each.delta(part, buffers.term if number else buffers.sum)
        delta *= np.float32(each.weight)
        if number:
            buffers.sum[:length] += delta
    return buffers.sum[:length]


def chunks(size: int) -> Iterator[slice]:
    """Slices of at most CHUNK elements that cover `size` elements."""
    for start in range(0, size, CHUNK):
        yield slice(start, min(start + CHUNK, size))


def _moved(theta: np.ndarray, each: Contribution, part: slice, s: np.ndarray) -> np.ndarray:
    """s + (theta - A), and s where theta and A have the same bits."""
    if each.base is theta:
        return s
    now, base = theta[part], each.base[part]
    same = now.view(np.uint32) == base.view(np.uint32)
    return np.where(same, s, s + (now - base))
