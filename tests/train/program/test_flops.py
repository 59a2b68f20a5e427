import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec

from tests.train import toy
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import loss
from tpuswarm.train.program.flops import model_flops, stated_flops
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.program.underfilled import underfilled
from tpuswarm.train.recipe import Options

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))
PRODUCT = 2 * 8 * 16 * 16


def count(function, *args):
    return model_flops(jax.jit(function).trace(*args).jaxpr)


def step_flops(recipe, batch, **options):
    program = recipe.program(Options(**options))
    state = jax.eval_shape(program.init, jax.random.key(0))
    return count(program.step, state, program.batch_spec(batch), toy.clock())


def analytic(recipe, batch):
    """Weights of matmuls, twice forward and four times backward; scores and values over the whole square.

    Source: Chowdhery et al. 2022, appendix B; a layer's weights are 3, 1, 4 and 4 times width squared.
    """
    c = recipe.config
    weights = c.layers * 12 * c.width**2 + c.padded_vocab * c.width
    return batch * c.context * (6 * weights + 12 * c.layers * c.width * c.context)


@pytest.mark.parametrize(
    ("size", "options"), [("1558m", {"loop": "scan", "remat": "full"}), ("124m", {"loop": "unroll"})]
)
def test_flops_of_gpt2_are_those_of_the_formula(size, options):
    recipe = GPT2(size=size, data="fake")
    found = step_flops(recipe, 8, **options)
    assert found.total == analytic(recipe, 8) and not found.unknown


