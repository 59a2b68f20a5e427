"""Call a user's loss: set its precision, check its result, sum its terms and gradients over micro-batches."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, PartitionSpec

from tpuswarm.errors import InputError
from tpuswarm.train.paths import first_difference, mask
from tpuswarm.train.recipe import RESERVED, Batch, Weighted

Loss = Callable[..., Any]
"""`loss(params, batch, key) -> loss` or `-> (loss, metrics)`: means over the batch, each a scalar or Weighted.

With mutable state `loss(params, extra, batch, key) -> (loss, (metrics, extra))`. The key is None in evaluation.
"""

Terms = dict[str, Any]
"""`loss` and metrics of one batch; the loss is float32. Each is a scalar or Weighted."""

Gradient = Callable[[Any, Any, Any, Batch, jax.Array], tuple[Any, tuple[Terms, Any]]]
"""(trained, all parameters, mutable state, batch, key) → (gradient, (terms, mutable state after it))."""

HAS_COUNTED_ROWS = "_any_row_counts"
"""Metric of a step, absent from metrics.jsonl: whether any row of a Weighted loss counts."""


def terms(out: Any) -> Terms:
    """Return a loss and its metrics as one dict; InputError if one is no scalar or has a reserved name."""
    is_pair = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping)
    loss, metrics = out if is_pair else (out, {})
    for name, value in {"the loss": loss, **metrics}.items():
        for part in value if isinstance(value, Weighted) else (value,):
            if not isinstance(part, jax.Array | np.ndarray | np.generic | float | int):
                raise InputError(
                    f"{name} is a {type(part).__name__}: a loss returns a scalar, or (scalar, dict of scalar metrics)"
                )
            if jnp.shape(part) != ():
                raise InputError(
                    f"{name} has shape {jnp.shape(part)}, it must be a scalar: take its mean over the batch"
                )
        if name in RESERVED or name.startswith("eval_"):
            raise InputError(f"a metric cannot be called {name}: the trainer writes one of that name")
    found = {name: _float32(value) if isinstance(value, Weighted) else value for name, value in metrics.items()}
    return found | {"loss": _float32(loss)}


def terms_and_extra(out: Any, before: Any) -> tuple[Terms, Any]:
    """Return the terms and the mutable state of a loss; InputError if the state changed its shape or dtype."""
    is_pair = isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], tuple) and len(out[1]) == 2
    if not is_pair or not isinstance(out[1][0], Mapping):
        raise InputError(
            "a loss with mutable state returns (loss, (dict of metrics, extra)), the dict empty where it has none"
        )
    loss, (metrics, extra) = out
    if different := first_difference(before, extra):
        path, given, returned = different
        raise InputError(
            f"the loss was given {given} {path} in extra, and returns {returned}: state keeps its shapes and dtypes"
        )
    given_structure, returned_structure = (str(jax.tree.structure(tree)) for tree in (before, extra))
    if given_structure != returned_structure:
        raise InputError(f"the loss returns extra as {returned_structure}, and was given {given_structure}")
    return terms((loss, metrics)), extra


def objective(found: Terms) -> jax.Array:
    """Return the scalar to differentiate.

    For a Weighted loss this is the sum; it is divided by the step's whole weight later. InputError if the weight
    depends on parameters.
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


def mean_terms(total: Terms, count: int) -> Terms:
    """Return the terms of a whole batch, scalars, from their sum over `count` micro-batches."""
    return {name: term.mean if isinstance(term, Weighted) else _mean(term, count) for name, term in total.items()}


def has_counted_rows(total: Terms) -> jax.Array | None:
    """Return whether any row counts, bool scalar; None if the loss is not Weighted, so that all rows count."""
    loss = total["loss"]
    return loss.weight != 0 if isinstance(loss, Weighted) else None


