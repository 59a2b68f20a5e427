"""Both networks of StyleGAN2 against a second implementation, and what their parts promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipes import gan_oracle as oracle
from tpuswarm.recipes.stylegan2 import discriminator, generator, layers, losses
from tpuswarm.recipes.stylegan2.config import SIZES, Config

CONFIG = Config(8, latent=6, mapping=2, channels=3, most_channels=5, group=2)
SEEDS = st.integers(0, 2**32 - 1)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def normal(*shape, seed=0):
    """The same numbers in whatever order tests run: a finite difference must not meet another kink each time."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def perturbed(params):
    """Biases and noise strengths begin at 0, where a wrong one would not be seen."""
    return jax.tree.map(lambda leaf: leaf + 0.3 * normal(*leaf.shape), params)


@pytest.fixture(scope="module")
def nets():
    keys = jax.random.split(jax.random.key(0), 2)
    return perturbed(generator.init(keys[0], CONFIG)), perturbed(discriminator.init(keys[1], CONFIG))


def double(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def test_the_generator_is_the_oracles(nets):
    z, w = normal(3, CONFIG.latent), normal(3, CONFIG.layers, CONFIG.latent)
    np.testing.assert_allclose(generator.to_w(nets[0], z), oracle.to_w(double(nets[0]), z), **CLOSE)
    made = jax.jit(lambda params, w: generator.synthesize(params, w, None, CONFIG, False))(nets[0], w)
    for picture, codes in zip(made, w, strict=True):
        np.testing.assert_allclose(picture, oracle.synthesize(double(nets[0]), codes, CONFIG.resolutions), **CLOSE)


def test_the_discriminator_is_the_oracles(nets):
    pictures = normal(4, 8, 8, 3)
    found = jax.jit(lambda params, x: discriminator.score(params, x, CONFIG, False))(nets[1], pictures)
    expected = oracle.scores(double(nets[1]), pictures, CONFIG.resolutions, CONFIG.group)
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_r1_is_the_squared_gradient_by_finite_differences(nets):
    pictures = normal(2, 8, 8, 3)
    params = double(nets[1])

    def score(x):
        return oracle.scores(params, x.astype(np.float64), CONFIG.resolutions, CONFIG.group).sum()

    value = float(losses.r1(lambda x: discriminator.score(nets[1], x, CONFIG, False), jnp.asarray(pictures)))
    slope = jax.grad(lambda x: discriminator.score(nets[1], x, CONFIG, False).sum())(pictures)
    np.testing.assert_allclose(value, np.square(slope).sum((1, 2, 3)).mean(), rtol=1e-4)
    for seed in (1, 2, 3):
        step = 1e-5 * normal(*pictures.shape, seed=seed).astype(np.float64)
        change = (score(pictures + step) - score(pictures - step)) / 2
        np.testing.assert_allclose((np.asarray(slope, np.float64) * step).sum(), change, rtol=1e-3, atol=1e-7)


def test_path_lengths_are_those_of_the_naive_generator(nets):
    w, noise = normal(1, CONFIG.layers, CONFIG.latent), normal(1, 8, 8, 3)
    params = double(nets[0])
    found = losses.path_lengths(
        lambda w: generator.synthesize(nets[0], w, None, CONFIG, False), jnp.asarray(w), jnp.asarray(noise)
    )
    slope = np.zeros(w.shape[1:])
    for at in np.ndindex(slope.shape):
        step = np.zeros(slope.shape)
        step[at] = 1e-5
        up, down = (oracle.synthesize(params, w[0] + sign * step, CONFIG.resolutions) for sign in (1, -1))
        slope[at] = ((up - down) * noise[0]).sum() / 2e-5 / 8
    np.testing.assert_allclose(found, [np.sqrt((slope**2).sum(-1).mean())], rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.floats(0.1, 10), st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2]))
def test_a_scaled_style_changes_nothing_that_is_demodulated(seed, factor, inputs, outputs, up):
    layer = {
        "w": normal(3, 3, inputs, outputs, seed=seed),
        "style": {"w": normal(6, inputs, seed=seed), "b": 1 + normal(inputs, seed=seed)},
    }
    x, w = normal(2, 4, 4, inputs, seed=seed), normal(2, 6, seed=seed)
    usual = layers.modulated(x, w, layer, False, up=up)
    stronger = layer | {"style": jax.tree.map(lambda leaf: np.float32(factor) * leaf, layer["style"])}
    np.testing.assert_allclose(layers.modulated(x, w, stronger, False, up=up), usual, rtol=2e-3, atol=2e-3)
    plain = layers.modulated(x, w, layer, False, up=up, demodulate=False)
    scaled = layers.modulated(x, w, stronger, False, up=up, demodulate=False)
    np.testing.assert_allclose(scaled, np.float32(factor) * plain, rtol=1e-3, atol=1e-3)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4), st.integers(-4, 4))
def test_what_is_resampled_keeps_its_mean_and_follows_a_shift(seed, height, width, shift):
    x = np.zeros((1, 16, 16, 2), np.float32)
    x[:, 6 : 6 + height, 6 : 6 + width] = normal(1, height, width, 2, seed=seed)
    for resample, factor in ((layers.upsample, 2), (layers.downsample, 0.5)):
        y = np.asarray(resample(jnp.asarray(x)))
        np.testing.assert_allclose(y.sum((1, 2)), x.sum((1, 2)) * factor**2, **CLOSE)
        move = 2 * (shift // 2)
        moved = np.asarray(resample(jnp.roll(x, move, 1)))
        np.testing.assert_allclose(moved, np.roll(y, int(move * factor), 1), atol=1e-5)


def test_a_group_varies_alone():
    x = np.concatenate([np.zeros((2, 4, 4, 3)), np.array([1.0, -1.0])[:, None, None, None] * np.ones((2, 4, 4, 3))])
    found = np.asarray(discriminator.deviation(jnp.asarray(x, jnp.float32), 2))
    np.testing.assert_allclose(found, [1e-4, 1e-4, 1, 1], rtol=1e-3)


def test_truncation_draws_codes_to_their_mean():
    w, mean = jnp.asarray(normal(3, 6)), jnp.asarray(normal(6))
    np.testing.assert_allclose(generator.truncate(w, mean, 1.0), w, **CLOSE)
    np.testing.assert_allclose(generator.truncate(w, mean, 0.0), np.tile(mean, (3, 1)), **CLOSE)


@pytest.mark.parametrize(("side", "millions"), [(256, 24.8), (1024, 30.4)])
def test_the_sizes_have_the_papers_parameters(side, millions):
    """Of the generator."""
    shapes = jax.eval_shape(lambda key: generator.init(key, SIZES[side]), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6 == pytest.approx(millions, abs=0.05)
