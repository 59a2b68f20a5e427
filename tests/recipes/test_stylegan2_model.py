"""Both networks of StyleGAN2 against a second implementation, and what their parts promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipes import gan_oracle as oracle
from tpuswarm.recipes.stylegan2 import discriminator, export, generator, layers, losses
from tpuswarm.recipes.stylegan2.config import SIZES, Config
from tpuswarm.recipes.stylegan2.convolution import convolve
from tpuswarm.recipes.stylegan2.fold import Form, beside, refold
from tpuswarm.recipes.stylegan2.resample import upsample

CONFIG = Config(8, latent=6, mapping=2, channels=3, most_channels=5, group=2)
SEEDS = st.integers(0, 2**32 - 1)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
FORMS = pytest.mark.parametrize("form", [Form(), Form(folds=True)], ids=["plain", "folded"])


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


@FORMS
def test_the_generator_is_the_oracles(nets, form):
    z, w = normal(3, CONFIG.latent), normal(3, CONFIG.layers, CONFIG.latent)
    np.testing.assert_allclose(generator.to_w(nets[0], z), oracle.to_w(double(nets[0]), z), **CLOSE)
    made = jax.jit(lambda params, w: generator.synthesize(params, w, None, CONFIG, form))(nets[0], w)
    for picture, codes in zip(made, w, strict=True):
        np.testing.assert_allclose(picture, oracle.synthesize(double(nets[0]), codes, CONFIG.resolutions), **CLOSE)


def test_an_exported_discriminator_takes_pictures_as_torch_flattens_them(nets):
    """Its dense layer reads channels before rows and columns: the axes are NCHW, as config.json says."""
    exported = export._named("discriminator", nets[1], 1.0)
    layer = nets[1]["last"]["dense"]
    x_BxHxWxC = normal(2, 4, 4, layer["b"].size)
    theirs = x_BxHxWxC.transpose(0, 3, 1, 2).reshape(2, -1) @ exported["discriminator.last.dense.weight"].T
    np.testing.assert_allclose(
        theirs + exported["discriminator.last.dense.bias"], layers.dense(x_BxHxWxC.reshape(2, -1), layer), **CLOSE
    )


@FORMS
def test_the_discriminator_is_the_oracles(nets, form):
    pictures = normal(4, 8, 8, 3)
    found = jax.jit(lambda params, x: discriminator.score(params, x, CONFIG, form))(nets[1], pictures)
    expected = oracle.scores(double(nets[1]), pictures, CONFIG.resolutions, CONFIG.group)
    np.testing.assert_allclose(found, expected, **CLOSE)


@FORMS
def test_r1_is_the_squared_gradient_by_finite_differences(nets, form):
    pictures = normal(2, 8, 8, 3)
    params = double(nets[1])

    def score(x):
        return oracle.scores(params, x.astype(np.float64), CONFIG.resolutions, CONFIG.group).sum()

    value = float(losses.r1(lambda x: discriminator.score(nets[1], x, CONFIG, form), jnp.asarray(pictures)))
    slope = jax.grad(lambda x: discriminator.score(nets[1], x, CONFIG, form).sum())(pictures)
    np.testing.assert_allclose(value, np.square(slope).sum((1, 2, 3)).mean(), rtol=1e-4)
    for seed in (1, 2, 3):
        step = 1e-5 * normal(*pictures.shape, seed=seed).astype(np.float64)
        change = (score(pictures + step) - score(pictures - step)) / 2
        np.testing.assert_allclose((np.asarray(slope, np.float64) * step).sum(), change, rtol=1e-3, atol=1e-7)


@FORMS
def test_path_lengths_are_those_of_the_naive_generator(nets, form):
    w, noise = normal(1, CONFIG.layers, CONFIG.latent), normal(1, 8, 8, 3)
    params = double(nets[0])
    found = losses.path_lengths(
        lambda w: generator.synthesize(nets[0], w, None, CONFIG, form), jnp.asarray(w), jnp.asarray(noise)
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


def halved(x):
    return convolve(x, jnp.eye(x.shape[-1])[None, None], False, down=2)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4), st.integers(-4, 4))
def test_what_is_resampled_keeps_its_mean_and_follows_a_shift(seed, height, width, shift):
    x = np.zeros((1, 16, 16, 2), np.float32)
    x[:, 6 : 6 + height, 6 : 6 + width] = normal(1, height, width, 2, seed=seed)
    for resample, factor in ((upsample, 2), (halved, 0.5)):
        y = np.asarray(resample(jnp.asarray(x)))
        np.testing.assert_allclose(y.sum((1, 2)), x.sum((1, 2)) * factor**2, **CLOSE)
        move = 2 * (shift // 2)
        moved = np.asarray(resample(jnp.roll(x, move, 1)))
        np.testing.assert_allclose(moved, np.roll(y, int(move * factor), 1), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    SEEDS,
    st.sampled_from([(1, 1, 1), (3, 1, 1), (3, 2, 1), (1, 1, 2), (3, 1, 2)]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_a_convolution_of_folded_rows_is_the_plain_one(seed, kind, within, wanted, inputs, outputs):
    size, up, down = kind
    inside, outside = max(2**within, down), 2**wanted
    w, x = normal(size, size, inputs, outputs, seed=seed), normal(2, 6, 16, inputs, seed=seed)
    plain = convolve(x, w, False, up, down)
    folded = convolve(refold(x, 1, inside), w, False, up, down, (inside, outside))
    np.testing.assert_allclose(refold(folded, outside, 1), plain, rtol=1e-4, atol=1e-4)
    halves = convolve(refold(x, 1, inside), w, True, up, down, (inside, outside))
    np.testing.assert_allclose(refold(halves, outside, 1), plain, rtol=0.01, atol=0.02 * np.abs(plain).max())


@pytest.mark.parametrize("fold", [1, 2, 4])
def test_a_number_of_a_pixel_is_all_its_channels_wherever_it_is_held(fold):
    x = normal(2, 3, 8)
    np.testing.assert_array_equal(refold(beside(x, 5, fold), fold, 1), np.repeat(x[..., None], 5, -1))


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(2, 10), st.integers(2, 10))
def test_few_channels_fill_a_tile_and_never_two(channels, power, higher):
    side, larger = 2 ** min(power, higher), 2 ** max(power, higher)
    fold = Form(folds=True).fold(channels, side)
    assert side % (4 * fold) == 0 and (fold == 1 or fold * channels <= 128)
    assert 2 * fold * channels > 128 or 8 * fold > side
    assert fold <= Form(folds=True).fold(max(channels // 2, 1), larger)
    assert Form().fold(channels, side) == 1


def test_the_same_noise_falls_on_the_same_pixels_of_folded_rows():
    config = Config(32, latent=6, mapping=1, channels=12, most_channels=48, group=2)
    params = perturbed(generator.init(jax.random.key(0), config))
    w = normal(2, config.layers, config.latent)
    plain, folded = (
        jax.jit(lambda params, w, form=form: generator.synthesize(params, w, jax.random.key(1), config, form))(
            params, w
        )
        for form in (Form(), Form(folds=True))
    )
    np.testing.assert_allclose(folded, plain, rtol=1e-3, atol=1e-3)


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
