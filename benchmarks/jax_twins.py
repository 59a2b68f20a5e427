"""JAX twins of the merge and the outer step for simulations, with members as the leading axis of arrays.

Compilers fuse and reorder these sums, so they equal NumPy's only up to rounding; no commit of a real run uses them.
"""

from functools import partial

import jax
import jax.numpy as jnp

from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.arithmetic.quantize import BITS, decode, encode, feedback
from tpuswarm.swarm.core.values import Form


@jax.jit
def average(
    theta: jax.Array, snapshots: jax.Array, bases: jax.Array, weights: jax.Array, clips: jax.Array
) -> jax.Array:
    """Twin of `merge.average`: theta f32[...], snapshots and bases f32[members, ...], weights and clips f32[members].

    A member of weight 0 does not count, whatever its values.
    """

    def moved(s: jax.Array, base: jax.Array, clip: jax.Array) -> jax.Array:
        s = jnp.where(clip == 1, s, base + clip * (s - base))
        same = jax.lax.bitcast_convert_type(theta, jnp.uint32) == jax.lax.bitcast_convert_type(base, jnp.uint32)
        return jnp.where(same, s, s + (theta - base))

    return _sum(weights, jax.vmap(moved)(snapshots, bases, clips))


@jax.jit
def update(snapshots: jax.Array, bases: jax.Array, weights: jax.Array, clips: jax.Array) -> jax.Array:
    """Twin of `merge.update`; shapes as in `average`."""
    return _sum(weights, jax.vmap(lambda s, base, clip: clip * (base - s))(snapshots, bases, clips))


@partial(jax.jit, static_argnames="outer")
def step(
    theta: jax.Array,
    outer_state: jax.Array,
    u: jax.Array,
    outer: OuterRule,
    rate: float | jax.Array,
    share: float | jax.Array,
    momentum_step: bool | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Twin of `outer.nesterov_step`: the next theta f32[...] and outer state f32[2, ...]."""
    momentum, buffer = outer_state
    moved = share * u
    buffer = buffer + moved
    stepped = outer.momentum * momentum + buffer
    moved = jnp.where(momentum_step, moved + outer.momentum * stepped, moved)
    kept = jnp.where(momentum_step, stepped, momentum), jnp.where(momentum_step, 0.0, buffer)
    return theta - rate * moved, jnp.stack(kept)


@partial(jax.jit, static_argnames="form")
def publish(theta: jax.Array, new: jax.Array, left: jax.Array, form: Form) -> tuple[jax.Array, jax.Array]:
    """Twin of `outer.quantize_change`: theta moved by the sent change towards `new`, and the rest; f32[n] each."""
    wanted = new - theta + left
    codes, scales = encode(wanted, BITS[form])
    return theta + decode(codes, scales, theta.size, BITS[form]), feedback(wanted, codes, scales, BITS[form])


def commit(
    theta: jax.Array,
    outer_state: jax.Array | None,
    snapshots: jax.Array,
    bases: jax.Array,
    weights: jax.Array,
    clips: jax.Array,
    outer: OuterRule,
    rate: float | jax.Array,
    share: float | jax.Array,
    momentum_step: bool | jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Twin of `outer.commit_fragment` without the downlink: next theta and outer state, None for the mean."""
    if outer.rule == "average":
        return average(theta, snapshots, bases, weights, clips), None
    assert outer_state is not None
    return step(theta, outer_state, update(snapshots, bases, weights, clips), outer, rate, share, momentum_step)


def _sum(weights: jax.Array, terms: jax.Array) -> jax.Array:
    def weighted(weight: jax.Array, term: jax.Array) -> jax.Array:
        return jnp.where(weight == 0, 0.0, weight * term)  # 0 times infinity is not 0

    return jax.vmap(weighted)(weights, terms).sum(axis=0)
