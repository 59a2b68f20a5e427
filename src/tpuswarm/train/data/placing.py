"""Copy arrays to the devices of one or several hosts, and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from tpuswarm.train.data.arrays import narrow
from tpuswarm.train.recipe import Batch

HOST_AXIS = "host"
"""The mesh axis of `within_host_sharding`, over which nothing is divided."""


def place_array(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Copy an array that every host has to the devices; no host waits for another."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_batch(read: Callable[[int, int], Mapping[str, np.ndarray]], size: int, sharding: Sharding) -> Batch:
    """Return a batch of `size` rows on the devices; each host reads its own rows with `read(first, count)`.

    CPU devices may share memory with the arrays, so nobody may change them. Raise InputError, naming the array, for a
    number that 32 bits cannot hold.
    """
    own = sharding.addressable_devices_indices_map((size,)).values()
    bounds = [index[0].indices(size)[:2] for index in own if index is not None]
    first, last = min(start for start, _ in bounds), max(stop for _, stop in bounds)
    rows = narrow_rows(read(first, last - first))
    if sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)

    def place_own(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(size)
            return array[start - first : stop - first]

        return jax.make_array_from_callback((size, *array.shape[1:]), sharding, part)

    return {name: place_own(array) for name, array in rows.items()}


def narrow_rows(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert rows to JAX's dtypes. Raise InputError like `place_batch`."""
    return {name: narrow(array, name) for name, array in rows.items()}


def within_host_sharding(sharding: Sharding) -> Sharding:
    """Divide arrays among the devices of each host alone, so that every host has the whole array.

    sharding: one of train/program/mesh.py; it is returned if every host has the whole array already.
    """
    if sharding.is_fully_addressable or sharding.is_fully_replicated:
        return sharding
    assert isinstance(sharding, NamedSharding)
    mesh = sharding.mesh
    if HOST_AXIS in mesh.axis_names:
        return sharding
    remaining = hosts = len({device.process_index for device in mesh.devices.flat})
    sizes = []
    for size in mesh.devices.shape:
        divisor = math.gcd(size, remaining)
        sizes.append(size // divisor)
        remaining //= divisor
    return NamedSharding(Mesh(mesh.devices.reshape(hosts, *sizes), (HOST_AXIS, *mesh.axis_names)), sharding.spec)


def replicate_over_hosts(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Divide arrays as `within_host_sharding` does; runs a program over all hosts if any changes."""
    shardings = [within_host_sharding(array.sharding) for array in arrays]
    if all(array.sharding == sharding for array, sharding in zip(arrays, shardings, strict=True)):
        return list(arrays)
    return jax.jit(_identity, out_shardings=shardings)(list(arrays))


def to_host(tree: Any) -> Any:
    """Copy all arrays of a tree to every host, whole."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = replicate_over_hosts(leaves)
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            shard.data.copy_to_host_async()
    return jax.tree.unflatten(structure, [_assemble(leaf) for leaf in leaves])


def _assemble(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
    return whole


def _identity(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays  # a function of the module, so that jit compiles it once
