"""MERGE: contributions become one sum, in NumPy float32, one operation at a time, chunk by chunk.

No compiler may touch these sums: fused multiply-adds differ in the last bit between compilers and processors, and a
commit must have the same bits wherever it is made or replayed. Arrays may be memory maps larger than memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from tpuswarm.swarm.core.quantize import Quantized

CHUNK = 2**16
"""Elements at a time, a multiple of the quantization block: temporaries then stay in a processor's cache. No result
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

    def snapshot(self, part: slice) -> np.ndarray:
        """s, clipped to A + clip x (s - A); float32."""
        base = self.base[part]
        if isinstance(self.payload, Quantized):
            s = base - self.payload.decode(part.start, part.stop)
        else:
            s = self.payload[part]
        return s if self.clip == 1 else base + np.float32(self.clip) * (s - base)

    def delta(self, part: slice) -> np.ndarray:
        """A - s, clipped; float32. A quantized delta is taken as it is, without the rounding of a way over s."""
        if isinstance(self.payload, Quantized):
            delta = self.payload.decode(part.start, part.stop)
        else:
            delta = self.base[part] - self.payload[part]
        return delta if self.clip == 1 else np.float32(self.clip) * delta


def average(theta: np.ndarray, contributions: Sequence[Contribution], out: np.ndarray) -> None:
    """out = sum of weight x (s + (theta - A)), in the order given; all float32[n], out may be theta.

    Where theta and A have the same bits the term is weight x s: one contribution of weight 1 gives its snapshot back.
    At least one contribution.
    """
    for part in chunks(out.size):
        out[part] = reduce(np.add, (_moved(theta[part], each, part) for each in contributions))


def update(contributions: Sequence[Contribution], out: np.ndarray) -> None:
    """out = sum of weight x (A - s), in the order given; float32[n]. At least one contribution."""
    for part in chunks(out.size):
        out[part] = update_of(contributions, part)


def update_of(contributions: Sequence[Contribution], part: slice) -> np.ndarray:
    """One chunk of `update`."""
    return reduce(np.add, (np.float32(each.weight) * each.delta(part) for each in contributions))


def chunks(size: int) -> Iterator[slice]:
    """Slices of at most CHUNK elements that cover `size` elements."""
    for start in range(0, size, CHUNK):
        yield slice(start, min(start + CHUNK, size))


def _moved(theta: np.ndarray, each: Contribution, part: slice) -> np.ndarray:
    base, s = each.base[part], each.snapshot(part)
    same = theta.view(np.uint32) == base.view(np.uint32)
    return np.float32(each.weight) * np.where(same, s, s + (theta - base))
