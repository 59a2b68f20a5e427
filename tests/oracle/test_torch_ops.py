"""Single operators on arrays of several shapes and dtypes, against ATen's."""

from itertools import cycle, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuswarm.torch.ops import ATTENTION, OPS, RANDOM
from tpuswarm.train.recipe import Options

torch = pytest.importorskip("torch")
aten = torch.ops.aten
DTYPES = {"float32": torch.float32, "int32": torch.int64, "bool": torch.bool}


def array(shape, dtype="float32", seed=0, strided=False):
    """Random numbers; strided: every other one of memory, with the axes in the opposite order."""
    numbers = np.random.default_rng([seed, *shape]).normal(size=shape) * 2
    found = np.asarray(numbers > 0 if dtype == "bool" else numbers).astype(dtype)
    if strided and shape:
        apart = np.zeros([2 * size for size in reversed(shape)], dtype).T[tuple(slice(None, None, 2) for _ in shape)]
        apart[...] = found
        return apart
    return found


def same(name, *args, atol=1e-5, **kwargs):
    """Compare an operator with ATen's: values, shapes, and the dtype that JAX has for torch's."""
    theirs = [torch.from_numpy(x).to(DTYPES[str(x.dtype)]) if isinstance(x, np.ndarray) else x for x in args]
    expected = getattr(aten, name)(*theirs, **kwargs)
    mine = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
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


KEEP_INTEGERS = ["abs", "neg", "sign", "floor", "ceil", "trunc", "round", "relu", "hardtanh"]
TAKE_INTEGERS = [
    "exp",
    "expm1",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
    "atan",
    "asinh",
    "isnan",
    "clone",
    "logical_not",
]
TAKE_FLOATS = ["gelu", "silu", "elu", "leaky_relu", "hardswish", "hardsigmoid", "softplus", "mish"]
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge"]
REDUCTIONS = ["sum", "mean", "amax", "amin", "any", "var", "logsumexp", "linalg_vector_norm"]


@pytest.mark.parametrize("name", KEEP_INTEGERS + TAKE_INTEGERS + TAKE_FLOATS)
def test_elementwise(name):
    """Integers stay what they are, or become float32, as in torch."""
    same(name, array((), seed=1))
    same(name, array((3, 2), seed=1, strided=True))
    if name not in TAKE_FLOATS:
        same(name, array((3, 2), "int32", 1))
    if name in TAKE_INTEGERS:
        same(name, array((3, 2), "bool", 1))


@pytest.mark.parametrize("name", BINARY)
def test_of_two_operands(name):
    """Of one dtype or of two, with axes that are repeated, left out, or all."""
    others = cycle([(2, 3), (3,), (1, 1), ()])
    for one, other in product(DTYPES, DTYPES):
        if "bool" in (one, other) and name in ("sub", "remainder", "fmod", "maximum", "minimum"):
            continue
        if ("int32" in (one, other) and name in ("remainder", "fmod")) or (name == "div" and other != "float32"):
            continue  # division by 0
        for _ in range(4 if one == other == "float32" else 1):
            same(name, array((2, 3), one, 1, strided=one == other), array(next(others), other, 2, strided=True))
    same(name, array((), seed=1), array((), seed=2))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name):
    for shape, dim, keepdim in (((3,), 0, False), ((3, 2), -1, True), ((2, 4, 3), 1, False), ((2, 4, 3), -3, True)):
        x = array(shape, seed=3, strided=keepdim)
        if name == "var":
            same(name, x, [dim], correction=1, keepdim=keepdim)
        elif name == "linalg_vector_norm":
            same(name, x, 2, [dim], keepdim)
        else:
            same(name, x, dim if name == "any" else [dim], keepdim)


