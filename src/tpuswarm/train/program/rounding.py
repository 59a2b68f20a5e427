"""Keep sums of gradients in float32 when values are rounded to bfloat16."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from tpuswarm.train.program.jax_versions import replace_jaxpr

MAX_TERMS = 256
"""A longer sum in bfloat16, which has 8 significant bits, loses small terms."""
SUM_PRIMITIVES, SCATTER_PRIMITIVES = ("reduce_sum", "cumsum", "reduce_window_sum"), ("scatter-add",)
"""Primitives that add: a result of the first has many terms, one of the second as many as equal indices."""
OUTER_PRIMITIVES = ("jit", "pjit", "closed_call", "remat2", "scan", "while", "cond", "custom_jvp_call")
"""Primitives whose inner programs are rewritten; kernels and shard_map keep theirs."""


def broadcast_then_round(values: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast `values` to the shape of `like`, then round them to its dtype.

    If a bias were rounded first, its gradient would be a sum over all rows in bfloat16.
    """
    return jnp.broadcast_to(values, like.shape).astype(like.dtype)


def sums_in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with long sums of bfloat16 numbers computed in float32 and rounded once, as in PyTorch.

    JAX sums in bfloat16 in the gradient of a broadcast, such as a bias, a scale or an embedding.
    """

    def wide(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = jaxpr_as_fun(replace_jaxpr(traced, _wide(traced.jaxpr, {})))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return wide


def is_long_sum(equation: JaxprEqn) -> bool:
    """Return whether an equation sums more than MAX_TERMS bfloat16 numbers to one."""
    name = equation.primitive.name
    result: Any = equation.outvars[0].aval if equation.outvars else None
    if name not in SUM_PRIMITIVES + SCATTER_PRIMITIVES or result.dtype != jnp.bfloat16:
        return False
    operand: Any = equation.invars[0].aval
    if name == "cumsum":
        return bool(operand.shape[equation.params["axis"]] > MAX_TERMS)
    return name in SCATTER_PRIMITIVES or operand.size > MAX_TERMS * max(result.size, 1)


def _wide(jaxpr: Jaxpr, done: dict[int, Jaxpr]) -> Jaxpr:
    """Rewrite the long sums of a program; return the same object if it has none, so that JAX lowers it once.

    done: results by id of the program.
    """
    if id(jaxpr) not in done:
        equations = [_wide_equation(equation, done) for equation in jaxpr.eqns]
        is_same = all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True))
        done[id(jaxpr)] = jaxpr if is_same else jaxpr.replace(eqns=equations)
    return done[id(jaxpr)]


def _wide_equation(equation: JaxprEqn, done: dict[int, Jaxpr]) -> JaxprEqn:
    if is_long_sum(equation):
        shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars]  # type: ignore[attr-defined]
        (call,) = jax.make_jaxpr(jax.jit(_in_float32(equation)))(*shapes).eqns
        return call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)
    if equation.primitive.name not in OUTER_PRIMITIVES:
        return equation
    params = {name: _inside(value, done) for name, value in equation.params.items()}
    is_same = all(params[name] is value for name, value in equation.params.items())
    return equation if is_same else equation.replace(params=params)


def _in_float32(equation: JaxprEqn) -> Callable[..., jax.Array]:
    def summed(*args: jax.Array) -> jax.Array:
        args = tuple(arg.astype(jnp.float32) if arg.dtype == jnp.bfloat16 else arg for arg in args)
        if equation.primitive.name in SCATTER_PRIMITIVES:  # its parameters hold an addition in bfloat16
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            operand, indices, updates = args
            result = jax.lax.scatter_add(operand, indices, updates, **{name: equation.params[name] for name in names})
        else:
            result = equation.primitive.bind(*args, **equation.params)
        return result.astype(jnp.bfloat16)

    return summed


def _inside(value: Any, done: dict[int, Jaxpr]) -> Any:
    """Rewrite the programs in a parameter of an equation."""
    if isinstance(value, ClosedJaxpr):
        jaxpr = _wide(value.jaxpr, done)
        return value if jaxpr is value.jaxpr else replace_jaxpr(value, jaxpr)
    if isinstance(value, Jaxpr):
        return _wide(value, done)
    if isinstance(value, tuple) and any(isinstance(part, ClosedJaxpr) for part in value):
        parts = tuple(_inside(part, done) for part in value)
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    return value
