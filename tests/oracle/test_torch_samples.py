"""Samples of torch's own tests have the same values and gradients here, or are refused."""

import inspect
import math

import numpy as np
import pytest
from tests.oracle.torch_samples import (
    PLACEMENTS,
    compare,
    modules,
    operators,
    outputs_of,
    samples_of,
    samples_of_module,
)
from tests.oracle.zoo import functional, torch

from tpuswarm import InputError
from tpuswarm.torch.export import IGNORED_ARGUMENTS
from tpuswarm.torch.ops import DIFFERENTIABLE, OPS, RANDOM

NUM_SAMPLES = 3
GROUP_SIZE = 10
"""Operators that are traced and compiled together, which is faster."""

REFUSED = (
    "_segment_reduce.lengths", "_segment_reduce.offsets", "allclose", "argwhere", "chalf",
    "combinations", "equal", "geqrf", "hash_tensor", "histogram", "histogramdd", "linalg.eig",
    "linalg.eigvals", "linalg.ldl_factor", "linalg.ldl_factor_ex", "linalg.ldl_solve", "masked_select",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "nonzero",
    "nonzero_static", "ormqr", "resize_as_", "special.airy_ai", "special.bessel_j0", "special.bessel_j1",
    "special.bessel_y0", "special.bessel_y1", "special.chebyshev_polynomial_t",
    "special.chebyshev_polynomial_u", "special.chebyshev_polynomial_v", "special.chebyshev_polynomial_w",
    "special.erfcx", "special.hermite_polynomial_h", "special.hermite_polynomial_he",
    "special.laguerre_polynomial_l", "special.legendre_polynomial_p", "special.modified_bessel_k0",
    "special.modified_bessel_k1", "special.scaled_modified_bessel_k0",
    "special.scaled_modified_bessel_k1", "special.shifted_chebyshev_polynomial_t",
    "special.shifted_chebyshev_polynomial_u", "special.shifted_chebyshev_polynomial_v",
    "special.shifted_chebyshev_polynomial_w", "unique", "unique_consecutive",
)  # fmt: skip
"""Operators without an implementation, or with a shape that depends on the data. The list may only shrink."""
PARTLY: dict[str, tuple[int, ...]] = {
    "cov": (1, 2), "narrow": (2,), "nn.functional.embedding": (2,), "nn.functional.embedding_bag": (2,),
    "nn.functional.linear_cross_entropy.chunked": (0,), "nn.functional.linear_cross_entropy.chunked_none": (0,),
    "take": (1,), "put": (1,), "tensor_split": (0,),
}  # fmt: skip
"""The refused ones of the three samples."""
REFUSED_MODULES = ("nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d")
UNINITIALIZED = "torch gives whatever was in memory"
NOT_COMPARED = {
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), UNINITIALIZED
    ),
    "linalg.eigh": "the signs of eigenvectors are not defined",
    **dict.fromkeys(("sparse.sampled_addmm", "sparse.mm.reduce"), "torch has sparse samples only"),
}
"""Operators that are not compared, and the reason."""
ROUGH = {
    "native_layer_norm": 1e-3, "nn.functional.layer_norm": 1e-3, "nn.functional.ctc_loss": 1e-3, "logcumsumexp": 1e-2,
}  # fmt: skip
"""Tolerances of operators for which torch rounds more than usual."""

SLOW = ("nn.functional.multi_head_attention_forward", "nn.functional.grid_sample")
"""Operators that take seconds; only `-m torch_all` compares them."""


def calls(name, count=NUM_SAMPLES):
    """Return up to three samples, each with another placement."""
    samples = samples_of(name, count)
    return [
        (f"{name}, sample {at}", samples[at % len(samples)], place)
        for at, place in enumerate(PLACEMENTS[:count])
        if samples
    ]


def supported():
    return [name for name in operators() if name not in {*REFUSED, *PARTLY, *NOT_COMPARED, *ROUGH, *SLOW}]


def groups():
    names = supported()
    return [names[at : at + GROUP_SIZE] for at in range(0, len(names), GROUP_SIZE)]


@pytest.mark.long
@pytest.mark.parametrize("names", groups(), ids=lambda names: f"{names[0]}-{names[-1]}")
def test_operators_and_their_gradients_are_torchs(names):
    compare_each(names, 1)


@pytest.mark.torch_all
@pytest.mark.parametrize("names", groups(), ids=lambda names: f"{names[0]}-{names[-1]}")
def test_operators_are_as_in_torch_wherever_their_tensors_are(names):
    compare_each(names, NUM_SAMPLES)


def compare_each(names, count):
    try:
        compare([call for name in names for call in calls(name, count)])
    except InputError:
        for name in names:  # find the operator
            compare(calls(name, count))
        raise


@pytest.mark.long
@pytest.mark.parametrize("name", ROUGH)
def test_operators_that_round_are_as_in_torch(name):
    compare(calls(name), ROUGH[name])


@pytest.mark.torch_all
@pytest.mark.parametrize("name", PARTLY)
def test_operator_is_as_in_torch_or_refused(name):
    for at, call in enumerate(calls(name)):
        if at in PARTLY[name]:
            with pytest.raises(InputError):
                compare([call])
        else:
            compare([call])


