"""Single operators on arrays of many shapes and dtypes, against ATen's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuswarm.torch.ops import ATTENTION, OPS, RANDOM
from tpuswarm.train.recipe import Options

torch = pytest.importorskip("torch")
aten = torch.ops.aten
DTYPES = {"float32": torch.float32, "int32": torch.int64, "bool": torch.bool}
SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)


def array(shape, dtype="float32", seed=0, strided=False):
    """Random numbers; strided: every other one of memory, with the axes in the opposite order."""
    numbers = np.random.default_rng([seed, *shape]).normal(size=shape) * 2
    found = np.asarray(numbers > 0 if dtype == "bool" else numbers).astype(dtype)
    if strided and shape:
        apart = np.zeros([2 * each for each in reversed(shape)], dtype).T[tuple(slice(None, None, 2) for _ in shape)]
        apart[...] = found
        return apart
    return found


def same(name, *args, atol=1e-5, **kwargs):
    """Whether an operator gives what ATen's gives: values, shapes, and the dtype that JAX has for torch's."""
    theirs = [torch.from_numpy(each).to(DTYPES[str(each.dtype)]) if isinstance(each, np.ndarray) else each
              for each in args]  # fmt: skip
    expected = getattr(aten, name)(*theirs, **kwargs)
    mine = [jnp.asarray(each) if isinstance(each, np.ndarray) else each for each in args]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if name in ATTENTION:
            found = ATTENTION[name](None, Options(), *mine, **kwargs)
        else:
            found = RANDOM[name](None, *mine, **kwargs) if name in RANDOM else OPS[name](*mine, **kwargs)
    pairs = zip(found, expected, strict=False) if isinstance(expected, (tuple, list)) else [(found, expected)]
    for one, other in pairs:
        if one is None:
            continue
        one, other = np.asarray(one), other.numpy()
        assert one.shape == other.shape, name
        assert one.dtype == {"float64": "float32", "int64": "int32"}.get(str(other.dtype), str(other.dtype)), name
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=atol, err_msg=name)


UNARY = [
    "abs", "neg", "exp", "expm1", "sin", "cos", "tanh", "sigmoid", "erf", "floor", "ceil", "trunc", "sign", "relu",
    "gelu", "silu", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "mish", "atan", "asinh",
    "isnan", "round", "clone", "logical_not",
]  # fmt: skip
OF_WHOLE_NUMBERS = [
    "abs", "neg", "exp", "expm1", "sin", "cos", "tanh", "sigmoid", "erf", "floor", "ceil", "trunc", "sign", "relu",
    "atan", "asinh", "isnan", "round", "clone", "logical_not", "hardtanh",
]  # fmt: skip
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"]
REDUCED = ["sum", "mean", "amax", "amin", "any", "var", "logsumexp", "linalg_vector_norm"]


@settings(max_examples=20)
@given(st.sampled_from(UNARY), SHAPES, st.booleans())
def test_of_each_element(name, shape, strided):
    same(name, array(shape, seed=1, strided=strided))


@settings(max_examples=20)
@given(st.sampled_from(OF_WHOLE_NUMBERS), SHAPES, st.sampled_from(["int32", "bool"]))
def test_of_whole_numbers(name, shape, dtype):
    """Whole numbers stay what they are, or become float32, as in torch."""
    if name in ("abs", "neg", "sign", "floor", "ceil", "trunc", "round", "relu", "hardtanh"):
        dtype = "int32"
    same(name, array(shape, dtype, 1))


@settings(max_examples=30)
@given(st.sampled_from(BINARY), SHAPES, st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES)), st.data())
def test_of_two(name, shape, one, other, data):
    """Of one dtype or of two, with axes that are repeated, left out, or all."""
    second = data.draw(st.sampled_from([shape, shape[1:], tuple(1 for _ in shape), ()]))
    if "bool" in (one, other) and name in ("sub", "remainder", "fmod", "maximum", "minimum"):
        one = other = "float32"
    if name in ("remainder", "fmod") and "int32" in (one, other):
        one = other = "float32"  # of 0 torch raises
    if name == "div" and other != "float32":
        other = "float32"
    same(name, array(shape, one, 1, data.draw(st.booleans())), array(second, other, 2, data.draw(st.booleans())))


@settings(max_examples=20)
@given(st.sampled_from(REDUCED), st.lists(st.integers(2, 4), min_size=1, max_size=3), st.booleans(), st.data())
def test_over_axes(name, shape, keepdim, data):
    dims = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, max_size=1))
    x = array(tuple(shape), seed=3, strided=data.draw(st.booleans()))
    if name == "var":
        same(name, x, dims, correction=1, keepdim=keepdim)
    elif name == "linalg_vector_norm":
        same(name, x, 2, dims, keepdim)
    else:
        same(name, x, dims[0] if name == "any" else dims, keepdim)


@settings(max_examples=20)
@given(st.data())
def test_parts_and_places(data):
    shape = tuple(data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3)))
    x = array(shape, seed=4, strided=data.draw(st.booleans()))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    start, end = data.draw(st.integers(-6, 6)), data.draw(st.integers(-6, 2**62))
    same("slice", x, dim, start, end, data.draw(st.integers(1, 3)))
    same("select", x, dim, data.draw(st.integers(-shape[dim], shape[dim] - 1)))
    same("flip", x, [dim])
    same("cumsum", x, dim)
    same("sort", x, dim, data.draw(st.booleans()))
    same("topk", x, data.draw(st.integers(1, shape[dim])), dim, data.draw(st.booleans()))
    same("max", x, dim, data.draw(st.booleans()))
    same("argmax", x, dim, data.draw(st.booleans()))
    same("constant_pad_nd", x, [data.draw(st.integers(-1, 2)), data.draw(st.integers(0, 2))], 1.5)
    places = np.random.default_rng(0).integers(0, shape[dim], shape).astype(np.int32)
    same("gather", x, dim, places)
    same("scatter_add", x, dim, places, array(shape, seed=5), atol=1e-4)
    sizes = [1, shape[dim] - 1]
    same("split_with_sizes", x, sizes, dim)
    same("roll", x, [data.draw(st.integers(-3, 3))], [dim])


@settings(max_examples=12)
@given(st.data())
def test_convolutions_and_pools(data):
    draw = data.draw
    groups, axes = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    stride, padding, dilation = draw(st.integers(1, 2)), draw(st.integers(0, 1)), draw(st.integers(1, 2))
    kernel = draw(st.integers(1, 3))
    x = array((2, 4, *(7, 9)[:axes]), seed=6, strided=draw(st.booleans()))
    transposed = draw(st.booleans())
    w = array((4, 6 // groups, *[kernel] * axes) if transposed else (6, 4 // groups, *[kernel] * axes), seed=7)
    more = draw(st.integers(0, stride - 1)) if transposed else 0
    lists = ([stride] * axes, [padding] * axes, [dilation] * axes)
    same("convolution", x, w, array((6,), seed=8), *lists, transposed, [more] * axes, groups, atol=1e-4)
    image = array((2, 3, 7, 9), seed=9)
    ceil, pad = draw(st.booleans()), draw(st.integers(0, kernel // 2))
    same("max_pool2d_with_indices", image, [kernel], [stride], [pad], [dilation], ceil)
    same("avg_pool2d", image, [kernel], [stride], [pad], ceil, draw(st.booleans()), atol=1e-5)
    same("_adaptive_avg_pool2d", image, [draw(st.integers(1, 7)), draw(st.integers(1, 9))])
    size = [draw(st.integers(1, 12)), draw(st.integers(1, 12))]
    corners = draw(st.booleans())
    same("upsample_bilinear2d", image, size, corners, None, atol=1e-4)
    same("upsample_bicubic2d", image, size, corners, None, atol=1e-4)
    same("upsample_nearest2d", image, size, None)


@settings(max_examples=30)
@given(st.sampled_from([0, 1, 2]), st.sampled_from([0, 1, 2]), st.booleans(), st.integers(1, 6), st.integers(1, 6))
def test_pictures_at_places_of_a_grid(mode, padding, corners, height, width):
    grid = np.random.default_rng(15).uniform(-2.3, 2.3, (2, 3, 4, 2)).astype(np.float32)
    same("grid_sampler_2d", array((2, 3, height, width), seed=14), grid, mode, padding, corners, atol=1e-4)


@settings(max_examples=30)
@given(st.booleans(), st.sampled_from([None, "bool", "float32"]), st.sampled_from([1, 2]), st.data())
def test_attention(causal, mask, groups, data):
    q, k = (array((2, 4, each, 8), seed=seed) for each, seed in ((5, 10), (5 if causal else 6, 11)))
    k, v = k[:, : 4 // groups], array((2, 4 // groups, k.shape[2], 8), seed=12)
    given = None
    if mask and not causal:
        given = array(data.draw(st.sampled_from([(5, 6), (2, 1, 5, 6)])), mask, 13)
        if mask == "bool":
            given[..., 0] = True  # what may look nowhere is nothing that is asked of either
    same("scaled_dot_product_attention", q, k, v, given, 0.0, causal, enable_gqa=groups > 1)
