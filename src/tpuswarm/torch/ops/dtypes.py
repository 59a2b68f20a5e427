"""Map torch's dtypes and axes to JAX and promote operands as torch does."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Dtype

JAX_NAMES = {"float64": "float32", "int64": "int32", "bool": "bool_", "complex128": "complex64"}
"""torch dtypes whose JAX dtype has another name or fewer bits."""
DEFAULT_DTYPES = {
    jnp.bool_: jnp.bool_,
    jnp.integer: jnp.int32,
    jnp.floating: jnp.float32,
    jnp.complexfloating: jnp.complex64,
}
"""Kinds of dtypes in the order of promotion, and the dtype of a Python number of each kind."""


def jax_dtype(dtype: Dtype | None, default: Any = None) -> Any:
    """Return the JAX dtype for a torch dtype, or `default` for None."""
    if dtype is None:
        return default
    try:
        return jnp.dtype(getattr(jnp, JAX_NAMES.get(dtype.name, dtype.name)))
    except (AttributeError, TypeError):
        raise InputError(f"JAX has no dtype {dtype.name}; convert to another dtype") from None


def is_inexact(x: Any) -> bool:
    """Return whether an array holds floating-point or complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _rank(value: Any) -> int:
    dtype = jnp.result_type(value)
    return next(rank for rank, kind in enumerate(DEFAULT_DTYPES) if jnp.issubdtype(dtype, kind))


def result_dtype(*values: Any) -> Any:
    """Return the dtype that torch computes in.

    The values of the highest kind decide: arrays with axes if there are any, else scalar arrays, else Python numbers.
    """
    ranks = [_rank(value) for value in values]
    highest = [value for value, rank in zip(values, ranks, strict=True) if rank == max(ranks)]
    arrays = [value for value in highest if isinstance(value, jax.Array)]
    if deciding := [array for array in arrays if array.ndim] or arrays:
        return jnp.result_type(*(array.dtype for array in deciding))
    return list(DEFAULT_DTYPES.values())[max(ranks)]


def promote(*values: Any) -> list[jax.Array]:
    """Convert all values to arrays of the dtype that torch computes in."""
    dtype = result_dtype(*values)
    return [jnp.asarray(value).astype(dtype) for value in values]


def as_float(x: Any) -> jax.Array:
    """Convert integers and booleans to float32."""
    x = jnp.asarray(x)
    return x if is_inexact(x) else x.astype(jnp.float32)


def lowest(dtype: Any) -> Any:
    """Return the smallest value of a dtype: minus infinity or the smallest integer."""
    return -np.inf if jnp.issubdtype(dtype, jnp.inexact) else np.iinfo(dtype).min


def axes(dim: Any, ndim: int) -> tuple[int, ...]:
    """Return sorted, non-negative axes for a torch `dim`; None and [] mean all axes."""
    if dim is None or dim == [] or not ndim:
        return tuple(range(ndim))
    return tuple(sorted(axis % ndim for axis in (dim if isinstance(dim, (list, tuple)) else [dim])))


def with_axes(functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Let operators along an axis take an array without axes, as in torch."""

    def widen(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
            if x.ndim:
                return function(x, *args, **kwargs)
            args = tuple(jnp.atleast_1d(value) if isinstance(value, jax.Array) else value for value in args)
            return jax.tree.map(lambda y: y.reshape(()) if y.shape == (1,) else y, function(x[None], *args, **kwargs))

        return apply

    return {name: widen(function) for name, function in functions.items()}


def cast_floats(value: Any, dtype: Any) -> Any:
    """Cast arrays of 16-bit and 32-bit floats, also inside lists; return everything else unchanged."""
    if isinstance(value, (list, tuple)):
        return [cast_floats(item, dtype) for item in value]
    is_float = isinstance(value, jax.Array) and value.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return value.astype(dtype) if is_float else value


def saturating_cast(value: Any, dtype: Any) -> jax.Array:
    """Cast to `dtype`, clipping finite floats to its range: masks use the smallest float32, which must stay finite."""
    value = jnp.asarray(value)
    if value.dtype == dtype or not all(jnp.issubdtype(kind, jnp.inexact) for kind in (value.dtype, dtype)):
        return value.astype(dtype)
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    low, high = (jnp.asarray(bound, value.dtype) for bound in (info.min, info.max))
    return jnp.where(jnp.isinf(value), value, jnp.clip(value, low, high)).astype(dtype)
