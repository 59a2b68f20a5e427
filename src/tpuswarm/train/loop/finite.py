"""Whether a state still consists of numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.train.paths import leaf_paths


def not_finite(tree: Any) -> list[str]:
    """Paths of the leaves that hold a NaN or an infinity."""
    floats = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(tree)]
    flags = jax.device_get(_all_finite(tree))
    return [path for path, ok, real in zip(leaf_paths(tree), flags, floats, strict=True) if real and not ok]


@jax.jit
def _all_finite(tree: Any) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
