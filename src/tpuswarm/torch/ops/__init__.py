"""JAX implementations of ATen operators, with the arguments of ATen's schemas."""

from collections.abc import Callable
from typing import Any

from tpuswarm.torch.ops import (
    linear_algebra,
    normalization,
    pointwise,
    pooling,
    products,
    random_numbers,
    recurrent,
    reductions,
    resampling,
    scattering,
    shapes,
)

OPS: dict[str, Callable[..., Any]] = {
    name: function
    for module in (
        pointwise, shapes, reductions, products, normalization, pooling, resampling, scattering, linear_algebra,
    )
    for name, function in module.OPS.items()
} | {"native_dropout_backward": random_numbers.dropout_backward}  # fmt: skip
"""By operator name without overload."""

RANDOM: dict[str, Callable[..., Any]] = random_numbers.OPS
"""Operators that draw random numbers; the first argument is a key, or None in evaluation."""

DIFFERENTIABLE: dict[str, Callable[..., Any]] = {**products.DIFFERENTIABLE, **recurrent.DIFFERENTIABLE}
"""Operators that JAX differentiates; the first arguments are a key and the options."""

BF16_OPS = {*products.OPS} - {"embedding"}
"""Operators that compute in bfloat16 if the precision is bf16, as under torch.autocast, except for outer products."""
FLOAT32_OPS = {
    "sum", "mean", "var", "var_mean", "prod", "cumsum", "cumprod", "logsumexp", "linalg_vector_norm", "_softmax",
    "_log_softmax", "exp", "expm1", "log", "log1p", "log2", "log10", "pow", "rsqrt", "reciprocal",
}  # fmt: skip
"""Operators that compute in float32 if the precision is bf16: the traced casts to float32 had no effect."""


def op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an ATen operator: `@tpuswarm.torch.op("col2im")`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS[name] = function
        return function

    return register
