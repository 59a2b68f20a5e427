"""The parts of StyleGAN2's networks; tests/oracle/test_stylegan2.py compares both networks and losses with torch."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.recipes.stylegan2 import generator
from tpuswarm.recipes.stylegan2.config import SIZES, Config
from tpuswarm.recipes.stylegan2.convolution import convolve
from tpuswarm.recipes.stylegan2.fold import Form, beside, refold

CONFIG = Config(8, latent=6, mapping=2, channels=3, most_channels=5, group=2)
SEEDS = st.integers(0, 2**32 - 1)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("size", "up", "down"), [(1, 1, 1), (3, 1, 1), (3, 2, 1), (1, 1, 2), (3, 1, 2)])
@pytest.mark.parametrize("folds", [(8, 2), (2, 8)])
def test_convolution_of_folded_rows_is_the_plain_one(size, up, down, folds):
    w, x = normal(size, size, 3, 2), normal(2, 6, 16, 3)
    plain = convolve(x, w, False, up, down)
    folded, halves = (convolve(refold(x, 1, folds[0]), w, half, up, down, folds) for half in (False, True))
    np.testing.assert_allclose(refold(folded, folds[1], 1), plain, **CLOSE)
    np.testing.assert_allclose(refold(halves, folds[1], 1), plain, rtol=0.01, atol=0.02 * np.abs(plain).max())


@pytest.mark.parametrize("fold", [1, 2, 4])
def test_number_of_a_pixel_is_repeated_over_its_channels_in_every_fold(fold):
    x = normal(2, 3, 8)
    np.testing.assert_array_equal(refold(beside(x, 5, fold), fold, 1), np.repeat(x[..., None], 5, -1))


@given(st.integers(1, 600), st.integers(2, 10), st.integers(2, 10))
def test_folded_channels_fill_at_most_one_tile(channels, power, higher):
    side, larger = 2 ** min(power, higher), 2 ** max(power, higher)
    fold = Form(folds=True).fold(channels, side)
    assert side % (4 * fold) == 0 and (fold == 1 or fold * channels <= 128)
    assert 2 * fold * channels > 128 or 8 * fold > side
    assert fold <= Form(folds=True).fold(max(channels // 2, 1), larger)
    assert Form().fold(channels, side) == 1


def test_noise_falls_on_the_same_pixels_of_folded_rows():
    config = Config(16, latent=6, mapping=1, channels=12, most_channels=48, group=2)
    params = generator.init(jax.random.key(0), config)  # of noise, the strengths begin at 0
    params = jax.tree.map(lambda leaf: leaf + 0.3 * normal(*leaf.shape), params)
    w, key = normal(2, config.layers, config.latent), jax.random.key(1)
    synthesize = jax.jit(generator.synthesize, static_argnums=(3, 4))
    plain, folded = (synthesize(params, w, key, config, form) for form in (Form(), Form(folds=True)))
    np.testing.assert_allclose(folded, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("side", "millions"), [(256, 24.8), (1024, 30.4)])
def test_generators_have_the_papers_parameters(side, millions):
    shapes = jax.eval_shape(lambda key: generator.init(key, SIZES[side]), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6 == pytest.approx(millions, abs=0.05)
