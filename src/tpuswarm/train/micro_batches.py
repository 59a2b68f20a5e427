"""The gradient of a batch as a sum over micro-batches, which the devices add up once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from tpuswarm.train.losses import Terms
from tpuswarm.train.recipe import Batch

Gradient = Callable[[Any, Any, Any, Batch, jax.Array], tuple[Any, tuple[Terms, Any]]]
"""(trained, all parameters, mutable state, batch, key) → (gradient, (terms, mutable state after it))."""


def added_up(
    gradient: Gradient, count: int, trained: Any, params: Any, extra: Any, batch: Batch, key: jax.Array
) -> tuple[tuple[Any, Terms], Any]:
    """The sums of gradients and terms over `count` micro-batches, and the mutable state after the last."""

    def micro(extra: Any, index: jax.Array, batch: Batch) -> Any:
        grads, (found, after) = gradient(trained, params, extra, batch, jax.random.fold_in(key, index))
        return (grads, found), after

    def add(carried: Any, indexed: Any) -> tuple[Any, None]:
        total, extra = carried
        more, extra = micro(extra, *indexed)
        return (jax.tree.map(jnp.add, total, more), extra), None

    # Micro-batch a takes every count-th row from a on: each device then keeps rows that it already holds.
    micros = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), dict(batch))
    shapes, _ = jax.eval_shape(micro, extra, jnp.int32(0), jax.tree.map(lambda x: x[0], micros))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (total, extra), _ = jax.lax.scan(add, (zeros, extra), (jnp.arange(count), micros))
    return total, extra


def added_up_by_device(
    gradient: Gradient, count: int, trained: Any, params: Any, batch: Batch, key: jax.Array
) -> tuple[Any, Terms]:
    """The sums over the micro-batches of every device, each of its own rows, added up over the devices at the end.

    Left to itself the partitioner sums a gradient over the devices in every micro-batch. Here each device works as if
    it were alone, and the parameters are whole on all; its key is its own. The mesh must be visible.
    """
    mesh = jax.sharding.get_abstract_mesh()
    (axis,) = mesh.axis_names

    def mine(trained: Any, params: Any, batch: Batch, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # kernels that map themselves over a mesh see none
            total, _ = added_up(gradient, count, trained, params, None, batch, key)
        return jax.lax.psum(total, axis)

    everywhere, rows = PartitionSpec(), PartitionSpec(axis)
    mapped = jax.shard_map(
        mine, mesh=mesh, in_specs=(everywhere, everywhere, rows, everywhere), out_specs=everywhere, check_vma=False
    )
    return mapped(trained, params, dict(batch), key)
