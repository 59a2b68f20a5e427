"""Adopt a commit: combine it with the member's own recent training."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.jit, donate_argnums=0)
def add(now: Any, new: Any, anchor: Any) -> Any:
    """Return now + (new - anchor) for every leaf of three float32 trees of one structure; `now` is donated.

    For a version that lacks this member's training since its anchor; that training is kept. Float addition is not
    exact, so two cases are copied: an element with the same bits in new and anchor stays unchanged, and one with the
    same bits in now and anchor becomes new (an idle member ends at the published bits). -0.0 and 0.0 have different
    bits.

    The result is sharded as `now`. Give new and anchor the same sharding, or each device receives them whole.
    """

    def added(now: jax.Array, new: jax.Array, anchor: jax.Array) -> jax.Array:
        return _adopt(now, new, anchor, now + (new - anchor))

    return jax.tree.map(added, now, new, anchor)


@partial(jax.jit, donate_argnums=0)
def mix(now: Any, new: Any, snapshot: Any, own_share: float | jax.Array) -> Any:
    """Return own_share * now + (1 - own_share) * new for every leaf; trees, donation and sharding as in `add`.

    For the version that counts the contribution of `snapshot`. Adding the change, as `add` does, raises the loss more
    the later it comes; mixing costs little (Douillard et al. 2025, "Streaming DiLoCo", mix halves). An element with the
    same bits in new and snapshot stays unchanged (a swarm of one trains as if it were alone), and one with the same
    bits in now and snapshot becomes new.
    """

    def mixed(now: jax.Array, new: jax.Array, snapshot: jax.Array) -> jax.Array:
        return _adopt(now, new, snapshot, new + own_share * (now - new))

    return jax.tree.map(mixed, now, new, snapshot)


def adopt_mean(now: jax.Array, new: jax.Array, reference: jax.Array) -> jax.Array:
    """Adopt an array of running statistics: new, but `now` for elements with the same bits in new and reference.

    Changes of an average must not be added: a variance could fall below 0.
    """
    return jnp.where(_bits(new) == _bits(reference), now, new)


def _adopt(now: jax.Array, new: jax.Array, reference: jax.Array, adopted: jax.Array) -> jax.Array:
    return jnp.where(_bits(now) == _bits(reference), new, jnp.where(_bits(new) == _bits(reference), now, adopted))


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint32)
