"""ATen's operators as functions of JAX arrays, in a table for each kind; arguments are those of ATen's schemas."""

from collections.abc import Callable
from typing import Any

from tpuswarm.torch.ops import layers, pointwise, products, randoms, recurrent, reductions, sampling, shapes

OPS: dict[str, Callable[..., Any]] = {
    **pointwise.OPS,
    **shapes.OPS,
    **reductions.OPS,
    **products.OPS,
    **layers.OPS,
    **sampling.OPS,
}
"""By the operator's name without its overload."""

RANDOM: dict[str, Callable[..., Any]] = {**randoms.OPS, **recurrent.OPS, **products.RANDOM}
"""The same for those that draw numbers: their first argument is a key."""


def op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the JAX form of an operator that has none here: `@tpuswarm.torch.op("col2im")`, arguments as ATen's."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        OPS[name] = function
        return function

    return add
