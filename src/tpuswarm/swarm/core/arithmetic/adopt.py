"""Adoption: how a member takes a commit over into the state that it has gone on training meanwhile."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.jit, donate_argnums=0)
def add(now: Any, new: Any, anchor: Any) -> Any:
    """now + (new - anchor) for every leaf of three float32 trees of one structure; `now` is donated.

    For a version without what this member has trained since its anchor: all of that stays. Float addition is not exact,
    so two cases are taken as they are: where new and anchor have the same bits the element stays untouched, and where
    now and anchor have, it becomes new (an idle member ends at the published bits). -0.0 and 0.0 are different bits.

    The result is sharded as `now`; give new and anchor the same sharding, or each device gets them whole.
    """

    def added(now: jax.Array, new: jax.Array, anchor: jax.Array) -> jax.Array:
        return _adopt(now, new, anchor, now + (new - anchor))

    return jax.tree.map(added, now, new, anchor)


@partial(jax.jit, donate_argnums=0)
def mix(now: Any, new: Any, snapshot: Any, keep: float | jax.Array) -> Any:
    """keep * now + (1 - keep) * new, the share `keep` of every leaf; trees, donation and sharding as in `add`.

    For the version that counts the contribution of `snapshot`. Adding what it changed, as `add` does, costs more loss
    the later it comes; mixing costs little (Douillard et al. 2025, "Streaming DiLoCo", who mix halves). Where new and
    snapshot have the same bits the element stays untouched (a swarm of one trains as if it were alone), and where now
    and snapshot have, it becomes new.
    """

    def mixed(now: jax.Array, new: jax.Array, snapshot: jax.Array) -> jax.Array:
        return _adopt(now, new, snapshot, new + keep * (now - new))

    return jax.tree.map(mixed, now, new, snapshot)


def adopt_mean(now: jax.Array, new: jax.Array, reference: jax.Array) -> jax.Array:
    """As both, of one array of averages: new, but `now` where new and reference have the same bits.

    What training has added to an average meanwhile is no sum: a variance could come below 0.
    """
    return jnp.where(_bits(new) == _bits(reference), now, new)


def _adopt(now: jax.Array, new: jax.Array, reference: jax.Array, adopted: jax.Array) -> jax.Array:
    return jnp.where(_bits(now) == _bits(reference), new, jnp.where(_bits(new) == _bits(reference), now, adopted))


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint32)
