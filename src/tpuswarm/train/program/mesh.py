"""Devices, the mesh over them, and where each array of a state lies."""

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
"""The one mesh axis: batches are split over it and, with fsdp, so are large parameters."""

MIN_SHARDED_BYTES = 2**20
"""Smaller leaves are replicated under fsdp: gathering them costs more than holding them."""


MIN_PART = 64
"""Rows of a part: a TPU lays them out in tiles of 8, which a few rows fill badly."""


def select_devices(which: str | int | Sequence[int], devices: Sequence[Any]) -> list[Any]:
    """The devices meant by `all`, a number of devices (8), or indices from 0 ([5], [0, 1]).

    Raises InputError for more devices than there are, and for an index out of range.
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
    """A one-axis mesh in automatic mode over `devices`; those of one host stand together, as its rows of a batch do."""
    return Mesh(np.asarray(sorted(devices, key=lambda device: device.process_index)), (AXIS,))


def leaf_sharding(shape: tuple[int, ...], itemsize: int, mesh: Mesh, shard: str) -> NamedSharding:
    """Where one leaf lies: with fsdp it is split, if it is large, along its largest axis that the devices divide.

    The last axis is taken where no other gives parts of MIN_PART rows: where it is split, the TPU compiler sums a
    gradient whole on every device (all-reduce) instead of each device's part (reduce-scatter), for twice the bytes.

    Where they divide none, their prime factors are shared out among its axes, the largest first: 128 devices split
    [48, 1600, 4800] into 2 and 64 parts. Factors that no axis takes repeat the parts. Else it is replicated.
    """
    if shard != "fsdp" or mesh.size == 1 or math.prod(shape) * itemsize < MIN_SHARDED_BYTES:
        return replicated(mesh)
    order = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    divided = [axis for axis in order if shape[axis] % mesh.size == 0]
    roomy = [axis for axis in divided if axis < len(shape) - 1 and shape[axis] >= MIN_PART * mesh.size]
    if divided:
        axis = (roomy or divided)[0]
        return NamedSharding(mesh, PartitionSpec(*[AXIS if each == axis else None for each in range(axis + 1)]))
    factors = prime_factors(mesh.size)
    names = [f"{AXIS}{number}" for number in range(len(factors))]
    free, taken = dict(zip(names, factors, strict=True)), [list[str]() for _ in shape]
    for axis in order:
        left = shape[axis]
        for name, factor in list(free.items()):
            if left % factor == 0:
                left //= free.pop(name)
                taken[axis].append(name)
    return NamedSharding(Mesh(mesh.devices.reshape(factors), names), PartitionSpec(*[tuple(each) for each in taken]))


def prime_factors(number: int) -> list[int]:
    """In ascending order; [] of 1."""
    found, factor = list[int](), 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def state_shardings(state: Any, mesh: Mesh, shard: str) -> Any:
    """A NamedSharding for every leaf of an (abstract) state."""
    return jax.tree.map(lambda leaf: leaf_sharding(leaf.shape, leaf.dtype.itemsize, mesh, shard), state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are split over all devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def gathered(weights: jax.Array) -> jax.Array:
    """`weights` whole on every device, where a mesh is visible: for the place where a sharded weight is used.

    Left to itself the partitioner may move activations instead, which are larger. Without fsdp this does nothing.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return weights
    return jax.lax.with_sharding_constraint(weights, PartitionSpec())


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered_as(weights: jax.Array, dtype: Any) -> jax.Array:
    """`weights` rounded to `dtype` and gathered so, then in their own dtype again; their gradient is not rounded.

    In bfloat16 half the bytes travel, and what is added up from many uses, chunk by chunk, stays exact.
    """
    return gathered(weights.astype(dtype)).astype(weights.dtype)


def _backward(dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (gathered(gradient),)  # whole until all uses are added up: else it is reduced in every chunk


gathered_as.defvjp(lambda weights, dtype: (gathered_as(weights, dtype), None), _backward)


def bytes_per_device(state: Any) -> int:
    """Bytes of an (abstract) state that one device holds."""
    leaves = jax.tree.leaves(state)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
