"""StyleGAN2's networks in all their forms; test_stylegan2_authors.py compares them with the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.recipes.stylegan2 import discriminator, generator
from tpuswarm.recipes.stylegan2.config import SIZES, Config
from tpuswarm.recipes.stylegan2.convolution import convolve, refold, spread_over_channels
from tpuswarm.recipes.stylegan2.layers import Form
from tpuswarm.recipes.stylegan2.program import path_lengths, r1_penalty

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
    np.testing.assert_array_equal(refold(spread_over_channels(x, 5, fold), fold, 1), np.repeat(x[..., None], 5, -1))


@given(st.integers(1, 600), st.integers(2, 10), st.integers(2, 10))
def test_folded_channels_fill_at_most_one_tile(channels, power, higher):
    side, larger = 2 ** min(power, higher), 2 ** max(power, higher)
    fold = Form(folds=True).fold(channels, side)
    assert side % (4 * fold) == 0 and (fold == 1 or fold * channels <= 128)
    assert 2 * fold * channels > 128 or 8 * fold > side
    assert fold <= Form(folds=True).fold(max(channels // 2, 1), larger)
    assert Form().fold(channels, side) == 1


@pytest.mark.long
def test_folded_networks_have_the_losses_and_gradients_of_plain_ones():
    """R1 and path lengths differentiate twice; noise strengths begin at 0, so all parameters are moved."""
    config = Config(16, latent=6, mapping=1, channels=3, most_channels=5, group=2)
    networks = {"generator": generator, "discriminator": discriminator}
    params = {name: network.init(jax.random.key(0), config) for name, network in networks.items()}
    params = jax.tree.map(lambda leaf: leaf + 0.3 * normal(*leaf.shape), params)
    w, pictures, noise = normal(2, config.layers, config.latent), normal(2, 16, 16, 3), normal(2, 16, 16, 3, seed=1)

    def loss(params, form):
        def synthesize(w, key=None):
            return generator.synthesize(params["generator"], w, key, config, form)

        def score(x):
            return discriminator.score(params["discriminator"], x, config, form)

        lengths_B = path_lengths(synthesize, jnp.asarray(w), jnp.asarray(noise))
        return (
            score(synthesize(w, jax.random.key(1))).mean() + r1_penalty(score, pictures) + jnp.square(lengths_B).mean()
        )

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (plain, plain_grads), (folded, folded_grads) = (gradient(params, form) for form in (Form(), Form(folds=True)))
    np.testing.assert_allclose(folded, plain, rtol=1e-4)
    for expected, found in zip(jax.tree.leaves(plain_grads), jax.tree.leaves(folded_grads), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(("side", "millions"), [(256, 24.8), (1024, 30.4)])
def test_generators_have_the_papers_parameters(side, millions):
    shapes = jax.eval_shape(lambda key: generator.init(key, SIZES[side]), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6 == pytest.approx(millions, abs=0.05)