@pytest.mark.parametrize(
    ("shape", "dim", "start", "end", "step", "flag"),
    [((3,), 0, -6, 2, 1, True), ((5, 2), -2, 1, 2**62, 2, False), ((2, 4, 3), 1, -3, -1, 1, True),
     ((2, 3), 1, 2, 1, 3, False)],
)  # fmt: skip
def test_parts_and_places(shape, dim, start, end, step, flag):
    x, size = array(shape, seed=4, strided=flag), shape[dim]
    same("slice", x, dim, start, end, step)
    for place in (0, -size):
        same("select", x, dim, place)
    same("flip", x, [dim])
    same("cumsum", x, dim)
    same("sort", x, dim, flag)
    for largest in (True, False):
        same("topk", x, size - 1, dim, largest)
    same("max", x, dim, flag)
    same("argmax", x, dim, flag)
    same("constant_pad_nd", x, [-1 if shape[-1] > 2 else 1, 2], 1.5)
    places = np.random.default_rng(0).integers(0, size, shape).astype(np.int32)
    same("gather", x, dim, places)
    same("scatter_add", x, dim, places, array(shape, seed=5), atol=1e-4)
    same("split_with_sizes", x, [1, size - 1], dim)
    same("roll", x, [start], [dim])


@pytest.mark.parametrize(("transposed", "axes", "groups"), [*product([False, True], [1, 2], [1, 2])])
def test_convolutions(transposed, axes, groups):
    x = array((2, 4, *(7, 9)[:axes]), seed=6, strided=groups == 2)
    for kernel, stride, padding, dilation in ((1, 1, 0, 1), (3, 2, 1, 1), (2, 1, 1, 2), (3, 2, 0, 2)):
        w = array((4, 6 // groups, *[kernel] * axes) if transposed else (6, 4 // groups, *[kernel] * axes), seed=7)
        sizes = ([stride] * axes, [padding] * axes, [dilation] * axes)
        more = [stride - 1 if transposed else 0] * axes
        same("convolution", x, w, array((6,), seed=8), *sizes, transposed, more, groups, atol=1e-4)


@pytest.mark.parametrize(("kernel", "stride", "dilation", "flag"), [(1, 1, 1, True), (2, 2, 2, False), (3, 2, 1, True)])
def test_pools(kernel, stride, dilation, flag):
    image = array((2, 3, 7, 9), seed=9)
    for padding in {0, kernel // 2}:
        same("max_pool2d_with_indices", image, [kernel], [stride], [padding], [dilation], flag)
        for count_padding in (True, False):
            same("avg_pool2d", image, [kernel], [stride], [padding], flag, count_padding, atol=1e-5)


@pytest.mark.parametrize("size", [[1, 1], [3, 9], [7, 4], [12, 11]])
def test_sizes_of_images(size):
    image = array((2, 3, 7, 9), seed=9)
    if size[0] <= 7 and size[1] <= 9:
        same("_adaptive_avg_pool2d", image, size)
    for corners in (True, False):
        same("upsample_bilinear2d", image, size, corners, None, atol=1e-4)
        same("upsample_bicubic2d", image, size, corners, None, atol=1e-4)
    same("upsample_nearest2d", image, size, None)


@pytest.mark.parametrize(("mode", "padding", "corners"), [*product([0, 1, 2], [0, 1, 2], [True, False])])
def test_grid_samples(mode, padding, corners):
    grid = np.random.default_rng(15).uniform(-2.3, 2.3, (2, 3, 4, 2)).astype(np.float32)
    for height, width in ((4, 5), (1, 6)):
        same("grid_sampler_2d", array((2, 3, height, width), seed=14), grid, mode, padding, corners, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "float32"])
def test_attention(mask, groups):
    queries, keys = 5, 5 if mask == "causal" else 6
    q, k, v = array((2, 4, queries, 8), seed=10), *(array((2, 4 // groups, keys, 8), seed=seed) for seed in (11, 12))
    for shape in ((5, 6), (2, 1, 5, 6)):
        given = array(shape, mask, 13) if mask in DTYPES else None
        if mask == "bool":
            given[..., 0] = True  # a row that is masked whole has no defined result
        same("scaled_dot_product_attention", q, k, v, given, 0.0, mask == "causal", enable_gqa=groups > 1)
