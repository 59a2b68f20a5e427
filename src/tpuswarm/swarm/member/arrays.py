"""Where a member's arrays cross between its host and its devices, and nowhere else."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tpuswarm.train.data import placing
from tpuswarm.train.program.mesh import AXIS, batch_sharding
from tpuswarm.train.recipe import Batch


def split_sharding(mesh: Mesh) -> NamedSharding:
    """First axes divided evenly among all devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def batch_to_devices(read: Callable[[int, int], Mapping[str, np.ndarray]], size: int, mesh: Mesh) -> Batch:
    """`size` rows of a step, divided among the devices; `read(first, count)` gives those that this host is to bring."""
    return placing.place_batch(read, size, batch_sharding(mesh))


def fragment_to_devices(fragment: np.ndarray, length: int, mesh: Mesh) -> jax.Array:
    """float32[size] as float32[length], zeros behind it, in equal parts on the devices: each byte is sent once."""

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(length)
        found = fragment[start:stop]
        missing = stop - start - len(found)
        return np.pad(found, (0, missing)) if missing else found

    return jax.make_array_from_callback((length,), split_sharding(mesh), part)


def leaf_to_devices(leaf: np.ndarray, sharding: Sharding) -> jax.Array:
    """One array of a state, to where it lies."""
    return placing.place(leaf, sharding)


def to_host(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Whole arrays on the host; all of them are under way before the first is waited for.

    With several hosts it is a program over all of them, except for arrays divided as `within_host` says.
    """
    return placing.to_host(list(arrays))


def wait(arrays: Any) -> None:
    """Until these arrays are computed."""
    jax.block_until_ready(arrays)
