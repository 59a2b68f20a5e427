import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from tpuswarm import supervised
from tpuswarm.recipes.gpt2 import loss
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.flops import model_flops, stated
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock, Options


def count(function, *args):
    return model_flops(jax.jit(function).trace(*args).jaxpr)


def step_flops(recipe, batch, **options):
    program = recipe.program(Options(**options))
    state = jax.eval_shape(program.init, jax.random.key(0))
    return count(program.step, state, program.batch_spec(batch), Clock(jax.random.key(0), np.int32(0), np.float32(0)))


def analytic(recipe, batch):
    """Weights of matmuls, twice forward and four times backward; scores and values over the whole square.

    Source: Chowdhery et al. 2022, appendix B; a layer's weights are 3, 1, 4 and 4 times width squared.
    """
    c = recipe.config
    weights = c.layers * 12 * c.width**2 + c.padded_vocab * c.width
    return batch * c.context * (6 * weights + 12 * c.layers * c.width * c.context)


@pytest.mark.parametrize("size", ["124m", "1558m"])
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_gpt2_has_the_flops_of_the_formula(size, loop):
    recipe = GPT2(size=size, data="fake")
    found = step_flops(recipe, 8, loop=loop, remat="full" if loop == "scan" else "none")
    assert found.total == analytic(recipe, 8) and not found.unknown


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        (8, {}),
        (1, {"remat": "full"}),
        (8, {"remat": "dots", "loop": "unroll"}),
        (1, {"accumulate": 4}),
        (1, {"attention": "splash"}),
        (8, {"remat": "full", "accumulate": 4, "attention": "splash"}),
    ],
)
def test_how_a_step_is_run_changes_nothing(chunks, options, monkeypatch):
    """Neither recomputation nor chunks of the loss nor micro-batches nor the form of loop and attention count."""
    recipe = GPT2(data="fake", layers=2, heads=2, width=64, context=256, vocab=300)
    rows = 8 // options.get("accumulate", 1)
    monkeypatch.setattr(loss, "CHUNK_BYTES", rows * 256 * 384 * 4 // chunks)
    assert loss.chunk_count(rows, 256, 384) == chunks
    found = step_flops(recipe, 8, **options)
    assert not found.unknown and ("attention" in {each.kind for each in found.products}) == ("attention" in options)
    assert found.total == pytest.approx(analytic(recipe, 8), rel=1e-3)  # splash has row sums as products


def test_a_fitted_step_knows_its_flops_on_all_devices(devices):
    recipe = GPT2(data="fake", layers=1, heads=2, width=32, context=32)
    assert compile_step(recipe, Request(batch=4), devices[:2]).flops.total == analytic(recipe, 4)


def convolutions(params, batch):
    """Strided, padded, dilated, grouped and transposed."""
    x = jax.lax.conv_general_dilated(
        batch, params[0], (2, 2), ((3, 2), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.lax.conv_general_dilated(
        jnp.tanh(x), params[1], (1, 1), "SAME", rhs_dilation=(2, 2), feature_group_count=4,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    x = jax.lax.conv_transpose(jnp.tanh(x), params[2], (2, 2), "SAME")
    return jnp.square(x).mean()


def dense(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.square(batch).mean()


@pytest.mark.parametrize(
    ("model", "params", "batch"),
    [
        (dense, [(256, 512), (512, 300), (300, 128)], (400, 256)),
        (convolutions, [(5, 3, 24, 64), (3, 3, 16, 128), (3, 3, 128, 64)], (16, 24, 20, 24)),
    ],
)
def test_the_compiler_counts_the_same_where_it_can(model, params, batch):
    """XLA's own count, which holds without loops: elementwise work is the difference."""
    params = [jnp.zeros(shape) for shape in params]
    gradient = jax.jit(jax.grad(model))
    wanted = gradient.lower(params, jnp.zeros(batch)).cost_analysis()["flops"]
    assert model_flops(gradient.trace(params, jnp.zeros(batch)).jaxpr).total == pytest.approx(wanted, rel=0.01)


def test_recomputation_does_not_count_in_second_derivatives():
    """A penalty on the input's gradient, as StyleGAN2's R1, with and without a checkpoint."""

    def network(w, x):
        return (jnp.tanh(jnp.einsum("bd,de->be", x, w)) @ w).sum()

    def penalised(function):
        def loss(w, x):
            value, slope = jax.value_and_grad(function, 1)(w, x)
            return value + jnp.square(slope).sum()

        return jax.value_and_grad(loss)

    args = jnp.ones((16, 16)), jnp.ones((8, 16))
    assert count(penalised(jax.checkpoint(network)), *args).total == count(penalised(network), *args).total


def test_loops_branches_and_shards(devices):
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    once = 2 * 8 * 16 * 16

    def nested(x, w):
        def inner(x, _):
            return x @ w, None

        return jax.lax.scan(lambda x, _: (jax.lax.scan(inner, x, length=3)[0], None), x, length=5)[0]

    assert count(nested, x, w).total == 15 * once
    branches = [lambda x: x, lambda x: x @ w @ w, lambda x: x @ w]
    assert count(lambda i, x: jax.lax.switch(i, branches, x), 1, x).total == 2 * once
    rows = PartitionSpec("data")
    shards = jax.shard_map(
        lambda x, w: x @ w, mesh=make_mesh(devices), in_specs=(rows, PartitionSpec()), out_specs=rows
    )
    assert count(shards, x, w).total == once
    assert count(lambda x, w: (x @ w, x @ w @ w)[0], x, w).total == once  # what nobody reads is not computed
    groups = jnp.array([3, 0, 5])
    experts = jax.grad(lambda w, x: jax.lax.ragged_dot(x, w, groups).sum(), (0, 1))
    assert count(experts, jnp.ones((3, 16, 16)), x).total == 3 * once - once  # the sum's forward is not needed


def test_what_cannot_be_counted_is_named_with_its_line(devices):
    from jax.experimental import pallas

    x = jnp.ones((8, 8))

    def unknown(x):
        x = jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x @ x, x)
        x = jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x + 1, x)  # nothing in it to count
        copy = pallas.pallas_call(lambda i, o: None, out_shape=x, name="my_kernel")
        return copy(x) @ x

    found = count(unknown, x)
    first = unknown.__code__.co_firstlineno
    assert found.unknown == (
        f"a while loop with matrix products, its turns unknown ({__file__}:{first + 1})",
        f"my_kernel ({__file__}:{first + 4})",
    )
    assert found.total == 2 * 8 * 8 * 8


def test_products_are_placed_at_the_recipes_line():
    """The same library function, traced once by JAX, called from two lines."""

    def model(x):
        first = jnp.einsum("ab,bc->ac", x, x)
        return jnp.einsum("ab,bc->ac", first, x)

    line = model.__code__.co_firstlineno
    found = count(jax.grad(lambda x: model(x).sum()), jnp.ones((4, 4)))
    assert {str(each.place) for each in found.products} == {f"{__file__}:{line + 1}", f"{__file__}:{line + 2}"}


def test_an_optimizer_of_a_toy_counts_nothing():
    recipe = supervised(
        lambda key: {"w": jnp.ones((32, 8))},
        lambda params, batch, key: jnp.square(batch["x"] @ params["w"]).mean(),
        optax.adamw(1e-3),
        {"x": np.ones((64, 32), np.float32)},
    )
    assert step_flops(recipe, 16).total == 2 * 2 * 16 * 32 * 8  # forward, and the weight's gradient; none for the data


def test_a_stated_product_and_each_of_its_gradients_count_what_is_stated():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 16))

    def model(x, w):
        with stated(7):
            y = jax.lax.dot(x, w)
        return jnp.square(y @ jnp.ones((16, 2))).sum()

    rest = 2 * 4 * 16 * 2
    assert count(model, x, w).total == 7 + rest
    assert count(jax.value_and_grad(model, (0, 1)), x, w).total == 3 * 7 + 2 * rest
    assert count(jax.value_and_grad(jax.checkpoint(model), (0, 1)), x, w).total == 3 * 7 + 2 * rest

    def chosen(x, w):
        return jax.lax.cond(x[0, 0] > 0, model, lambda x, w: x.sum(), x, w)

    assert count(chosen, x, w).total == 7 + rest
