"""Arrays on the devices of one or several hosts, and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from tpuswarm.train.data.arrays import narrowed
from tpuswarm.train.recipe import Batch

HOST = "host"
"""The mesh axis of `within_host`, over which nothing is divided."""


def place(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """An array that every host holds, on the devices; no program, and no host waits for another."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_batch(read: Callable[[int, int], Mapping[str, np.ndarray]], size: int, sharding: Sharding) -> Batch:
    """A batch of `size` rows, of which each host reads its own: `read(first, count)` gives rows of the batch.

    A CPU device may keep the arrays that are read as they are: nobody may change them. Raises InputError, naming the
    array, for a number that JAX's 32 bits do not hold.
    """
    mine = sharding.addressable_devices_indices_map((size,)).values()
    bounds = [index[0].indices(size)[:2] for index in mine if index is not None]
    first, last = min(start for start, _ in bounds), max(stop for _, stop in bounds)
    rows = in_jax_types(read(first, last - first))
    if sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)

    def placed(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(size)
            return array[start - first : stop - first]

        return jax.make_array_from_callback((size, *array.shape[1:]), sharding, part)

    return {name: placed(array) for name, array in rows.items()}


def in_jax_types(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rows in the dtypes that JAX gives them. Raises InputError as `place_batch` does."""
    return {name: narrowed(array, name) for name, array in rows.items()}


def within_host(sharding: Sharding) -> Sharding:
    """The same division among the devices of each host alone, so that every host holds the whole.

    Of a sharding that `train/program/mesh.py` made; where every host holds the whole already, nothing changes.
    """
    if sharding.is_fully_addressable or sharding.is_fully_replicated:
        return sharding
    assert isinstance(sharding, NamedSharding)
    mesh = sharding.mesh
    if HOST in mesh.axis_names:
        return sharding
    left = count = len({device.process_index for device in mesh.devices.flat})
    sizes = []
    for size in mesh.devices.shape:
        shared = math.gcd(size, left)
        sizes.append(size // shared)
        left //= shared
    return NamedSharding(Mesh(mesh.devices.reshape(count, *sizes), (HOST, *mesh.axis_names)), sharding.spec)


def on_every_host(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, divided as `within_host` says; a program over all hosts where they are not."""
    wanted = [within_host(array.sharding) for array in arrays]
    if all(array.sharding == sharding for array, sharding in zip(arrays, wanted, strict=True)):
        return list(arrays)
    return jax.jit(_same, out_shardings=wanted)(list(arrays))


def to_host(tree: Any) -> Any:
    """Every array of a tree whole on every host: `on_every_host`, then copied off the devices."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = on_every_host(leaves)
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            shard.data.copy_to_host_async()
    return jax.tree.unflatten(structure, [_assembled(leaf) for leaf in leaves])


def _assembled(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
    return whole


def _same(arrays: list[jax.Array]) -> list[jax.Array]:
    """A function of the module, so that jit does not compile it again."""
    return arrays
