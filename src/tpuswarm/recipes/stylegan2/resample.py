"""FIR resampling: each axis is filtered by the same few taps."""

import jax
import jax.numpy as jnp

TAPS = (1.0, 3.0, 3.0, 1.0)
"""The FIR filter of each axis (Zhang 2019, 1904.11486; Karras et al. 2020, appendix B)."""


def _filter(x_BxHxWxC: jax.Array, axis: int, low: int, high: int, up: int, gain: float) -> jax.Array:
    """Zeros between the rows (up - 1) and around them, then the FIR filter along one axis.

    A sum of four shifted arrays: the compiler makes one loop of it, where a convolution per channel would be slow.
    """
    edges = [(0, 0, 0)] * 4
    edges[axis] = (low, high, up - 1)
    x = jax.lax.pad(x_BxHxWxC, jnp.zeros((), x_BxHxWxC.dtype), edges)
    length = x.shape[axis] - len(TAPS) + 1
    parts = (
        jax.lax.slice_in_dim(x, shift, shift + length, axis=axis) * (gain * tap / sum(TAPS))
        for shift, tap in enumerate(TAPS)
    )
    return sum(parts, start=jnp.zeros((), x.dtype))


def blur(x_BxHxWxC: jax.Array, low: int, high: int, gain: float = 1.0, along: tuple[int, ...] = (1, 2)) -> jax.Array:
    """The FIR filter along axes, with `low` and `high` zeros before and after each."""
    for axis in along:
        x_BxHxWxC = _filter(x_BxHxWxC, axis, low, high, 1, gain)
    return x_BxHxWxC


def upsample(x_BxHxWxC: jax.Array) -> jax.Array:
    """Twice the height and width: x_Bx2Hx2WxC."""
    return _filter(_filter(x_BxHxWxC, 1, 2, 2, 2, 2.0), 2, 2, 2, 2, 2.0)
