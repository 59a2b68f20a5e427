"""Select devices, make the mesh over them, and shard the arrays of a state."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuswarm.config.limits import parse_devices
from tpuswarm.errors import InputError

AXIS = "data"
"""The mesh axis. Batches are split over it and, with fsdp, large parameters."""

MIN_SHARDED_BYTES = 2**20
"""Smaller leaves are replicated under fsdp: gathering them costs more than holding them."""

MIN_PART_ROWS = 64
"""Fewer rows per device would fill a TPU's tiles of 8 rows badly."""


def select_devices(which: str | int | Sequence[int], devices: Sequence[Any]) -> list[Any]:
    """Return `all` devices, a number of them (8), or those at indices from 0 ([5], [0, 1]).

    Raises InputError for too many devices and for an index out of range.
    """
    have = f"this machine has {len(devices)} ({devices[0].device_kind})"
    wanted = parse_devices(which)
    if wanted is None:
        return list(devices)
    if isinstance(wanted, int):
        if wanted > len(devices):
            raise InputError(f"{wanted} devices were asked for, {have}; use --devices all")
        return list(devices[:wanted])
    wrong = [index for index in wanted if not 0 <= index < len(devices)]
    if wrong or not wanted:
        raise InputError(f"devices: index {wrong[0] if wrong else 'missing'} is out of range: {have}, counted from 0")
    return [devices[index] for index in wanted]


def make_mesh(devices: Sequence[Any]) -> Mesh:
    """Return a one-axis mesh over `devices`; devices of one host are adjacent, like its rows of a batch.

    The hosts keep the order in which they come first.
    """
    hosts = [*dict.fromkeys(device.process_index for device in devices)]
    return Mesh(np.asarray(sorted(devices, key=lambda device: hosts.index(device.process_index))), (AXIS,))


def leaf_sharding(shape: tuple[int, ...], itemsize: int, mesh: Mesh, shard: str) -> NamedSharding:
    """Return the sharding of one leaf. Small leaves are replicated, and so are all without fsdp.

    fsdp splits a large leaf along its largest axis that the number of devices divides. It takes the last axis only if
    no other has MIN_PART_ROWS per device: with a split last axis, the TPU compiler sums whole gradients on every device
    (all-reduce) instead of parts (reduce-scatter), for twice the bytes.

    If the number divides no axis, its prime factors are spread over the axes, the largest first: 128 devices split
    [48, 1600, 4800] into 2 and 64 parts. Parts repeat over the remaining factors.
    """
    if shard != "fsdp" or mesh.size == 1 or math.prod(shape) * itemsize < MIN_SHARDED_BYTES:
        return replicated(mesh)
    order = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    divided = [axis for axis in order if shape[axis] % mesh.size == 0]
    roomy = [axis for axis in divided if axis < len(shape) - 1 and shape[axis] >= MIN_PART_ROWS * mesh.size]
    if divided:
        axis = (roomy or divided)[0]
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))
    factors = prime_factors(mesh.size)
    names = [f"{AXIS}{number}" for number in range(len(factors))]
    free, taken = dict(zip(names, factors, strict=True)), [list[str]() for _ in shape]
    for axis in order:
        left = shape[axis]
        for name, factor in list(free.items()):
            if left % factor == 0:
                left //= free.pop(name)
                taken[axis].append(name)
    return NamedSharding(Mesh(mesh.devices.reshape(factors), names), PartitionSpec(*map(tuple, taken)))


def prime_factors(number: int) -> list[int]:
    """Return prime factors in ascending order."""
    found, factor = list[int](), 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def state_shardings(state: Any, mesh: Mesh, shard: str) -> Any:
    """Return a sharding for every leaf of a state, which may be abstract."""
    return jax.tree.map(lambda leaf: leaf_sharding(leaf.shape, leaf.dtype.itemsize, mesh, shard), state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Split rows over all devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """Put the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def gathered(weights: jax.Array) -> jax.Array:
    """Return `weights` whole on every device of the visible mesh, for use of a sharded weight.

    The partitioner might move activations instead, which are larger. Without fsdp or a mesh this does nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return weights
    return jax.lax.with_sharding_constraint(weights, PartitionSpec())


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered_as(weights: jax.Array, dtype: Any) -> jax.Array:
    """Return `weights` rounded to `dtype`, gathered, and cast back; their gradient is not rounded.

    Gathering in bfloat16 moves half the bytes, while gradients of many uses, chunk by chunk, add up exactly.
    """
    return gathered(weights.astype(dtype)).astype(weights.dtype)


def _gathered_as_backward(dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (gathered(gradient),)  # replicated, or every chunk would reduce it over the devices


gathered_as.defvjp(lambda weights, dtype: (gathered_as(weights, dtype), None), _gathered_as_backward)


def bytes_per_device(state: Any) -> int:
    """Return the bytes of a state on one device; the state may be abstract."""
    leaves = jax.tree.leaves(state)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
