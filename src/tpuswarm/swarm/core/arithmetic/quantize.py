"""Quantized deltas: blocks of 256 codes of 8, 4 or 2 bits, each block with a float32 scale.

Every function takes NumPy or JAX arrays, works under `jax.jit` (`bits` and `size` static), and answers in kind.

Rounding is to the nearest code. What it loses is kept by error feedback, so that nothing is lost in the long run, and
nearest has over stochastic rounding that the error is at most half a step, that no random key is needed for a retry to
have the same bits, and that the feedback is exact (below).

A scale has 16 significant bits and a code at most 8, so their product is a float32 without rounding. Compilers turn
x - code * scale into a fused multiply-add (XLA does so through `optimization_barrier` too), which differs from two
operations only where the product is rounded: here nowhere. All compilers and processors decode to the same bits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuswarm.swarm.core.values import Form

BLOCK = 256
"""Elements that share a scale."""

BITS: dict[Form, int] = {"int8": 8, "int4": 4}
"""Of a code, in each form that is not plain."""


def bytes_per_element(form: Form) -> float:
    """What an element takes on the wire: its code and its share of a scale, or a float32."""
    return 4.0 if form == "plain" else BITS[form] / 8 + 4 / BLOCK


LEAST = np.float32(2.0**-100)
"""Scales below it count as 0 and all of the block stays in the feedback: far above the subnormal numbers, which
devices flush to 0 and NumPy does not."""

_SIGNIFICANT = np.uint32(0xFFFFFF00)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A vector of n elements in ceil(n / BLOCK) blocks."""

    codes: np.ndarray
    """uint8[blocks, BLOCK * bits / 8]."""
    scales: np.ndarray
    """float32[blocks]."""
    bits: int

    def decode(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """float32 elements from `start`, a multiple of BLOCK, to `stop`, laid down in float32 `out` and a view of it.

        out: at least as long as the blocks that these elements are in. Same bits as from the function `decode`.
        """
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        codes, scales = self.codes[blocks], self.scales[blocks]
        values = out[: codes.shape[0] * BLOCK].reshape(-1, BLOCK)
        for place, part in enumerate(np.split(values, 8 // self.bits, axis=1)):
            np.copyto(part, codes if self.bits == 8 else (codes >> np.uint8(place * self.bits)) & _mask(self.bits))
        values -= _top(self.bits)
        values *= scales[:, None]
        return out[: stop - start]


def empty(size: int, bits: int) -> Quantized:
    """Room for `size` elements."""
    blocks = -(-size // BLOCK)
    return Quantized(np.empty((blocks, BLOCK * bits // 8), np.uint8), np.empty(blocks, np.float32), bits)


def encode(x: Any, bits: int) -> tuple[Any, Any]:
    """Codes uint8[blocks, BLOCK * bits / 8] and scales float32[blocks] of x float32[n], for 8, 4 or 2 bits.

    The last block is filled up with zeros. Codes are integers from -(2^(bits-1) - 1) to its opposite, stored with that
    offset; a byte has in its lowest bits a code of the first part of its block, above it one of the second part, and so
    on. x has to be finite and below 2^127 in magnitude. Raises ValueError for other numbers of bits.
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"codes have 2, 4 or 8 bits, not {bits}")
    xp = x.__array_namespace__()
    top = _top(bits)
    blocks = -(-x.size // BLOCK)
    padded = xp.pad(x, (0, blocks * BLOCK - x.size)).reshape(blocks, BLOCK)
    # Times the reciprocal: a compiler would make that of a division by a constant, in another last bit.
    scales = xp.abs(padded).max(axis=1) * (np.float32(1) / top)
    scales = (scales.view(np.uint32) & _SIGNIFICANT).view(np.float32)
    scales = xp.where(scales < LEAST, np.float32(0), scales)
    divisors = xp.where(scales == 0, np.float32(1), scales)
    codes = (xp.rint(padded / divisors[:, None]) + top).astype(np.uint8)
    parts = codes.reshape(blocks, 8 // bits, BLOCK * bits // 8)
    packed = parts[:, 0]
    for place in range(1, 8 // bits):
        packed = packed | (parts[:, place] << np.uint8(place * bits))
    return packed, scales


def decode(codes: Any, scales: Any, size: int, bits: int) -> Any:
    """float32[size] of what `encode` gave; the same bits from NumPy and from JAX on any device."""
    xp = codes.__array_namespace__()
    parts = [(codes >> np.uint8(place * bits)) & _mask(bits) for place in range(8 // bits)]
    values = (xp.concatenate(parts, axis=1).astype(np.float32) - _top(bits)) * scales[:, None]
    return values.reshape(-1)[:size]


def feedback(x: Any, codes: Any, scales: Any, bits: int) -> Any:
    """What the codes leave out: x - decode(...), float32[n]; the same bits from NumPy and from JAX.

    Exact where every code is the nearest, which only a device with an imprecise division can miss, and then by a tie.
    """
    decoded = decode(codes, scales, x.size, bits)
    # x itself where nothing is subtracted: a device would flush a subnormal x.
    return x.__array_namespace__().where(decoded == 0, x, x - decoded)


def _mask(bits: int) -> np.uint8:
    return np.uint8(2**bits - 1)


def _top(bits: int) -> np.float32:
    return np.float32(2 ** (bits - 1) - 1)
