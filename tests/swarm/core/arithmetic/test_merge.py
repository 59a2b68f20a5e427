"""Merging contributions: against float64, and bit for bit where the bits are promised."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.swarm.core.arithmetic import merge
from tpuswarm.swarm.core.arithmetic.merge import Contribution, average, update
from tpuswarm.swarm.core.arithmetic.quantize import BLOCK, Quantized, decode, encode

seeds = st.integers(0, 2**32 - 1)
f32 = np.float32


def state(random: np.random.Generator, size: int) -> np.ndarray:
    """Standard normal, with some zeros of both signs."""
    values = np.where(random.random(size) < 0.1, random.choice([0.0, -0.0], size), random.standard_normal(size))
    return values.astype(f32)


def random_round(seed: int, size: int, count: int, bits: tuple[int | None, ...] = (None, 8, 4)):
    """Return theta and contributions: plain and quantized, with fresh and stale bases, clipped and not."""
    random = np.random.default_rng(seed)
    theta = state(random, size)
    weights = random.dirichlet(np.ones(count))
    contributions = []
    for weight in weights:
        base = theta if random.random() < 0.5 else theta + (0.01 * state(random, size))
        s = np.where(random.random(size) < 0.1, base, base - f32(0.1) * state(random, size)).astype(f32)
        chosen = random.choice(np.array(bits, object))
        payload = s if chosen is None else Quantized(*encode(base - s, chosen), chosen)
        clip = 1.0 if random.random() < 0.5 else float(random.random())
        contributions.append(Contribution(float(weight), clip, base, payload))
    return theta, contributions


def exactly(theta: np.ndarray, contributions: list[Contribution]) -> tuple[np.ndarray, np.ndarray]:
    """Compute average and update in float64, from their definitions."""
    mean, u = np.zeros(theta.size), np.zeros(theta.size)
    for contribution in contributions:
        base, payload = contribution.base.astype(np.float64), contribution.payload
        if isinstance(payload, Quantized):
            s = base - decode(payload.codes, payload.scales, theta.size, payload.bits)
        else:
            s = payload.astype(np.float64)
        s = base + contribution.clip * (s - base)
        mean += contribution.weight * (s + (theta.astype(np.float64) - base))
        u += contribution.weight * (base - s)
    return mean, u


def merged(theta: np.ndarray, contributions: list[Contribution]) -> tuple[np.ndarray, np.ndarray]:
    mean, u = np.full_like(theta, np.nan), np.full_like(theta, np.nan)
    average(theta, contributions, mean)
    update(contributions, u)
    return mean, u


@given(seeds, st.sampled_from([0, 1, 300, 1000]), st.integers(1, 5))
def test_sums_are_as_defined(seed, size, count):
    theta, contributions = random_round(seed, size, count)
    for got, want in zip(merged(theta, contributions), exactly(theta, contributions), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=20 * 2.0**-24)


@given(seeds)
def test_snapshot_of_a_single_member_comes_back_bit_for_bit(seed):
    random = np.random.default_rng(seed)
    theta, s = state(random, 700), state(random, 700)
    out = np.empty_like(theta)
    average(theta, [Contribution(1.0, 1.0, theta.copy(), s)], out)
    assert out.tobytes() == s.tobytes()


@given(seeds, st.integers(1, 4), st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK]))
def test_chunk_size_changes_no_bit(seed, count, chunk):
    theta, contributions = random_round(seed, 1000, count)
    whole = merged(theta, contributions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "CHUNK", chunk)
        parts = merged(theta, contributions)
    assert [array.tobytes() for array in parts] == [array.tobytes() for array in whole]
    average(theta, contributions, theta)  # in place, over a base that may be the same array
    assert theta.tobytes() == whole[0].tobytes()


def test_signs_of_zeros_are_exact():
    minus, out = np.full(3, -0.0, f32), np.empty(3, f32)
    average(minus, [Contribution(0.5, 1.0, minus, minus)] * 2, out)
    assert np.signbit(out).all()  # the sum starts with its first term, not with 0.0
    average(-minus, [Contribution(1.0, 1.0, minus, minus)], out)
    assert not np.signbit(out).any()  # the base differs from theta: -0.0 + (0.0 - -0.0)


def test_quantized_delta_is_applied_exactly():
    """Otherwise error feedback would not add up: A - (A - d) is not d."""
    random = np.random.default_rng(0)
    base, delta = state(random, 1000), f32(1e-3) * state(random, 1000)
    payload = Quantized(*encode(delta, 8), 8)
    out = np.empty_like(base)
    update([Contribution(1.0, 1.0, base, payload)], out)
    assert np.array_equal(out, decode(payload.codes, payload.scales, 1000, 8))
    average(base, [Contribution(1.0, 1.0, base, payload)], out)
    assert np.array_equal(out, base - decode(payload.codes, payload.scales, 1000, 8))
