"""Find parameters without a gradient, and gradients that bfloat16 rounds away."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from tpuswarm.train.diagnose.finding import Finding
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.rounding import MAX_TERMS, is_long_sum
from tpuswarm.train.recipe import Batch, State

MAX_NAMED = 3
"""Parameters that are named; the others are counted."""
NO_GRADIENT = (
    "no gradient reaches {}, so they are not trained: give running statistics in extra=, name constants in --freeze, "
    "and remove unused ones"
)
ROUNDED = (
    "the gradient of {} adds up in bfloat16 over more than 256 steps of a loop, which loses small terms: name them in "
    "float32=, or cast them in the loop"
)


@runtime_checkable
class GivesGradient(Protocol):
    """A program that gives the gradient of a batch by its trained parameters."""

    def batch_gradient(self, state: State, batch: Batch, key: jax.Array) -> Any:
        """A tree of arrays."""
        ...


def gradients(compiled: Compiled, micro_batch: int) -> list[Finding]:
    """Parameters whose gradient is always 0, and those whose gradient is a long sum in bfloat16.

    Looks at how the gradient is computed (its jaxpr), not at numbers. micro_batch: rows, over all devices.
    """
    program = compiled.program
    if not isinstance(program, GivesGradient):
        return []
    rows, key = dict(program.batch_spec(micro_batch)), jax.eval_shape(lambda: run_key(0))
    paths: list[str] = []

    def gradient(state: Any, rows: Any, key: jax.Array) -> list[jax.Array]:
        found = program.batch_gradient(state, rows, key)
        paths.extend(leaf_paths(found))
        return jax.tree.leaves(found)

    with jax.sharding.use_abstract_mesh(compiled.mesh.abstract_mesh):
        traced = jax.make_jaxpr(gradient)(compiled.state, rows, key)
    leaves = list(zip(paths, traced.jaxpr.outvars, strict=True))
    makers = {variable: equation for equation in traced.jaxpr.eqns for variable in equation.outvars}
    zero = [path for path, leaf in leaves if _is_zero(leaf, makers)]
    rounded = [path for path, leaf in leaves if _is_long_sum(leaf, makers)]
    return [
        *([_finding("no-gradient", zero, NO_GRADIENT)] if zero else []),
        *([_finding("bfloat16-sum", rounded, ROUNDED)] if rounded else []),
    ]


def _finding(kind: str, paths: list[str], sentence: str) -> Finding:
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return Finding(kind, sentence.format(", ".join(paths[:MAX_NAMED]) + more), {"parameters": paths})


def _is_zero(leaf: Any, makers: dict[Var, JaxprEqn]) -> bool:
    """Whether a result is a constant 0."""
    if isinstance(leaf, Literal):
        return bool(leaf.val == 0)
    maker = makers.get(leaf)
    return maker is not None and maker.primitive.name == "broadcast_in_dim" and _is_zero(maker.invars[0], {})


def _is_long_sum(leaf: Any, makers: dict[Var, JaxprEqn]) -> bool:
    """Whether a result is a bfloat16 sum of many bfloat16 numbers, possibly reshaped or cast."""
    while not isinstance(leaf, Literal) and (maker := makers.get(leaf)) is not None:
        if is_long_sum(maker) or _adds_up(maker, leaf):
            return True
        if maker.primitive.name in ("jit", "pjit", "scan", "remat2"):
            inside = maker.params["jaxpr"]
            body = inside.jaxpr if isinstance(inside, ClosedJaxpr) else inside
            leaf = body.outvars[maker.outvars.index(leaf)]
            makers = {variable: equation for equation in body.eqns for variable in equation.outvars}
        elif maker.primitive.name in ("convert_element_type", "reshape", "squeeze", "copy", "transpose", "neg"):
            leaf = maker.invars[0]
        else:
            return False
    return False


def _adds_up(loop: JaxprEqn, leaf: Any) -> bool:
    """Whether a result of a loop is what its steps have added to it, as the gradient of a recurrent layer."""
    if loop.primitive.name != "scan" or loop.params["length"] <= MAX_TERMS or leaf.aval.dtype != jnp.bfloat16:
        return False
    carried, body = loop.outvars.index(leaf), loop.params["jaxpr"].jaxpr
    if carried >= loop.params["num_carry"]:
        return False
    before, after = body.invars[loop.params["num_consts"] + carried], body.outvars[carried]
    added = next((each for each in body.eqns if after in each.outvars), None)
    return added is not None and added.primitive.name in ("add", "add_any") and before in added.invars
