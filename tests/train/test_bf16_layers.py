"""Gradients of layers of Flax Linen and Equinox in bfloat16, as the trainer takes them, against float32."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.recipes.test_bf16_gradients import by_leaf, in_exact_sums, long_sums, require_close, require_same
from tpuswarm import Trainer, supervised
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.recipe import Options

pytestmark = pytest.mark.slow

ROWS, PLACES, WIDTH, CLASSES = 2048, 8, 16, 10
DIGITS = np.random.default_rng(0).integers(0, CLASSES, (ROWS, PLACES)).astype(np.int32)  # 16,384 tokens
DATA = {"digits": DIGITS, "sorted": np.sort(DIGITS)}


class Linen(nn.Module):
    dtype: jnp.dtype | None = None
    dense: type[nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(CLASSES, WIDTH, dtype=self.dtype)(ids)
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        x = x + self.dense(WIDTH, dtype=self.dtype)(nn.gelu(nn.RMSNorm(dtype=self.dtype)(x)))
        x = nn.Conv(WIDTH, (3,), dtype=self.dtype)(nn.GroupNorm(2, dtype=self.dtype)(x))
        return nn.Dense(CLASSES, dtype=self.dtype)(x)


def linen(dtype, dense=nn.Dense):
    model = Linen(dtype, dense)
    return lambda key: model.init(key, DIGITS[:2]), lambda params, ids: model.apply(params, ids)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.place = (nnx.Param(rngs.params.normal((count, WIDTH))) for count in (CLASSES, PLACES))
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.dense, self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, ids):
        x = self.embed[ids] + self.place[None]
        x = x + self.attention(self.norms[0](x))
        return self.head(x + nnx.gelu(self.dense(self.norms[1](x))))


def of_nnx():
    structure, _ = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param)
    init = lambda key: nnx.to_pure_dict(nnx.split(Nnx(nnx.Rngs(key)), nnx.Param)[1])  # noqa: E731
    return init, lambda params, ids: nnx.merge(structure, params)(ids)


class Equinox(eqx.Module):
    embed: jax.Array
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key):
        one, two, three, four = jax.random.split(key, 4)
        self.embed = jax.random.normal(one, (PLACES, CLASSES, WIDTH))
        self.norm, self.attention = eqx.nn.LayerNorm(WIDTH), eqx.nn.MultiheadAttention(2, WIDTH, key=two)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, WIDTH, depth=1, activation=jax.nn.gelu, key=three)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=four)

    def __call__(self, ids):
        x = self.embed[np.arange(PLACES), ids]
        y = jax.vmap(self.norm)(x)
        return jax.vmap(self.head)(jax.vmap(self.mlp)(x + self.attention(y, y, y)))


def equinox():
    static = eqx.partition(Equinox(jax.random.key(0)), eqx.is_array)[1]
    init = lambda key: eqx.partition(Equinox(key), eqx.is_array)[0]  # noqa: E731
    return init, lambda params, ids: jax.vmap(eqx.combine(params, static))(ids)


FORMS = {
    "linen": lambda precision: linen(None),
    "linen with dtype": lambda precision: linen(jnp.bfloat16 if precision == "bf16" else None),
    "linen recomputed": lambda precision: linen(None, nn.remat(nn.Dense)),
    "nnx": lambda precision: of_nnx(),
    "equinox": lambda precision: equinox(),
}


def recipe_of(init, apply, rate):
    def loss(params, batch, key):
        logits = apply(params, batch["digits"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["sorted"]).mean()

    return supervised(init, loss, optax.sgd(rate), DATA)


@pytest.mark.parametrize("form", FORMS)
def test_each_gradient_is_close_to_that_in_float32_and_no_long_sum_is_in_bfloat16(form):
    found = {}
    for precision in ("f32", "bf16"):
        program = recipe_of(*FORMS[form](precision), 0.1).program(Options(precision=precision))
        arguments = jax.jit(program.init)(jax.random.key(0)), DATA, jax.random.key(1)
        found[precision] = by_leaf(jax.jit(program.batch_gradient)(*arguments))
    assert not list(long_sums(jax.make_jaxpr(program.batch_gradient)(*arguments).jaxpr))
    require_close(found["f32"], found["bf16"], zero=1e-6)  # a bias of keys moves nothing
    moving = {path: leaf for path, leaf in found["f32"].items() if np.abs(leaf).max() > 1e-6}
    require_same(moving, found["bf16"], by_leaf(jax.jit(in_exact_sums(program.batch_gradient))(*arguments)))


@pytest.mark.long
def test_micro_batches_and_devices_take_the_same_step(tmp_path):
    init, apply = equinox()

    def bias(devices, accumulate):
        trainer = Trainer(devices=devices, accumulate=accumulate, precision="bf16")
        run = tmp_path / f"{devices}-{accumulate}"
        result = trainer.fit(recipe_of(init, apply, 1.0), steps=1, batch=ROWS, run=run)
        return np.float64(result.state.params.head.bias)

    before = np.float64(init(jax.random.split(run_key(0))[0]).head.bias)
    alone = bias(1, 1) - before
    for devices, accumulate in (1, 4), (2, 1), (2, 4):
        np.testing.assert_allclose(bias(devices, accumulate) - before, alone, rtol=0.01, atol=1e-4)
