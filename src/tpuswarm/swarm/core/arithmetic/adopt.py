"""Adoption: how a member takes a commit over into the state that it has gone on training meanwhile."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@partial(jax.jit, donate_argnums=0)
def adopt(now: Any, new: Any, reference: Any) -> Any:
    """now + (new - reference) for every leaf of three float32 trees of one structure; `now` is donated.

    reference is the snapshot s when the contribution of it was applied, else the anchor A. Float addition is not exact,
    so two cases are taken as they are: where new and reference have the same bits the element stays untouched (a swarm
    of one trains as if it were alone), and where now and reference have, it becomes new (an idle member ends at the
    published bits). -0.0 and 0.0 are different bits.

    The result is sharded as `now`; give new and reference the same sharding, or each device gets them whole.
    """
    return jax.tree.map(_adopt, now, new, reference)


def adopt_mean(now: jax.Array, new: jax.Array, reference: jax.Array) -> jax.Array:
    """As `adopt`, of one array of averages: new, but `now` where new and reference have the same bits.

    What training has added to an average meanwhile is no sum: a variance could come below 0.
    """
    new_, reference_ = (jax.lax.bitcast_convert_type(each, jnp.uint32) for each in (new, reference))
    return jnp.where(new_ == reference_, now, new)


def _adopt(now: jax.Array, new: jax.Array, reference: jax.Array) -> jax.Array:
    now_, new_, reference_ = (jax.lax.bitcast_convert_type(each, jnp.uint32) for each in (now, new, reference))
    return jnp.where(now_ == reference_, new, jnp.where(new_ == reference_, now, now + (new - reference)))
