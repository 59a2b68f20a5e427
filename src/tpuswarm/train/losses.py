"""A user's loss: called in a precision, its result checked, its parts added up over micro-batches."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tpuswarm.errors import InputError
from tpuswarm.train.paths import first_difference, mask
from tpuswarm.train.recipe import Weighted

Loss = Callable[..., Any]
"""`loss(params, batch, key) -> loss` or `-> (loss, metrics)`: means over the batch, each a scalar or Weighted.

With mutable state `loss(params, extra, batch, key) -> (loss, (metrics, extra))`. No key in evaluation.
"""

Terms = dict[str, Any]
"""`loss` and metrics of one batch: float32 scalars for the loss, Weighted where the user gave that."""

RESERVED = (
    "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "wait_s", "wall_s", "member", "version", "rows",
)  # fmt: skip
"""Columns of metrics.jsonl that a loss's metrics must not use; those of evaluations begin with EVALUATED."""
EVALUATED = "eval_"
COUNTS = "_any_row_counts"
"""The metric of a step that says whether any row of a Weighted loss counts; it is in no row of metrics.jsonl."""

NUMERIC = (jax.Array, np.ndarray, np.generic, float, int)
"""Types of a loss and a metric."""


def terms(out: Any) -> Terms:
    """Return a loss and its metrics as one dict; InputError if one is no scalar or has a reserved name."""
    pair = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping)
    loss, metrics = out if pair else (out, {})
    for name, value in {"the loss": loss, **metrics}.items():
        for part in value if isinstance(value, Weighted) else (value,):
            if not isinstance(part, NUMERIC):
                raise InputError(
                    f"{name} is a {type(part).__name__}: a loss returns a scalar, or (scalar, dict of scalar metrics)"
                )
            if jnp.shape(part) != ():
                raise InputError(
                    f"{name} has shape {jnp.shape(part)}, it must be a scalar: take its mean over the batch"
                )
        if name in RESERVED or name.startswith(EVALUATED):
            raise InputError(f"a metric cannot be called {name}: the trainer writes one of that name")
    found = {name: _float32(value) if isinstance(value, Weighted) else value for name, value in metrics.items()}
    return found | {"loss": _float32(loss)}


def terms_and_extra(out: Any, before: Any) -> tuple[Terms, Any]:
    """Return the terms and the mutable state of a loss; InputError if the state changed its shape or dtype."""
    two = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], tuple) and len(out[1]) == 2
    if not two or not isinstance(out[1][0], Mapping):
        raise InputError(
            "a loss with mutable state returns (loss, (dict of metrics, extra)), the dict empty where it has none"
        )
    loss, (metrics, extra) = out
    if different := first_difference(before, extra):
        path, was, now = different
        raise InputError(
            f"the loss was given {was} {path} in extra, and returns {now}: state keeps its shapes and dtypes"
        )
    given, returned = (str(jax.tree.structure(tree)) for tree in (before, extra))
    if given != returned:
        raise InputError(f"the loss returns extra as {returned}, and was given {given}")
    return terms((loss, metrics)), extra


def objective(found: Terms) -> jax.Array:
    """Return the scalar to differentiate: of a Weighted loss its sum, to be divided by the whole step's weight later.

    InputError if the weight depends on parameters.
    """
    loss = found["loss"]
    if not isinstance(loss, Weighted):
        return loss
    _constant(loss.weight)
    return loss.sum


@jax.custom_jvp
def _constant(weight: jax.Array) -> jax.Array:
    return weight


def _refuse_tangent(primals: tuple[jax.Array], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    if not isinstance(tangents[0], SymbolicZero):
        raise InputError(
            "the weight of the loss depends on parameters, and Weighted takes it as a constant: give "
            "jax.lax.stop_gradient(weight), or return the quotient itself as the loss"
        )
    return primals[0], jnp.zeros_like(primals[0])


_constant.defjvp(_refuse_tangent, symbolic_zeros=True)


def means(total: Terms, count: int) -> Terms:
    """Return the terms of a whole batch, scalars, from the sum of those of `count` micro-batches."""
    return {name: term.mean if isinstance(term, Weighted) else _part(term, count) for name, term in total.items()}


def counts(total: Terms) -> jax.Array | None:
    """Whether any row counts, bool scalar; None for a loss that is not Weighted, whose rows all count."""
    loss = total["loss"]
    return loss.weight != 0 if isinstance(loss, Weighted) else None


def mean_gradient(grads: Any, total: Terms, count: int) -> Any:
    """The sum over `count` micro-batches of the gradients of `objective`, as the gradient of the whole batch's loss."""
    loss = total["loss"]
    if isinstance(loss, Weighted):
        weight = loss.weight + (loss.weight == 0)
        return jax.tree.map(lambda grad: grad / weight.astype(grad.dtype), grads)
    return jax.tree.map(lambda grad: _part(grad, count), grads)


def _float32(value: Any) -> Any:
    return jax.tree.map(lambda part: jnp.asarray(part, jnp.float32), value)


def _part(total: Any, count: int) -> Any:
    return total if count == 1 else total / jnp.asarray(count, total.dtype)


def in_precision(loss: Loss, precision: str, cast: Collection[str] = (), float32: str | None = None) -> Loss:
    """Return `loss` computed in `precision` over float32 parameters, and over the arrays of a batch named in `cast`.

    float32: parameters whose path this expression matches stay float32 under bf16.
    """

    def half(leaf: Any) -> Any:
        return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf

    def computed(params: Any, *args: Any) -> Any:
        whole_leaves = mask(params, float32, "float32")  # an expression that matches nothing is found on a CPU too
        if precision != "bf16":
            with jax.default_matmul_precision("highest") if precision == "highest" else nullcontext():
                return loss(params, *args)
        *extra, batch, key = args
        rows = {name: half(array) if name in cast else array for name, array in batch.items()}
        halves = jax.tree.map(lambda leaf, whole: leaf if whole else half(leaf), params, whole_leaves)
        try:
            return loss(halves, *extra, rows, key)
        except TypeError as error:
            whole = [name for name, array in rows.items() if array.dtype == jnp.float32]
            if whole and "bfloat16" in str(error):  # lax.conv does not promote
                error.args = (f"{error}; {' and '.join(whole)} of the batch stay float32 without cast={whole}",)
            raise

    return computed
