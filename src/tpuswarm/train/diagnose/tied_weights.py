"""Weights that begin as one array but are two parameters: they come apart at the first step.

A pytree can hold one array twice; once it has passed through jax.jit, or been saved and restored, there are two. The
same happened to PyTorch models on TPU (Lightning issue 2705), there as here without an error.
"""

import itertools
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.recipe import Program

DIMENSIONS = 2
"""Vectors are biases and scales, which often share their first value and mean nothing by it."""


def tied_weights(program: Program) -> list[Finding]:
    """Pairs of parameters, matrices or larger, that the program's init makes from one and the same array.

    Looks at what init does (its jaxpr), not at numbers: nothing is computed, and two that are equal by chance differ.
    Arrays that init takes from outside, loaded weights for example, are compared by their content.
    """
    get = program.exchange().get
    paths: list[str] = []

    def parameters(key: jax.Array) -> Any:
        made = get(program.init(key))
        paths.extend(leaf_paths(made))
        return jax.tree.leaves(made)

    traced = jax.make_jaxpr(parameters)(jax.eval_shape(lambda: run_key(0)))
    outside = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    filled = {eqn.outvars[0] for eqn in traced.jaxpr.eqns if _fills(eqn)}
    leaves = [
        (path, leaf)
        for path, leaf in zip(paths, traced.jaxpr.outvars, strict=True)
        if len(leaf.aval.shape) >= DIMENSIONS and leaf not in filled
    ]
    return [
        _finding(path, other, leaf.aval)
        for (path, leaf), (other, twin) in itertools.combinations(leaves, 2)
        if leaf.aval == twin.aval and (_equal(outside[leaf], outside.get(twin)) if leaf in outside else leaf is twin)
    ]


def _fills(eqn: Any) -> bool:
    """Whether an equation makes an array of one number, as jnp.zeros does: sharing that means nothing."""
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)


def _equal(array: Any, other: Any) -> bool:
    """Whether two loaded arrays hold the same, which is more than one number; False for what init computes."""
    if array is None or other is None or not np.array_equal(array[:1], other[:1]):
        return False
    one = np.asarray(array)
    return bool((one != one.flat[0]).any()) and (array is other or np.array_equal(one, other))


def _finding(path: str, other: str, aval: Any) -> Finding:
    shape = "x".join(map(str, aval.shape))
    return Finding(
        "tied-weights",
        f"{path} and {other} start as one {shape} array but are two parameters: each follows its own gradient, so they "
        f"diverge at the first step; to tie them, keep only {path} and use it in both places in the loss",
        {"parameters": [path, other], "shape": list(aval.shape)},
    )
