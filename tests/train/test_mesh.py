import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from tpuswarm.errors import InputError
from tpuswarm.train.mesh import (
    MIN_SHARDED_BYTES,
    bytes_per_device,
    leaf_spec,
    make_mesh,
    select_devices,
    state_shardings,
)


@pytest.mark.parametrize(
    ("which", "indices"),
    [("all", range(8)), ("8", range(8)), (3, range(3)), ("[5]", [5]), ([5], [5]), ("[0, 2]", [0, 2])],
)
def test_device_forms(which, indices, devices):
    assert select_devices(which, devices) == [devices[index] for index in indices]


@pytest.mark.parametrize("which", ["9", 0, "-1", "[8]", [8], [], "some", "[1,1]", "[a]", "5.5"])
def test_devices_that_are_not_there(which, devices):
    with pytest.raises(InputError, match="device"):
        select_devices(which, devices)


@given(st.lists(st.integers(1, 2048), min_size=0, max_size=3).map(tuple), st.integers(1, 8))
def test_fsdp_splits_the_largest_divisible_axis_of_large_leaves_evenly(shape, count):
    spec = leaf_spec(shape, 4, count, "fsdp")
    split = [axis for axis, name in enumerate(spec) if name]
    size = 4
    for length in shape:
        size *= length
    divisible = [length for length in shape if length % count == 0]
    if count == 1 or size < MIN_SHARDED_BYTES or not divisible:
        assert not split
    else:
        assert len(split) == 1 and shape[split[0]] == max(divisible)
    assert not any(leaf_spec(shape, 4, count, "replicate"))


def test_bytes_per_device_are_what_the_devices_hold(devices):
    mesh = make_mesh(devices)
    state = {"large": jnp.zeros((1024, 512)), "small": jnp.zeros(100)}
    for shard in ("replicate", "fsdp"):
        shardings = state_shardings(state, mesh, shard)
        assert all(isinstance(each, NamedSharding) for each in jax.tree.leaves(shardings))
        placed = jax.device_put(state, shardings)
        held = sum(leaf.addressable_shards[3].data.nbytes for leaf in jax.tree.leaves(placed))
        assert held == bytes_per_device(state, shardings)
