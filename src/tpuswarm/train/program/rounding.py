"""Rounding to bfloat16 that keeps sums of gradients in float32."""

import jax
import jax.numpy as jnp


def widened(values: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast `values` to the shape of `like`, then round them to its dtype.

    The other way round a bias's gradient would be summed over all rows in bfloat16, where a sum of 256 terms has lost
    most of their digits.
    """
    return jnp.broadcast_to(values, like.shape).astype(like.dtype)
