"""Adoption of a version: against its definition in NumPy, and on shards."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuswarm.swarm.core.arithmetic.adopt import add, mix

f32 = np.float32


def defined(now: np.ndarray, new: np.ndarray, reference: np.ndarray, keep: float | None = None) -> np.ndarray:
    """Adopt element by element in float32. keep: the share of a mix, a power of 2, so that products are exact."""
    moved = now + (new - reference) if keep is None else new + f32(keep) * (now - new)
    bits = [np.asarray(array).view(np.uint32) for array in (now, new, reference)]
    moved = np.where(bits[0] == bits[2], new, moved)
    return np.where(bits[1] == bits[2], now, moved)


def arrays(seed: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return now, new and reference: equal in places, with zeros of both signs."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((3, *shape)).astype(f32)
    values = np.where(
        random.random(values.shape) < 0.2, random.choice(np.array([0.0, -0.0], f32), values.shape), values
    )
    for one, other in [(0, 2), (1, 2), (0, 1)]:
        values[one] = np.where(random.random(shape) < 0.2, values[other], values[one])
    return list(values)


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0.0, 0.125, 0.5]))
def test_adoption_is_as_defined(seed, keep):
    trees = [{"a": a, "b": [b]} for a, b in zip(arrays(seed, (7, 5)), arrays(seed + 1, ()), strict=True)]
    want = jax.tree.map(lambda *leaves: defined(*leaves, keep), *trees)
    got = add(*trees) if keep is None else mix(*trees, keep)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [x.tobytes() for x in map(np.asarray, jax.tree.leaves(got))] == [x.tobytes() for x in jax.tree.leaves(want)]


@given(st.integers(0, 2**32 - 1), st.floats(0, 1, width=32))
def test_mix_lies_between_the_own_and_the_published_value(seed, keep):
    """And members with the same value stay together, whatever their share."""
    now, new, snapshot = arrays(seed, (40,))
    got = np.asarray(mix(now.copy(), new, snapshot, f32(keep)))
    low, high = np.minimum(now, new), np.maximum(now, new)
    apart = np.spacing(np.abs(high) + np.abs(low))
    assert (low - apart <= got).all() and (got <= high + apart).all()
    assert np.array_equal(np.asarray(mix(new.copy(), new, snapshot, f32(keep))), new)


def test_shards_stay_on_their_devices(devices):
    sharding = NamedSharding(Mesh(np.asarray(devices), ("data",)), PartitionSpec("data"))
    host = arrays(0, (16, 4))
    for keep in None, 0.5:
        now, new, reference = jax.device_put(host, sharding)
        got = add(now, new, reference) if keep is None else mix(now, new, reference, keep)
        assert got.sharding == sharding and now.is_deleted()
        assert np.asarray(got).tobytes() == defined(*host, keep).tobytes()
