"""Merging: against float64, and bit for bit where the bits are promised."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuswarm.swarm.core.arithmetic import merge
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.arithmetic.merge import Contribution, average, update
from tpuswarm.swarm.core.arithmetic.quantize import BLOCK, Quantized, decode, encode
from tpuswarm.swarm.simulation import twins

seeds = st.integers(0, 2**32 - 1)
f32 = np.float32


def state(random: np.random.Generator, size: int) -> np.ndarray:
    """Standard normal, some zeros of both signs."""
    return np.where(random.random(size) < 0.1, random.choice([0.0, -0.0], size), random.standard_normal(size)).astype(
        f32
    )


def round_of(seed: int, size: int, count: int, bits: tuple[int | None, ...] = (None, 8, 4)):
    """theta and contributions: plain and quantized, fresh and stale bases, clipped and not."""
    random = np.random.default_rng(seed)
    theta = state(random, size)
    weights = random.dirichlet(np.ones(count))
    contributions = []
    for weight in weights:
        base = theta if random.random() < 0.5 else theta + (0.01 * state(random, size))
        s = np.where(random.random(size) < 0.1, base, base - f32(0.1) * state(random, size)).astype(f32)
        how = random.choice(np.array(bits, object))
        payload = s if how is None else Quantized(*encode(base - s, how), how)
        clip = 1.0 if random.random() < 0.5 else float(random.random())
        contributions.append(Contribution(float(weight), clip, base, payload))
    return theta, contributions


def exactly(theta: np.ndarray, contributions: list[Contribution]) -> tuple[np.ndarray, np.ndarray]:
    """average and update in float64, from their definitions."""
    mean, u = np.zeros(theta.size), np.zeros(theta.size)
    for each in contributions:
        base = each.base.astype(np.float64)
        if isinstance(each.payload, Quantized):
            s = base - decode(each.payload.codes, each.payload.scales, theta.size, each.payload.bits)
        else:
            s = each.payload.astype(np.float64)
        s = base + each.clip * (s - base)
        mean += each.weight * (s + (theta.astype(np.float64) - base))
        u += each.weight * (base - s)
    return mean, u


def merged(theta: np.ndarray, contributions: list[Contribution]) -> tuple[np.ndarray, np.ndarray]:
    mean, u = np.full_like(theta, np.nan), np.full_like(theta, np.nan)
    average(theta, contributions, mean)
    update(contributions, u)
    return mean, u


@given(seeds, st.sampled_from([0, 1, 300, 1000]), st.integers(1, 5))
def test_sums_are_those_of_the_definition(seed, size, count):
    theta, contributions = round_of(seed, size, count)
    for got, want in zip(merged(theta, contributions), exactly(theta, contributions), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=20 * 2.0**-24)


@given(seeds)
def test_a_swarm_of_one_gets_its_snapshot_back_bit_for_bit(seed):
    random = np.random.default_rng(seed)
    theta, s = state(random, 700), state(random, 700)
    out = np.empty_like(theta)
    average(theta, [Contribution(1.0, 1.0, theta.copy(), s)], out)
    assert out.tobytes() == s.tobytes()


def test_a_delta_would_not_give_the_snapshot_back():
    """The control of the test above: float subtraction is not exact."""
    random = np.random.default_rng(0)
    theta, s = state(random, 10_000), state(random, 10_000)
    assert np.mean(theta - (theta - s) != s) > 0.05


@given(seeds, st.integers(1, 4), st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK]))
def test_the_size_of_a_chunk_does_not_change_a_bit(seed, count, chunk):
    theta, contributions = round_of(seed, 1000, count)
    whole = merged(theta, contributions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "CHUNK", chunk)
        parts = merged(theta, contributions)
    assert [each.tobytes() for each in parts] == [each.tobytes() for each in whole]
    average(theta, contributions, theta)  # in place, over a base that may be the same array
    assert theta.tobytes() == whole[0].tobytes()


@given(seeds, st.integers(1, 4), st.integers(2, 6))
def test_the_number_of_fragments_does_not_change_a_bit(seed, count, fragments):
    theta, contributions = round_of(seed, 1000, count, bits=(None,))
    sizes = {"a": 100, "b": 1, "c": 299, "d": 350, "e": 250}
    whole = Layout.of({path: ((size,), "float32") for path, size in sizes.items()}, 1)
    split = Layout.of({path: ((size,), "float32") for path, size in sizes.items()}, fragments)

    def parts(array):
        return split.split(whole.join([array]))

    outs = [np.empty(size, f32) for size in split.sizes], [np.empty(size, f32) for size in split.sizes]
    for at, now in enumerate(parts(theta)):
        here = [Contribution(c.weight, c.clip, parts(c.base)[at], parts(c.payload)[at]) for c in contributions]
        average(now, here, outs[0][at])
        update(here, outs[1][at])
    for got, want in zip(outs, merged(theta, contributions), strict=True):
        assert whole.split(split.join(got))[0].tobytes() == want.tobytes()


def test_memory_maps_merge_as_arrays(tmp_path):
    theta, contributions = round_of(1, 1000, 3, bits=(None,))

    def mapped(name, array):
        array.tofile(tmp_path / name)
        return np.memmap(tmp_path / name, f32, "r")

    on_disk = [
        Contribution(c.weight, c.clip, mapped(f"base{n}", c.base), mapped(f"s{n}", c.payload))
        for n, c in enumerate(contributions)
    ]
    out = np.memmap(tmp_path / "out", f32, "w+", shape=1000)
    average(mapped("theta", theta), on_disk, out)
    out.flush()
    assert (tmp_path / "out").read_bytes() == merged(theta, contributions)[0].tobytes()


def test_the_sum_starts_with_its_first_term():
    zeros = np.full(3, -0.0, f32)
    out = np.empty(3, f32)
    average(zeros, [Contribution(0.5, 1.0, zeros, zeros)] * 2, out)
    assert np.signbit(out).all()


def test_zeros_of_different_signs_are_different_bases():
    theta, base, s = np.array([0.0], f32), np.array([-0.0], f32), np.array([-0.0], f32)
    out = np.empty(1, f32)
    average(theta, [Contribution(1.0, 1.0, base, s)], out)
    assert not np.signbit(out[0])  # -0.0 + (0.0 - -0.0)


def test_a_quantized_delta_is_applied_as_it_was_sent():
    """Otherwise error feedback would not telescope: A - (A - d) is not d."""
    random = np.random.default_rng(0)
    base, delta = state(random, 1000), f32(1e-3) * state(random, 1000)
    payload = Quantized(*encode(delta, 8), 8)
    out = np.empty_like(base)
    update([Contribution(1.0, 1.0, base, payload)], out)
    assert np.array_equal(out, decode(payload.codes, payload.scales, 1000, 8))
    average(base, [Contribution(1.0, 1.0, base, payload)], out)
    assert np.array_equal(out, base - decode(payload.codes, payload.scales, 1000, 8))


def test_members_of_one_step_of_sgd_average_to_the_step_on_all_rows():
    random = np.random.default_rng(0)
    theta, gradients = state(random, 500), [state(random, 500) for _ in range(4)]
    out = np.empty_like(theta)
    average(theta, [Contribution(0.25, 1.0, theta, theta - f32(0.1) * gradient) for gradient in gradients], out)
    np.testing.assert_allclose(out, theta - 0.1 * np.mean(gradients, 0, np.float64), rtol=0, atol=1e-6)


@given(seeds, st.integers(1, 4))
@settings(max_examples=20)
def test_the_twins_agree_up_to_rounding(seed, count):
    theta, contributions = round_of(seed, 300, count, bits=(None,))
    snapshots, bases = (np.stack([getattr(c, name) for c in contributions]) for name in ("payload", "base"))
    weights, clips = (np.array([getattr(c, name) for c in contributions], f32) for name in ("weight", "clip"))
    mean, u = merged(theta, contributions)
    np.testing.assert_allclose(twins.average(theta, snapshots, bases, weights, clips), mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(twins.update(snapshots, bases, weights, clips), u, rtol=0, atol=1e-6)


def test_a_member_of_weight_0_takes_no_part_in_the_twins():
    theta = np.ones(3, f32)
    snapshots, bases = np.array([[2, 2, 2], [np.nan, np.inf, 0]], f32), np.ones((2, 3), f32)
    weights, clips = np.array([1, 0], f32), np.ones(2, f32)
    assert np.array_equal(twins.average(theta, snapshots, bases, weights, clips), [2, 2, 2])
    assert np.array_equal(twins.update(snapshots, bases, weights, clips), [-1, -1, -1])