@pytest.mark.parametrize(
    ("chunks", "options"),
    [
        (8, {"remat": "dots", "loop": "unroll"}),
        (1, {"accumulate": 4}),
        (8, {"remat": "full", "accumulate": 4, "attention": "splash"}),
    ],
)
def test_flops_do_not_depend_on_how_a_step_runs(chunks, options, monkeypatch):
    recipe = GPT2(data="fake", layers=2, heads=2, width=64, context=256, vocab=300)
    rows = 8 // options.get("accumulate", 1)
    monkeypatch.setattr(loss, "CHUNK_BYTES", rows * 256 * 384 * 4 // chunks)
    assert loss.chunk_count(rows, 256, 384) == chunks
    found = step_flops(recipe, 8, **options)
    assert not found.unknown and any(product.kind == "attention" for product in found.products) == (
        "attention" in options
    )
    assert found.total == pytest.approx(analytic(recipe, 8), rel=1e-3)  # splash has row sums as products


def convolutions(params, batch):
    """Strided, padded, dilated, grouped and transposed."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(batch, params[0], (2, 2), ((3, 2), (1, 1)), dimension_numbers=numbers)
    x = jax.lax.conv_general_dilated(
        jnp.tanh(x), params[1], (1, 1), "SAME", rhs_dilation=(2, 2), feature_group_count=4, dimension_numbers=numbers
    )
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
def test_flops_without_loops_are_those_that_xla_counts(model, params, batch):
    """Elementwise work is the difference."""
    params = [jnp.zeros(shape) for shape in params]
    gradient = jax.jit(jax.grad(model))
    expected = gradient.lower(params, jnp.zeros(batch)).cost_analysis()["flops"]
    assert model_flops(gradient.trace(params, jnp.zeros(batch)).jaxpr).total == pytest.approx(expected, rel=0.01)


def test_recomputation_does_not_count_in_second_derivatives():
    """A penalty on the input's gradient, as StyleGAN2's R1, with and without a checkpoint."""

    def network(w, x):
        return (jnp.tanh(jnp.einsum("bd,de->be", x, w)) @ w).sum()

    def penalised(function):
        def loss(w, x):
            value, slope = jax.value_and_grad(function, 1)(w, x)
            return value + jnp.square(slope).sum()

        return jax.value_and_grad(loss)

    assert count(penalised(jax.checkpoint(network)), W, X).total == count(penalised(network), W, X).total


def nested_loops(x, w):
    def inner(x, _):
        return x @ w, None

    return jax.lax.scan(lambda x, _: (jax.lax.scan(inner, x, length=3)[0], None), x, length=5)[0]


def branches(x, w):
    return jax.lax.switch(1, [lambda x: x, lambda x: x @ w @ w, lambda x: x @ w], x)


def shards(x, w):
    rows = PartitionSpec("data")
    mesh = make_mesh(jax.devices())
    return jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)(x, w)


def experts(x, w):
    def grouped(w, x):
        return jax.lax.ragged_dot(x, w, jnp.array([3, 0, 5])).sum()

    return jax.grad(grouped, (0, 1))(jnp.stack([w] * 3), x)


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (nested_loops, 15),
        (branches, 2),  # the longest
        (shards, 1),
        (experts, 2),  # the two gradients; the sum needs no forward product
        (lambda x, w: (x @ w, x @ w @ w)[0], 1),  # unused results are not computed
    ],
)
def test_loops_branches_shards_and_experts_count_what_is_computed(function, products):
    assert count(function, X, W).total == products * PRODUCT


def test_operations_that_cannot_be_counted_are_named_with_their_line():
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


def test_stated_flops_count_for_a_product_and_each_of_its_gradients():
    def model(x, w):
        with stated_flops(7):
            y = jax.lax.dot(x, w)
        return jnp.square(y @ jnp.ones((16, 2))).sum()

    def conditional(x, w):
        return jax.lax.cond(x[0, 0] > 0, model, lambda x, w: x.sum(), x, w)

    rest = 2 * 8 * 16 * 2
    for function, total in (
        (model, 7 + rest),
        (conditional, 7 + rest),
        (jax.value_and_grad(model, (0, 1)), 3 * 7 + 2 * rest),
        (jax.value_and_grad(jax.checkpoint(model), (0, 1)), 3 * 7 + 2 * rest),
    ):
        assert count(function, X, W).total == total


def planted(x, narrow, wide):
    """A library function, which JAX traces once, called from two lines."""
    h = jnp.tanh(jnp.einsum("ab,bc->ac", x, narrow))
    return jnp.square(jnp.einsum("ab,bc->ac", h, wide)).mean()


def check(width, batch, unit=128, devices=1):
    shapes = [(batch * devices, 512), (512, width), (width, 512)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    flops = model_flops(jax.jit(jax.grad(planted, (1, 2))).trace(*args).jaxpr)
    return underfilled(flops, unit, batch * devices, devices)


@pytest.mark.parametrize(("width", "batch", "unit"), [(256, 128, 128), (256, 512, 256), (130, 1024, 256)])
def test_tiles_filled_by_more_than_half_are_not_reported(width, batch, unit):
    assert not check(width, batch, unit)


@pytest.mark.parametrize(
    ("width", "batch", "unit", "devices", "fill"),
    [(64, 1024, 128, 1, 0.5), (32, 1024, 128, 1, 0.25), (128, 1024, 256, 1, 0.5), (256, 32, 128, 8, 0.25)],
)
def test_narrow_layer_or_batch_of_a_device_is_reported_with_its_lines(width, batch, unit, devices, fill):
    found, line, size = check(width, batch, unit, devices), planted.__code__.co_firstlineno, min(width, batch)
    assert {str(finding.place) for finding in found} == {f"{__file__}:{line + 2}", f"{__file__}:{line + 3}"}
    assert all(finding.size == size and finding.fill == fill for finding in found)
    assert sum(finding.waste for finding in found) == pytest.approx(1 - fill)


def test_small_products_are_not_reported():
    def both(x, large, small):
        return x @ large @ large, small @ small, jnp.vdot(x, x)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 512), (512, 512), (32, 32))]
    assert not underfilled(model_flops(jax.jit(both).trace(*args).jaxpr), 128, 512, 1)


@pytest.mark.parametrize(("form", "unit", "expected"), [("xla", 128, []), ("splash", 256, [(64, 0.25)])])
def test_heads_of_gpt2_are_narrow_only_in_a_large_unit(form, unit, expected):
    """In one of 128 they waste less than a fifth of its time."""
    found = underfilled(step_flops(GPT2(size="124m", data="fake"), 8, attention=form, loop="scan"), unit, 8, 1)
    assert [(narrow.size, round(narrow.fill, 2)) for narrow in found] == expected