def mean_gradient(grads: Any, total: Terms, count: int) -> Any:
    """Return the gradient of the whole batch's loss from the summed gradients of `objective`."""
    loss = total["loss"]
    if isinstance(loss, Weighted):
        weight = loss.weight + (loss.weight == 0)
        return jax.tree.map(lambda grad: grad / weight.astype(grad.dtype), grads)
    return jax.tree.map(lambda grad: _mean(grad, count), grads)


def _float32(value: Any) -> Any:
    return jax.tree.map(lambda part: jnp.asarray(part, jnp.float32), value)


def _mean(total: Any, count: int) -> Any:
    return total if count == 1 else total / jnp.asarray(count, total.dtype)


def in_precision(loss: Loss, precision: str, cast: Collection[str] = (), float32: str | None = None) -> Loss:
    """Return `loss` computed in `precision` over float32 parameters and over the batch arrays named in `cast`.

    float32: parameters whose path this regular expression matches stay float32 under bf16.
    """

    def half(leaf: Any) -> Any:
        return leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf

    def computed(params: Any, *args: Any) -> Any:
        is_float32 = mask(params, float32, "float32")  # refuses an expression without a match in f32, too
        if precision != "bf16":
            with jax.default_matmul_precision("highest") if precision == "highest" else nullcontext():
                return loss(params, *args)
        *extra, batch, key = args
        rows = {name: half(array) if name in cast else array for name, array in batch.items()}
        halves = jax.tree.map(lambda leaf, keep: leaf if keep else half(leaf), params, is_float32)
        try:
            return loss(halves, *extra, rows, key)
        except TypeError as error:
            uncast = [name for name, array in rows.items() if array.dtype == jnp.float32]
            if uncast and "bfloat16" in str(error):  # lax.conv does not promote
                error.args = (f"{error}; {' and '.join(uncast)} of the batch stay float32 without cast={uncast}",)
            raise

    return computed


def sum_micro_batches(
    gradient: Gradient, count: int, trained: Any, params: Any, extra: Any, batch: Batch, key: jax.Array
) -> tuple[tuple[Any, Terms], Any]:
    """Return the sums of gradients and terms over `count` micro-batches, and the mutable state after the last."""

    def micro(extra: Any, index: jax.Array, batch: Batch) -> Any:
        grads, (found, after) = gradient(trained, params, extra, batch, jax.random.fold_in(key, index))
        return (grads, found), after

    def add(carried: Any, indexed: Any) -> tuple[Any, None]:
        total, extra = carried
        more, extra = micro(extra, *indexed)
        return (jax.tree.map(jnp.add, total, more), extra), None

    # Micro-batch a takes every count-th row from a on, so each device keeps rows that it already holds.
    micros = jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), dict(batch))
    shapes, _ = jax.eval_shape(micro, extra, jnp.int32(0), jax.tree.map(lambda x: x[0], micros))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (total, extra), _ = jax.lax.scan(add, (zeros, extra), (jnp.arange(count), micros))
    return total, extra


def sum_micro_batches_by_device(
    gradient: Gradient, count: int, trained: Any, params: Any, batch: Batch, key: jax.Array
) -> tuple[Any, Terms]:
    """Return the sums over all devices' micro-batches; add over the devices only once, at the end.

    The partitioner would add a gradient over the devices in every micro-batch. Here each device works alone, with a
    key of its own, and holds all parameters. The mesh must be visible.
    """
    mesh = jax.sharding.get_abstract_mesh()
    (axis,) = mesh.axis_names

    def mine(trained: Any, params: Any, batch: Batch, key: jax.Array) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # kernels must not map themselves over the mesh
            total, _ = sum_micro_batches(gradient, count, trained, params, None, batch, key)
        return jax.lax.psum(total, axis)

    everywhere, rows = PartitionSpec(), PartitionSpec(axis)
    mapped = jax.shard_map(
        mine, mesh=mesh, in_specs=(everywhere, everywhere, rows, everywhere), out_specs=everywhere, check_vma=False
    )
    return mapped(trained, params, dict(batch), key)
