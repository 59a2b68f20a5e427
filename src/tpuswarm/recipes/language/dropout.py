"""Drop a share of activations."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity without a key."""
    if key is None or rate == 0:
        return x
    is_kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    scaled = (x.astype(jnp.float32) / (1 - rate)).astype(x.dtype)  # 1 - rate is not a bfloat16
    return jnp.where(is_kept, scaled, jnp.zeros_like(x))
