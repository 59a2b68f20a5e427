"""Devices, the mesh over them, and where each array of a state lies."""

import math
from collections.abc import Sequence
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


def leaf_spec(shape: tuple[int, ...], itemsize: int, devices: int, shard: str) -> PartitionSpec:
    """Where one leaf lies: with fsdp its largest axis that `devices` divide, if it is large; else replicated."""
    large = math.prod(shape) * itemsize >= MIN_SHARDED_BYTES
    divisible = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if shard != "fsdp" or devices == 1 or not large or not divisible:
        return PartitionSpec()
    axis = max(divisible, key=lambda axis: shape[axis])
    return PartitionSpec(*[AXIS if each == axis else None for each in range(axis + 1)])


def state_shardings(state: Any, mesh: Mesh, shard: str) -> Any:
    """A NamedSharding for every leaf of an (abstract) state."""
    return jax.tree.map(
        lambda leaf: NamedSharding(mesh, leaf_spec(leaf.shape, leaf.dtype.itemsize, mesh.size, shard)), state
    )


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


def bytes_per_device(state: Any, shardings: Any) -> int:
    """Bytes of an (abstract) state that one device holds."""
    sizes = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize, state, shardings
    )
    return sum(jax.tree.leaves(sizes))
