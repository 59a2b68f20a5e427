"""Which parameters are trained, and which of them decay."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError
from tpuswarm.train import paths

STATISTICS = ("BatchStat",)
"""Types of Flax NNX's variables that are observed."""
UNDECAYED = ("b", "bias", "biases", "beta", "scale", "gain", "gamma", "offset")
"""Names of parameters without weight decay, whatever their shape: those of stacked layers have two axes."""


def refuse_statistics(params: Any, place: str) -> None:
    """Raise InputError for running statistics among the trained parameters: Flax's collection, and variables of NNX."""
    for path in paths.leaf_paths(params):
        if "batch_stats" in path.split("/"):
            raise InputError(
                f"parameter {path} is a running statistic, which no gradient trains: make it in extra=, or keep it "
                f"with --freeze batch_stats{place}"
            )
    found = {type(leaf).__name__ for leaf in jax.tree.leaves(params, is_leaf=lambda x: type(x).__name__ in STATISTICS)}
    if wrong := found.intersection(STATISTICS):
        raise InputError(
            f"there is an nnx.{min(wrong)} among the parameters, a running statistic that no gradient trains: split it "
            f"off, nnx.split(model, nnx.Param, ...), and give it in extra={place}"
        )


def usual_decay(params: Any) -> Any:
    """A mask of bools: arrays of two or more axes decay; vectors, biases and the scales of norms do not."""
    # NNX ends the path of each parameter in `value`; PyTorch has dots in its names.
    names = [re.split(r"[/.]", path.removesuffix("/value"))[-1].lower() for path in paths.leaf_paths(params)]
    leaves, structure = jax.tree.flatten(params)
    decayed = [jnp.ndim(leaf) > 1 and name not in UNDECAYED for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(structure, decayed)
