"""torch's dtypes, and what operands of several become: not what JAX would make of them."""

from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Dtype

NARROWED = {"float64": "float32", "int64": "int32", "bool": "bool_", "complex128": "complex64"}
"""What JAX has for torch's dtypes of other names or of more bits than it uses."""


def jax_dtype(dtype: Dtype | None, default: Any = None) -> Any:
    """The dtype of JAX's for one of torch's; `default` for None."""
    if dtype is None:
        return default
    name = NARROWED.get(dtype.name, dtype.name)
    try:
        return jnp.dtype(getattr(jnp, name))
    except (AttributeError, TypeError):
        raise InputError(f"JAX has no numbers of {dtype.name}") from None


def _kind(value: Any) -> int:
    """Bool, integer, float or complex, which torch's rule looks at first."""
    dtype = jnp.result_type(value)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 3
    return 2 if jnp.issubdtype(dtype, jnp.inexact) else 0 if dtype == jnp.bool_ else 1


def result_dtype(*values: Any) -> Any:
    """What torch computes in: arrays with axes decide, then those without, then Python's numbers.

    Each decides only if it is of a higher kind (bool, integer, float, complex) than those before.
    """
    arrays = [each for each in values if isinstance(each, jax.Array)]
    groups = [
        [each for each in arrays if each.ndim],
        [each for each in arrays if not each.ndim],
        [each for each in values if not isinstance(each, jax.Array)],
    ]
    highest = max(_kind(each) for each in values)
    for group in groups:
        if top := [each for each in group if _kind(each) == highest]:
            if isinstance(top[0], jax.Array):
                return jnp.result_type(*(each.dtype for each in top))
            break
    return (jnp.bool_, jnp.int32, jnp.float32, jnp.complex64)[highest]


def alike(*values: Any) -> list[jax.Array]:
    """All as arrays of the one dtype that torch computes in."""
    dtype = result_dtype(*values)
    return [jnp.asarray(each).astype(dtype) for each in values]


def as_float(x: Any) -> jax.Array:
    """What torch makes of integers where only floats make sense."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def axes(dim: Any, ndim: int) -> tuple[int, ...]:
    """Axes as torch gives them: one, several, or none for all."""
    if dim is None or dim == []:
        return tuple(range(ndim))
    given = dim if isinstance(dim, (list, tuple)) else [dim]
    return tuple(sorted(each % ndim if ndim else 0 for each in given))[: max(ndim, 0)]


def in_dtype(value: Any, dtype: Any) -> Any:
    """Floats of 16 and 32 bits, also in lists, in one of both; everything else as it is."""
    if isinstance(value, (list, tuple)):
        return [in_dtype(each, dtype) for each in value]
    floats = isinstance(value, jax.Array) and value.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    return value.astype(dtype) if floats else value


def within(value: Any, dtype: Any) -> jax.Array:
    """In another dtype; what stands for "never", the smallest number of float32, is not infinite in 16 bits."""
    value = jnp.asarray(value)
    if value.dtype == dtype or not all(jnp.issubdtype(each, jnp.inexact) for each in (value.dtype, dtype)):
        return value.astype(dtype)
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    least, most = (jnp.asarray(each, value.dtype) for each in (info.min, info.max))
    return jnp.where(jnp.isinf(value), value, jnp.clip(value, least, most)).astype(dtype)
