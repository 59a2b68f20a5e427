"""Gradients in bfloat16 against those in float32, leaf by leaf: sums over many rows lose no digits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tpuswarm.recipes.gpt2 import model
from tpuswarm.recipes.gpt2.config import Config as GPT2Config
from tpuswarm.recipes.language import loss
from tpuswarm.recipes.stylegan2 import discriminator, generator
from tpuswarm.recipes.stylegan2.config import Config as StyleGAN2Config
from tpuswarm.recipes.stylegan2.layers import Form
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program import rounding
from tpuswarm.train.recipe import Options

pytestmark = pytest.mark.slow

GPT2 = GPT2Config(layers=1, heads=2, width=32, context=256, vocab=70)
TOKENS = np.random.default_rng(0).integers(0, 70, (64, 257)).astype(np.int32)  # 16,384 tokens
STYLEGAN2 = StyleGAN2Config(32, latent=16, mapping=2, channels=16, most_channels=32, group=4)
PICTURES = 32


def gpt2(options: Options):
    params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), GPT2)

    def mean_loss(params):
        x_BxTxD = model.hidden(params, TOKENS[:, :-1], GPT2, options, None)
        return loss.mean_loss(x_BxTxD, params["wte"], TOKENS[:, 1:], GPT2.vocab)

    return mean_loss, params


def scattered(params):
    """Noise strengths and biases begin at 0, where some gradients vanish."""
    leaves, structure = jax.tree.flatten(params)
    random = np.random.default_rng(1)
    return jax.tree.unflatten(structure, [leaf + 0.1 * random.normal(size=leaf.shape).astype("f") for leaf in leaves])


def make(options: Options):
    form = Form(half=options.precision == "bf16", folds=False)
    params = scattered(generator.init(jax.random.key(0), STYLEGAN2))
    random = np.random.default_rng(2)
    w = random.normal(size=(PICTURES, STYLEGAN2.layers, STYLEGAN2.latent)).astype(np.float32)

    def synthesize(params, form):
        return generator.synthesize(params, w, jax.random.key(1), STYLEGAN2, form)

    goal = synthesize(jax.tree.map(lambda leaf: 0.5 * leaf, params), Form())  # else a noise's gradient cancels out
    return lambda params: jnp.square(synthesize(params, form) - goal).mean(), params


def score(options: Options):
    form = Form(half=options.precision == "bf16", folds=False)
    params = scattered(discriminator.init(jax.random.key(0), STYLEGAN2))
    pictures = np.random.default_rng(3).normal(size=(PICTURES, 32, 32, 3)).astype(np.float32)
    return lambda params: jax.nn.softplus(discriminator.score(params, pictures, STYLEGAN2, form)).mean(), params


def by_leaf(gradient):
    """Gradients as float64 vectors, all single numbers in one: the terms of a noise strength nearly cancel."""
    vectors, scalars = {}, []
    for path, leaf in zip(leaf_paths(gradient), jax.tree.leaves(gradient), strict=True):
        if leaf.size == 1:
            scalars.append(float(leaf.reshape(())))
        else:
            vectors[path] = np.float64(leaf).ravel()
    return vectors | ({"single numbers": np.array(scalars)} if scalars else {})


def long_sums(jaxpr):
    """Yield the sums of more than 256 bfloat16 terms that are bfloat16 themselves."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("reduce_sum", "cumsum", "reduce_window_sum", "add_any_sum"):
            taken, given = equation.invars[0].aval, equation.outvars[0].aval
            if taken.dtype == given.dtype == jnp.bfloat16 and taken.size > 256 * max(given.size, 1):
                yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from long_sums(inner)


def require_close(exact, half, zero=1e-12):
    """Compare gradients in bfloat16 with those in float32, leaf by leaf; leave out leaves of at most `zero`."""
    for path, expected in exact.items():
        if np.abs(expected).max() > zero:
            projection = expected @ half[path] / (expected @ expected)
            error = np.linalg.norm(half[path] - expected) / np.linalg.norm(expected)
            assert abs(projection - 1) < 0.02 and error < 0.05, (path, projection, error)


def in_exact_sums(function):
    """Return `function` with every sum of bfloat16 numbers, however short, computed in float32."""

    def exact(*args):
        def is_sum(equation):
            is_half = bool(equation.outvars) and equation.outvars[0].aval.dtype == jnp.bfloat16
            return is_half and equation.primitive.name in rounding.SUM_PRIMITIVES + rounding.SCATTER_PRIMITIVES

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounding, "is_long_sum", is_sum)
            return rounding.sums_in_float32(function)(*args)

    return exact


def require_same(exact, half, exact_sums):
    """Compare gradients in bfloat16 with those of exact sums: what differs from float32 is not the sums' fault."""
    for path, expected in exact.items():
        difference = np.linalg.norm(half[path] - exact_sums[path])
        assert difference <= 0.005 * np.linalg.norm(expected), (path, difference)


@pytest.mark.parametrize("build", [gpt2, *(pytest.param(build, marks=pytest.mark.long) for build in (make, score))])
def test_each_gradient_is_close_to_float32_and_no_long_sum_is_in_bfloat16(build):
    found = []
    for precision in ("f32", "bf16"):
        function, params = build(Options(precision=precision))
        found.append(by_leaf(jax.jit(jax.grad(function))(params)))
    require_close(*found)
    sums = list(long_sums(jax.make_jaxpr(jax.grad(function))(params).jaxpr))
    assert not sums, sums
    require_same(*found, by_leaf(jax.jit(in_exact_sums(jax.grad(function)))(params)))


@pytest.mark.long
def test_error_of_stylegan2s_gradients_is_noise_that_batches_average_out():
    """The terms of a noise strength nearly cancel, so that one batch shows the rounding of each term."""
    params = scattered(generator.init(jax.random.key(0), STYLEGAN2))
    others = jax.tree.map(lambda leaf: 0.5 * leaf, params)
    codes = np.random.default_rng(3).normal(size=(16, PICTURES, STYLEGAN2.layers, STYLEGAN2.latent))

    def gradients(form):
        def loss(params, w, key):
            goal = generator.synthesize(others, w, key, STYLEGAN2, Form())
            return jnp.square(generator.synthesize(params, w, key, STYLEGAN2, form) - goal).mean()

        gradient = jax.jit(jax.grad(loss))
        return [by_leaf(gradient(params, w, jax.random.key(n))) for n, w in enumerate(codes.astype(np.float32))]

    def error(exact, half):
        return np.linalg.norm(half - exact) / np.linalg.norm(exact)

    exact, half = gradients(Form()), gradients(Form(half=True))
    for path in exact[0]:
        of_batches = [(one[path], other[path]) for one, other in zip(exact, half, strict=True)]
        if max(np.abs(one).max() for one, _ in of_batches) > 1e-12:
            of_mean = error(*np.mean(of_batches, axis=0))
            is_noise = path == "single numbers"  # others keep the rounding of parameters, the same in each batch
            assert of_mean < (0.5 * np.mean([error(*pair) for pair in of_batches]) if is_noise else 0.02), path


@pytest.mark.parametrize(("highest", "halves"), [(32, {8, 16, 32}), (16, {8, 16}), (256, {32, 64, 128, 256})])
def test_half_precision_never_covers_the_4_x_4_block(highest, halves):
    resolutions = [4 << n for n in range(highest.bit_length() - 2)]
    dtype = partial(Form(half=True).dtype, highest=highest)
    assert {resolution for resolution in resolutions if dtype(resolution) == jnp.bfloat16} == halves
