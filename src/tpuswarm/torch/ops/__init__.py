"""ATen's operators as functions of JAX arrays, in a table for each kind; arguments are those of ATen's schemas."""

from collections.abc import Callable
from typing import Any

from tpuswarm.torch.ops import (
    backward,
    layers,
    linear_algebra,
    pointwise,
    products,
    randoms,
    recurrent,
    reductions,
    sampling,
    scattering,
    shapes,
)

OPS: dict[str, Callable[..., Any]] = {
    **pointwise.OPS,
    **shapes.OPS,
    **reductions.OPS,
    **products.OPS,
    **layers.OPS,
    **sampling.OPS,
    **scattering.OPS,
    **linear_algebra.OPS,
    **backward.OPS,
}
"""By the operator's name without its overload."""

RANDOM: dict[str, Callable[..., Any]] = randoms.OPS
"""The same for those that draw numbers: their first argument is a key, None in evaluation."""

WHOLE: dict[str, Callable[..., Any]] = {**products.WHOLE, **recurrent.WHOLE}
"""What JAX differentiates as a whole: after the key come the options."""

NARROW = {*products.OPS} - {"embedding"}
"""Computed in bfloat16 where the precision is bf16, whatever the operands are, as torch.autocast does; but for outer
products."""
WIDE = {
    "sum", "mean", "var", "std", "var_mean", "prod", "cumsum", "cumprod", "logsumexp", "linalg_vector_norm", "_softmax",
    "_log_softmax", "exp", "expm1", "log", "log1p", "log2", "log10", "pow", "rsqrt", "reciprocal",
}  # fmt: skip
"""Computed in float32 there: what a module does in float32 anyway was traced in float32, and says so no more."""


def op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the JAX form of an operator that has none here: `@tpuswarm.torch.op("col2im")`, arguments as ATen's."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS[name] = function
        return function

    return add
