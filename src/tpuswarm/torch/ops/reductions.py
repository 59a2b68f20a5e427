"""What is summed up, compared or sorted along axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import as_float, axes, jax_dtype


def _reduced(function: Callable[..., Any], floats: bool = False) -> Callable[..., Any]:
    def apply(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Dtype | None = None) -> Any:
        x = x.astype(jax_dtype(dtype, x.dtype))
        if floats:
            x = as_float(x)
        elif not jnp.issubdtype(x.dtype, jnp.inexact) and function in (jnp.sum, jnp.prod):
            x = x.astype(jnp.int32)
        return function(x, axis=axes(dim, x.ndim), keepdims=keepdim)

    return apply


def _extreme(values: Callable[..., Any], places: Callable[..., Any]) -> Callable[..., Any]:
    """Of all, or along one axis with the places."""

    def apply(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return values(x)
        # jnp.max spreads its gradient over equal elements, torch gives it to the one that it names
        at = places(x, axis=dim, keepdims=True)
        found = jnp.take_along_axis(x, at, axis=dim)
        return (found, at) if keepdim else (jnp.squeeze(found, dim), jnp.squeeze(at, dim))

    return apply


def _place(places: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=None, keepdim=False: places(x, axis=dim, keepdims=keepdim)


def variance(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    """With n - correction below the sum."""
    return jnp.var(x, axis=axes(dim, x.ndim), ddof=1 if correction is None else correction, keepdims=keepdim)


def norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Dtype | None = None) -> Any:
    """Of vectors along axes."""
    x, at = x.astype(jax_dtype(dtype, x.dtype)), axes(dim, x.ndim)
    if ord == 2:
        squares = jnp.sum(jnp.square(x), axis=at, keepdims=keepdim)
        return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0).astype(x.dtype)
    if ord in (float("inf"), float("-inf")):
        return (jnp.max if ord > 0 else jnp.min)(jnp.abs(x), axis=at, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(x != 0, axis=at, keepdims=keepdim).astype(x.dtype)
    return jnp.sum(jnp.abs(x) ** ord, axis=at, keepdims=keepdim) ** (1 / ord)


def _softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, half=False: function(x.astype(jnp.float32) if half else x, dim)


def sort(x: Any, dim: int = -1, descending: bool = False, **given: Any) -> Any:
    """Values and where they were; equal ones stay in their order."""
    dim, descending = given.get("dim", dim), given.get("descending", descending)
    places = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, places, axis=dim), places


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest, or the smallest, along an axis, and where they were."""
    moved = jnp.moveaxis(x, dim, -1)
    _, places = lax.top_k(moved if largest else -moved, k)
    found = jnp.take_along_axis(moved, places, axis=-1)
    return jnp.moveaxis(found, -1, dim), jnp.moveaxis(places, -1, dim)


def _running(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: int, *, dtype: Dtype | None = None) -> Any:
        x = x.astype(jax_dtype(dtype, x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32))
        return function(x, axis=dim)

    return apply


OPS: dict[str, Callable[..., Any]] = {
    "sum": _reduced(jnp.sum), "mean": _reduced(jnp.mean, floats=True), "prod": _reduced(jnp.prod),
    "any": _reduced(jnp.any), "all": _reduced(jnp.all), "amax": _reduced(jnp.max), "amin": _reduced(jnp.min),
    "max": _extreme(jnp.max, jnp.argmax), "min": _extreme(jnp.min, jnp.argmin),
    "argmax": _place(jnp.argmax), "argmin": _place(jnp.argmin), "var": variance,
    "std": lambda *a, **k: jnp.sqrt(variance(*a, **k)),
    "var_mean": lambda x, dim=None, **k: (
        variance(x, dim, **k), jnp.mean(x, axis=axes(dim, x.ndim), keepdims=k.get("keepdim", False))
    ),
    "linalg_vector_norm": norm, "_softmax": _softmax(jax.nn.softmax), "_log_softmax": _softmax(jax.nn.log_softmax),
    "logsumexp": lambda x, dim, keepdim=False: jax.nn.logsumexp(x, axis=axes(dim, x.ndim), keepdims=keepdim),
    "cumsum": _running(jnp.cumsum), "cumprod": _running(jnp.cumprod), "sort": sort, "topk": topk,
    "argsort": lambda x, dim=-1, descending=False: sort(x, dim, descending)[1],
}  # fmt: skip
"""By name."""