@pytest.mark.torch_all
@pytest.mark.parametrize("name", REFUSED)
def test_operator_is_refused(name):
    """Remove an operator from the list once it works."""
    with pytest.raises(InputError):
        compare(calls(name)[-1:])


@pytest.mark.torch_all
@pytest.mark.parametrize("name", [name for name in operators() if name not in {*REFUSED, *NOT_COMPARED}])
def test_every_sample_is_as_in_torch_or_refused(name):
    samples, compared = samples_of(name), 0
    for at in range(0, len(samples), GROUP_SIZE):
        group = [
            (f"{name}, sample {at + number}", sample, placement)
            for number, sample in enumerate(samples[at : at + GROUP_SIZE])
            for placement in PLACEMENTS
        ]
        try:
            compared += sum(compare(group, ROUGH.get(name, 1e-3)))
        except InputError:
            for call in group:
                try:
                    compared += sum(compare([call], ROUGH.get(name, 1e-3)))
                except InputError:
                    continue
    assert compared


@pytest.mark.torch_all
@pytest.mark.parametrize("name", modules())
def test_every_sample_of_a_module_trains_as_in_torch_or_is_refused(name):
    compared = 0
    for sample in samples_of_module(name):
        try:
            compared += sum(compare([(name, sample, "batch")]))
        except InputError:
            continue
    assert compared or name in REFUSED_MODULES


INF, NAN = math.inf, math.nan
ARRAYS = {
    "floats": torch.tensor([0.0, 1, -1, 0.5, -0.5, 100, -100, 3, -3, 2.5, -2.5, 1e-8, 20, 6, -2, 2]),
    "infinities": torch.tensor([INF, -INF, NAN, 1.0]),
    "bytes": torch.tensor([0, 1, 3, 44, 200, 255], dtype=torch.uint8),
    "integers": torch.tensor([0, 1, -1, 7, -7, 2**31 - 1, -(2**31) + 1, 100000001]),
    "32 bits": torch.tensor([0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 100000001], dtype=torch.int32),
    "booleans": torch.tensor([True, False]),
    "equal": torch.full((2, 4), 1.5),
    "zeros": torch.zeros(3),
    "no rows": torch.zeros(0, 3),
    "no axes": torch.tensor(2.5),
    "an integer": torch.tensor(3),
    "a byte": torch.tensor(200, dtype=torch.uint8),
}  # fmt: skip
F = functional
POINTS = [
    *(getattr(torch, name) for name in (
        "abs", "neg", "sign", "floor", "ceil", "trunc", "round", "relu", "isnan", "isinf", "square", "exp", "exp2",
        "expm1", "log", "log1p", "log2", "log10", "sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "reciprocal",
        "asin", "acos", "atan", "asinh", "acosh", "atanh", "rsqrt", "erf", "erfc", "erfinv", "lgamma", "digamma",
        "sigmoid", "logical_not", "bitwise_not", "sgn", "angle", "celu", "selu", "logit", "nan_to_num", "isfinite",
        "sinc", "sum", "mean", "prod",
        "any", "all", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "median", "tril",
        "squeeze", "count_nonzero", "frac", "signbit", "nansum", "i0",
    )),
    *(getattr(F, name) for name in (
        "elu", "softplus", "silu", "mish", "leaky_relu", "hardtanh", "hardsigmoid", "hardswish", "relu6", "hardshrink",
        "softshrink", "logsigmoid",
    )),
    *(lambda x, name=name: getattr(torch, name)(x, 0) for name in (
        "logsumexp", "cummax", "cummin", "cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax", "max", "min",
        "median", "sum", "amax", "amin", "any", "all", "argmax", "argmin", "prod", "mean", "std", "flip", "diff",
        "unbind",
    )),
    *(lambda x, p=p: torch.linalg.vector_norm(x, p) for p in (0, 1, 2, 3, INF, -INF, 0.5)),
    *(lambda x, n=n: x**n for n in (0, 1, 2, 3, -1, 0.5)), lambda x: x.nan_to_num(9, 9, 9) ** 1.5,
    *(lambda x, d=d, mode=mode: torch.div(x, d, rounding_mode=mode)
      for d in (3, -2.5) for mode in (None, "trunc", "floor")),
    *(lambda x, d=d, name=name: getattr(torch, name)(x, d) for d in (3, -2.5) for name in ("fmod", "remainder")),
    *(lambda x, n=n, name=name: getattr(torch, name)(x, n) for n in (0, 1, 1.5, -2)
      for name in ("add", "sub", "mul", "rsub", "eq", "ne", "gt", "ge", "lt", "le")),
    *(lambda x, name=name: getattr(torch, name)(x, 3) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    *(lambda x, name=name: getattr(torch, name)(x, torch.ones_like(x)) for name in (
        "maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "copysign", "logical_and", "logical_or", "logical_xor",
    )),
    *(lambda x, dtype=dtype: x.nan_to_num(5, 5, 5).to(dtype) for dtype in (
        torch.float32, torch.int32, torch.uint8, torch.int8, torch.int16, torch.bool
    )),
    *(lambda x, dim=dim, down=down: torch.sort(x, dim=dim, descending=down, stable=True)
      for dim in (0, -1) for down in (False, True)),
    *(lambda x, largest=largest: torch.topk(x, min(3, len(x)) if x.dim() else 1, 0, largest=largest)[0]
      for largest in (False, True)),
    lambda x: x.clamp(0, 2), lambda x: x.clamp(min=1), lambda x: x.clamp(max=1.5), lambda x: x.clamp(2, 0),
    lambda x: F.threshold(x, 1, 7), lambda x: F.hardtanh(x, -2.0, 2.0), lambda x: 2.0**x, lambda x: x.roll(1),
    lambda x: x.repeat(2, *[1] * (x.dim() - 1)), lambda x: x.unsqueeze(-1), lambda x: x.unfold(0, 1, 1),
    lambda x: torch.where(x > 0, x, 0), lambda x: x.masked_fill(x > 0, 3), lambda x: x.transpose(0, -1),
    lambda x: x.kthvalue(1, 0)[0], lambda x: x.nan_to_num(9, 9, 9).float().histc(4, -2, 2), lambda x: torch.stack([x,
    x]),
    lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long)), lambda x: torch.polygamma(1, x.nan_to_num(9, 9,
    9).float().abs() + 0.3),
]  # fmt: skip
"""Functions, compared for every array that torch accepts."""


