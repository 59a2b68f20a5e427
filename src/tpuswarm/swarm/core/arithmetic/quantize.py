"""Quantized deltas: blocks of 256 codes of 8, 4 or 2 bits, each block with a float32 scale.

Every function takes NumPy or JAX arrays, works under `jax.jit` (`bits` and `size` static), and returns the same kind.

Codes are rounded to the nearest. Error feedback keeps the rounding error, so that nothing is lost in the long run.
Compared with stochastic rounding, the error is at most half a step, a retry has the same bits without a random key, and
the feedback is exact.

A scale has 16 significant bits and a code at most 8, so their product is an exact float32. Compilers turn
x - code * scale into a fused multiply-add (XLA even through `optimization_barrier`), which differs from two operations
only if the product is rounded: never here. All compilers and processors decode to the same bits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuswarm.swarm.core.values import Form

BLOCK_SIZE = 256
"""Elements that share a scale."""

BITS: dict[Form, int] = {"int8": 8, "int4": 4}
"""Bits of a code in each quantized form."""


def bytes_per_element(form: Form) -> float:
    """Return the bytes of an element on the wire: its code and its share of a scale, or a float32."""
    return 4.0 if form == "plain" else BITS[form] / 8 + 4 / BLOCK_SIZE


def sent_bytes(size: int, form: Form) -> float:
    """Return the bytes of `size` elements on the wire: quantized ones are sent in whole blocks."""
    return bytes_per_element(form) * (size if form == "plain" else -(-size // BLOCK_SIZE) * BLOCK_SIZE)


MIN_SCALE = np.float32(2.0**-100)
"""Smaller scales count as 0, and the block stays in the feedback. It is far above the subnormal numbers, which devices
flush to 0 and NumPy does not."""

_SIGNIFICANT = np.uint32(0xFFFFFF00)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A vector of n elements in ceil(n / BLOCK_SIZE) blocks."""

    codes: np.ndarray
    """uint8[blocks, BLOCK_SIZE * bits / 8]."""
    scales: np.ndarray
    """float32[blocks]."""
    bits: int

    def decode(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Decode elements from `start`, a multiple of BLOCK_SIZE, to `stop` into `out`, and return that view.

        out: float32, as long as the blocks that hold these elements. Same bits as from the function `decode`.
        """
        blocks = slice(start // BLOCK_SIZE, -(-stop // BLOCK_SIZE))
        codes, scales = self.codes[blocks], self.scales[blocks]
        values = out[: codes.shape[0] * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)
        for number, part in enumerate(np.split(values, 8 // self.bits, axis=1)):
            np.copyto(part, codes if self.bits == 8 else (codes >> np.uint8(number * self.bits)) & _mask(self.bits))
        values -= _top(self.bits)
        values *= scales[:, None]
        return out[: stop - start]


def empty(size: int, bits: int) -> Quantized:
    """Return uninitialized room for `size` elements."""
    blocks = -(-size // BLOCK_SIZE)
    return Quantized(np.empty((blocks, BLOCK_SIZE * bits // 8), np.uint8), np.empty(blocks, np.float32), bits)


def encode(x: Any, bits: int) -> tuple[Any, Any]:
    """Return codes uint8[blocks, BLOCK_SIZE * bits / 8] and scales float32[blocks] of x float32[n]; 8, 4 or 2 bits.

    The last block is padded with zeros. Codes are integers from -(2^(bits-1) - 1) to its opposite, stored with that
    offset; the lowest bits of a byte hold a code of the first part of its block, the next bits one of the second part,
    and so on. x must be finite and below 2^127 in magnitude. Raise ValueError for other numbers of bits.
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"codes have 2, 4 or 8 bits, not {bits}")
    xp = x.__array_namespace__()
    top = _top(bits)
    blocks = -(-x.size // BLOCK_SIZE)
    padded = xp.pad(x, (0, blocks * BLOCK_SIZE - x.size)).reshape(blocks, BLOCK_SIZE)
    # Multiply by the reciprocal: a compiler may turn division by a constant into it, with another last bit.
    scales = xp.abs(padded).max(axis=1) * (np.float32(1) / top)
    scales = (scales.view(np.uint32) & _SIGNIFICANT).view(np.float32)
    scales = xp.where(scales < MIN_SCALE, np.float32(0), scales)
    divisors = xp.where(scales == 0, np.float32(1), scales)
    codes = (xp.rint(padded / divisors[:, None]) + top).astype(np.uint8)
    parts = codes.reshape(blocks, 8 // bits, BLOCK_SIZE * bits // 8)
    packed = parts[:, 0]
    for number in range(1, 8 // bits):
        packed = packed | (parts[:, number] << np.uint8(number * bits))
    return packed, scales


def decode(codes: Any, scales: Any, size: int, bits: int) -> Any:
    """Return float32[size] from `encode`'s result; the same bits from NumPy and from JAX on any device."""
    xp = codes.__array_namespace__()
    parts = [(codes >> np.uint8(number * bits)) & _mask(bits) for number in range(8 // bits)]
    values = (xp.concatenate(parts, axis=1).astype(np.float32) - _top(bits)) * scales[:, None]
    return values.reshape(-1)[:size]


def feedback(x: Any, codes: Any, scales: Any, bits: int) -> Any:
    """Return the rounding error x - decode(...), float32[n]; the same bits from NumPy and from JAX.

    Exact if every code is the nearest; a device with an imprecise division can miss that only at a tie.
    """
    decoded = decode(codes, scales, x.size, bits)
    # x itself if nothing is subtracted: a device would flush a subnormal x.
    return x.__array_namespace__().where(decoded == 0, x, x - decoded)


def _mask(bits: int) -> np.uint8:
    return np.uint8(2**bits - 1)


def _top(bits: int) -> np.float32:
    return np.float32(2 ** (bits - 1) - 1)
