"""What a layer's backward pass computes again, so that its forward pass need not keep it."""

from collections.abc import Callable
from typing import Any

import jax

from tpuswarm.train.recipe import Remat

ATTENTION = "attention"
"""The name (`jax.ad_checkpoint.checkpoint_name`) of what attention gives, which is the dearest to compute again."""


def recomputed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`layer` with a backward pass that computes again nothing, all but matrix products and attention, or all of it.

    With `dots` what is kept are products without batch dimensions, those with weights, and what has the name
    `ATTENTION`: norms, activations and attention's scores are computed again, and hardly a FLOP more. What
    cuDNN's kernel gives has no name, and is computed again.
    """
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    kept = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(ATTENTION)
    )
    return jax.checkpoint(layer, policy=kept if remat == "dots" else None)
