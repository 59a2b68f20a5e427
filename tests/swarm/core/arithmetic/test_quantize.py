"""Quantization: nearest codes, exact error feedback, the same bits from NumPy and from JAX."""

from fractions import Fraction
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuswarm.swarm.core.arithmetic.quantize import BLOCK_SIZE, MIN_SCALE, decode, encode, feedback

all_bits = pytest.mark.parametrize("bits", [2, 4, 8])
seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([0, 256, 1000])  # few, because each is compiled


def varied(seed: int, size: int) -> np.ndarray:
    """Numbers of many magnitudes, block by block too, with zeros of both signs and subnormal numbers."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(size) * 10.0 ** random.uniform(-12, 6, size)
    x *= np.repeat(10.0 ** random.uniform(-30, 6, size // BLOCK_SIZE + 1), BLOCK_SIZE)[:size]
    return np.where(random.random(size) < 0.1, random.choice([0.0, -0.0, 1e-40, 2.0], size), x).astype(np.float32)


@partial(jax.jit, static_argnames="bits")
def fused(x, bits):
    codes, scales = encode(x, bits)
    return codes, scales, decode(codes, scales, x.size, bits), feedback(x, codes, scales, bits)


@partial(jax.jit, static_argnames="bits")
def rebuilt(base, codes, scales, bits):
    return base - decode(codes, scales, base.size, bits)


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@all_bits
@given(seed=seeds, size=st.integers(0, 700))
@settings(max_examples=25)
def test_codes_are_the_nearest_of_a_16_bit_scale(bits, seed, size):
    x = varied(seed, size)
    codes, scales = encode(x, bits)
    top, width = 2 ** (bits - 1) - 1, BLOCK_SIZE * bits // 8
    assert codes.shape == (-(-size // BLOCK_SIZE), width) and codes.dtype == np.uint8 and scales.dtype == np.float32
    decoded = decode(codes, scales, size, bits)
    for block, scale in enumerate(scales.tolist()):
        here = [Fraction(float(value)) for value in x[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE]]
        largest = max(map(abs, here))
        if largest < top * Fraction(float(MIN_SCALE)):
            assert scale == 0
            continue
        assert (np.float32(scale).view(np.uint32) & 0xFF) == 0
        assert largest / top * (1 - Fraction(1, 2**15)) <= Fraction(scale) <= largest / top * (1 + Fraction(1, 2**23))
        for at, value in enumerate(here):
            stored = int(codes[block, at % width]) >> (at // width * bits) & (2**bits - 1)
            code = stored - top
            assert abs(code) <= top
            # A quotient is rounded to float32 before it is rounded to a code.
            rounding = abs(code) * Fraction(1, 2**23) + Fraction(1, 2**8)
            assert abs(value / Fraction(scale) - code) <= Fraction(1, 2) + rounding
            assert Fraction(float(decoded[block * BLOCK_SIZE + at])) == code * Fraction(scale)


@all_bits
@given(seed=seeds, size=sizes)
@settings(max_examples=25)
def test_feedback_is_exact_and_the_compiler_changes_no_bit(bits, seed, size):
    x = varied(seed, size)
    codes, scales, decoded, rest = map(np.asarray, fused(x, bits))
    assert same_bits(decoded, decode(codes, scales, size, bits))
    assert same_bits(rest, feedback(x, codes, scales, bits))
    assert same_bits(rest, x - decoded)
    # Two float32 whose float64 sum is a float32 are that sum's exact parts.
    assert np.array_equal(decoded.astype(np.float64) + rest, x)
    base = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    assert same_bits(rebuilt(base, codes, scales, bits), base - decode(codes, scales, size, bits))


def test_other_numbers_of_bits_are_refused():
    with pytest.raises(ValueError, match="2, 4 or 8 bits, not 3"):
        encode(np.zeros(3, np.float32), 3)
