"""Adoption against its definition in NumPy, on shards too; and a swarm of one that trains as if it were alone."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuswarm.swarm.core.arithmetic.adopt import add, mix
from tpuswarm.swarm.core.arithmetic.merge import Contribution
from tpuswarm.swarm.core.arithmetic.outer import Outer, commit

f32 = np.float32


def defined(now: np.ndarray, new: np.ndarray, reference: np.ndarray, keep: float | None = None) -> np.ndarray:
    """Element by element, float32; keep: of a mix, a power of 2, whose products are exact."""
    out = np.empty_like(now)
    for at in np.ndindex(now.shape):
        n, w, r = now[at], new[at], reference[at]
        if w.tobytes() == r.tobytes():
            out[at] = n
        elif n.tobytes() == r.tobytes():
            out[at] = w
        else:
            out[at] = n + (w - r) if keep is None else w + f32(keep) * (n - w)
    return out


def three(seed: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """now, new and reference, equal in places, with zeros of both signs."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((3, *shape)).astype(f32)
    values = np.where(
        random.random(values.shape) < 0.2, random.choice(np.array([0.0, -0.0], f32), values.shape), values
    )
    for one, other in [(0, 2), (1, 2), (0, 1)]:
        values[one] = np.where(random.random(shape) < 0.2, values[other], values[one])
    return list(values)


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0.0, 0.125, 0.5]))
def test_elements_are_as_defined(seed, keep):
    trees = [{"a": a, "b": [b]} for a, b in zip(three(seed, (7, 5)), three(seed + 1, ()), strict=True)]
    want = jax.tree.map(lambda *each: defined(*each, keep), *trees)
    got = add(*trees) if keep is None else mix(*trees, keep)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert [x.tobytes() for x in map(np.asarray, jax.tree.leaves(got))] == [x.tobytes() for x in jax.tree.leaves(want)]


def test_zeros_of_different_signs_are_different():
    plus, minus, one = np.zeros(1, f32), -np.zeros(1, f32), np.ones(1, f32)
    for adopt in add, lambda *each: mix(*each, 0.5):
        assert np.signbit(adopt(minus, plus, plus))[0]  # untouched
        assert np.signbit(adopt(plus, minus, plus))[0]  # takes the new one
        assert not np.signbit(adopt(minus, plus, minus))[0]
    assert add(one, plus, minus)[0] == 1 and mix(one, plus, minus, 0.5)[0] == 0.5


@given(st.integers(0, 2**32 - 1), st.floats(0, 1, width=32))
def test_a_mix_lies_between_what_a_member_has_and_what_is_published(seed, keep):
    """And members that have the same stay together, whatever they keep."""
    now, new, snapshot = three(seed, (40,))
    got = np.asarray(mix(now.copy(), new, snapshot, f32(keep)))
    low, high = np.minimum(now, new), np.maximum(now, new)
    apart = np.spacing(np.abs(high) + np.abs(low))
    assert (low - apart <= got).all() and (got <= high + apart).all()
    assert np.array_equal(np.asarray(mix(new.copy(), new, snapshot, f32(keep))), new)


def test_shards_stay_where_they_are(devices):
    sharding = NamedSharding(Mesh(np.asarray(devices), ("data",)), PartitionSpec("data"))
    host = three(0, (16, 4))
    for keep in None, 0.5:
        now, new, reference = jax.device_put(host, sharding)
        got = add(now, new, reference) if keep is None else mix(now, new, reference, keep)
        assert got.sharding == sharding and now.is_deleted()
        assert np.asarray(got).tobytes() == defined(*host, keep).tobytes()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("fragments", [1, 4])
def test_a_swarm_of_one_trains_as_if_alone_bit_for_bit(steps, overlap, fragments):
    """`average`, no quantization: any cycle length, any overlap, any number of fragments."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((6 * (steps + overlap), 400)).astype(f32)
    alone = now = random.standard_normal(400).astype(f32)
    published = [part.copy() for part in np.split(now, fragments)]

    def trained(theta: np.ndarray, row: np.ndarray) -> np.ndarray:
        return theta - f32(0.05) * np.sin(theta * row)

    for cycle in np.split(rows, 6):
        snapshot = now
        for at, row in enumerate(cycle):
            alone, now = trained(alone, row), trained(now, row)
            if at == steps - 1:
                snapshot = now
        for theta, s in zip(published, np.split(snapshot, fragments), strict=True):
            commit(theta, None, [Contribution(1.0, 1.0, theta, s)], Outer("average"), 1.0, 1.0, theta, None)
        assert np.concatenate(published).tobytes() == snapshot.tobytes()
        now = np.asarray(mix(now, np.concatenate(published), snapshot, overlap / (steps + overlap)))
        assert now.tobytes() == alone.tobytes()
