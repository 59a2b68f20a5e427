"""Products of float32 operands in a step that was to compute in bfloat16."""

from collections import Counter
from dataclasses import dataclass

import jax.numpy as jnp

from tpuswarm.train.flops import Flops
from tpuswarm.train.user_code import Place

SHARE = 0.01
"""Of all FLOPs: what is less at one line is noise."""


@dataclass(frozen=True)
class Float32:
    """Products of one line whose operands are all float32."""

    place: Place | None
    share: float
    """Of the step's FLOPs."""

    def __str__(self) -> str:
        return (
            f"float32 matrix products, {self.share:.0%} of all FLOPs, although bf16 was requested: twice the bytes, "
            "and several passes of the matrix unit at higher precision; cast the operands to bfloat16"
        )


def float32_products(flops: Flops) -> list[Float32]:
    """The lines with most of them, first. A product of one float32 operand is usual: gradients of a float32 loss."""
    found: Counter[Place | None] = Counter()
    for product in flops.products:
        if product.dtypes and all(dtype == jnp.float32 for dtype in product.dtypes):
            found[product.place] += product.flops
    shares = [Float32(place, count / flops.total) for place, count in found.most_common() if count]
    return [each for each in shares if each.share >= SHARE]