@pytest.mark.long
@pytest.mark.parametrize("array", ARRAYS)
def test_values_at_bounds_ties_and_infinities(array):
    for number, (ours, theirs) in outputs_of(POINTS, ARRAYS[array]).items():
        for found, wanted in zip(ours, theirs, strict=True):
            about = f"POINTS[{number}], {POINTS[number]}"
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), about
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6, err_msg=about)


WHOLE_NUMBERS = {
    "division": (lambda x: torch.div(x, 3, rounding_mode="trunc"), torch.tensor([100000001, -100000001])),
    "the smallest bytes": (lambda x: x.topk(3, largest=False), torch.tensor([0, 200, 3, 255, 7], dtype=torch.uint8)),
    "the smallest integers": (lambda x: x.topk(2, largest=False), torch.tensor([0, -(2**31), 9], dtype=torch.int32)),
    "means of integers": (lambda x: F.avg_pool2d(x, 2), torch.arange(-12, 13).reshape(1, 1, 5, 5)),
    "means of a divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), torch.arange(-12, 13).reshape(1, 1, 5, 5)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=0.6), torch.arange(20.0).reshape(1, 1, 20)),
    "nearest larger": (lambda x: F.interpolate(x, scale_factor=2.3), torch.arange(35.0).reshape(1, 1, 5, 7)),
    **{f"nearest of {n}": (lambda x, n=n: F.interpolate(x, n), torch.arange(49.0).reshape(1, 1, 49))
       for n in (7, 30, 33, 98)},
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE_NUMBERS)
def test_whole_numbers_are_exact(case):
    function, x = WHOLE_NUMBERS[case]
    ((ours, theirs),) = outputs_of([function], x).values()
    for found, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(found, wanted)


ALL_OPS = {**OPS, **RANDOM, **DIFFERENTIABLE}


def test_no_operator_accepts_unknown_keywords():
    kinds = {
        name: {parameter.kind for parameter in inspect.signature(op).parameters.values()}
        for name, op in ALL_OPS.items()
    }
    assert not [name for name, found in kinds.items() if inspect.Parameter.VAR_KEYWORD in found]


GPU_OVERLOADS = {"mm.dtype", "bmm.dtype", "addmm.dtype", "baddbmm.dtype"}


def overloads(name):
    """Return the schemas that a graph can contain: with tensors, and not decomposed by torch."""
    packet = getattr(torch.ops.aten, name, None)
    for overload_name in packet.overloads() if packet else ():
        overload = getattr(packet, overload_name)
        arguments = overload._schema.arguments
        if not torch._C._dispatch_has_kernel(overload.name()):  # TorchScript only
            continue
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
        has_tensors = any("Tensor" in str(value.type) for value in (*arguments, *overload._schema.returns))
        odd = any(value.is_out or str(value.type) == "str[]" for value in arguments) or "Dimname" in str(
            overload._schema
        )
        if has_tensors and not composite and not odd and f"{name}.{overload_name}" not in GPU_OVERLOADS:
            yield overload._schema


@pytest.mark.parametrize("name", [*OPS, *RANDOM])
def test_operator_accepts_the_arguments_of_every_schema(name):
    lead = [None] if name in RANDOM else []
    for schema in overloads(name):
        arguments = [arg for arg in schema.arguments if arg.name not in IGNORED_ARGUMENTS or not arg.kwarg_only]
        for given in (arguments, [arg for arg in arguments if not arg.has_default_value()]):
            positional = [arg.name for arg in given if not arg.kwarg_only]
            keywords = {arg.name: None for arg in given if arg.kwarg_only}
            inspect.signature(ALL_OPS[name]).bind(*lead, *positional, **keywords)
