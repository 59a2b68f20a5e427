import itertools
import math
import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.errors import InputError
from tpuswarm.train.data.placing import within_host_sharding
from tpuswarm.train.program.mesh import (
    MIN_PART_ROWS,
    MIN_SHARDED_BYTES,
    batch_sharding,
    gathered,
    leaf_sharding,
    make_mesh,
    select_devices,
)


@pytest.mark.parametrize(
    ("which", "indices"),
    [("all", range(8)), ("8", range(8)), (3, range(3)), ("[5]", [5]), ([5], [5]), ("[0, 2]", [0, 2])],
)
def test_devices_are_selected_by_number_or_index(which, indices, devices):
    assert select_devices(which, devices) == [devices[index] for index in indices]


@pytest.mark.parametrize("which", ["9", 0, "-1", "[8]", [8], [], "some", "[1,1]", "[a]", "5.5"])
def test_missing_devices_are_refused(which, devices):
    with pytest.raises(InputError, match="device"):
        select_devices(which, devices)


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


@given(st.lists(st.integers(1, 2048), min_size=0, max_size=3).map(tuple), st.integers(1, 12))
def test_fsdp_splits_large_leaves_evenly_along_one_or_several_axes(shape, count):
    mesh = make_mesh([*map(Device, range(count))])
    sharding = leaf_sharding(shape, 4, mesh, "fsdp")
    parts = [length // part for length, part in zip(shape, sharding.shard_shape(shape), strict=True)]
    divisible = [length for length in shape if length % count == 0]
    if count == 1 or math.prod(shape) * 4 < MIN_SHARDED_BYTES:
        assert set(parts) <= {1}
    elif divisible:
        roomy = [length for length in shape[:-1] if length % count == 0 and length // count >= MIN_PART_ROWS]
        taken = max(roomy or divisible)
        assert parts[shape.index(taken)] == math.prod(parts) == count
    else:  # as many parts as possible
        splits = itertools.product(range(1, count + 1), repeat=len(shape))
        possible = [math.prod(split) for split in splits if not any(map(operator.mod, shape, split))]
        assert math.prod(parts) == max(number for number in possible if count % number == 0)
    assert leaf_sharding(shape, 4, mesh, "replicate").is_fully_replicated


@pytest.mark.parametrize(("hosts", "devices_of_host"), [(2, 4), (3, 2), (4, 3)])
def test_each_host_holds_all_parts_split_as_far_as_possible(hosts, devices_of_host):
    mesh = make_mesh([Device(number, number % hosts) for number in range(hosts * devices_of_host)])
    shape = (2**5 * 3 * 19, 2**4 * 9 * 19)
    divided = within_host_sharding(leaf_sharding(shape, 4, mesh, "fsdp"))
    parts = divided.devices_indices_map(shape)
    for host in range(hosts):
        mine = {str(index) for device, index in parts.items() if device.process_index == host}
        assert len(mine) == devices_of_host == math.prod(shape) // math.prod(divided.shard_shape(shape))


@pytest.mark.parametrize("count", [6, 8])
def test_leaf_split_along_several_axes_computes_the_same(count, devices):
    mesh = make_mesh(devices[:count])
    weights = np.random.default_rng(0).standard_normal((1026, 1028)).astype(np.float32)  # 2 · 3³ · 19 and 2² · 257
    sharding = leaf_sharding(weights.shape, 4, mesh, "fsdp")
    assert weights.size // math.prod(sharding.shard_shape(weights.shape)) == count
    rows = jax.device_put(np.ones((count, 1026), np.float32), batch_sharding(mesh))
    step = jax.jit(jax.grad(lambda w, x: jnp.sum((x @ gathered(w)) ** 2)), out_shardings=sharding)
    with jax.set_mesh(mesh):
        found = step(jax.device_put(weights, sharding), rows)
    assert found.sharding == sharding
    np.testing.assert_allclose(found, 2 * count * np.tile(weights.sum(0), (1026, 1)), rtol=1e-4, atol=1e-3)
