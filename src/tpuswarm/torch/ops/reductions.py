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
        found = function(x, axis=axes(dim, x.ndim), keepdims=keepdim)
        return found.astype(jnp.uint8) if found.dtype == jnp.bool_ and x.dtype == jnp.uint8 else found

    return apply


def _extreme(values: Callable[..., Any], places: Callable[..., Any]) -> Callable[..., Any]:
    """Of all, or along one axis with the places."""

    def apply(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return values(x)
        if not x.ndim:
            return x, jnp.zeros((), jnp.int32)
        # jnp.max spreads its gradient over equal elements, torch gives it to the one that it names
        at = places(x, axis=dim, keepdims=True)
        found = jnp.take_along_axis(x, at, axis=dim)
        return (found, at) if keepdim else (jnp.squeeze(found, dim), jnp.squeeze(at, dim))

    return apply


def _place(places: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=None, keepdim=False: places(x, axis=dim if x.ndim else None, keepdims=keepdim)


def variance(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    """With n - correction below the sum."""
    return jnp.var(x, axis=axes(dim, x.ndim), ddof=1 if correction is None else correction, keepdims=keepdim)


def variance_mean(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    """And the mean."""
    found = variance(x, dim, correction=correction, keepdim=keepdim)
    return found, jnp.mean(x, axis=axes(dim, x.ndim), keepdims=keepdim)


def norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Dtype | None = None) -> Any:
    """Of vectors along axes."""
    x, at = x.astype(jax_dtype(dtype, x.dtype)), axes(dim, x.ndim)
    x = jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=at, keepdims=keepdim))
    if ord in (float("inf"), float("-inf")):
        return (jnp.max if ord > 0 else jnp.min)(jnp.abs(x), axis=at, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(x != 0, axis=at, keepdims=keepdim).astype(x.dtype)
    return jnp.sum(jnp.abs(x) ** ord, axis=at, keepdims=keepdim) ** (1 / ord)


def distances(a: Any, b: Any, p: float, mode: int | None = None) -> Any:
    """Between each of the points a and each of the points b."""
    return norm(a[..., :, None, :] - b[..., None, :, :], p, [-1])


def _softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: int, half: bool = False) -> Any:
        x = x.astype(jnp.float32) if half else x
        return function(x, dim) if x.ndim else function(x[None], 0)[0]

    return apply


def _without_axes(x: Any) -> Any:
    return x, jnp.zeros((), jnp.int32)


def sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    """Values and where they were; equal ones stay in their order."""
    if not x.ndim:
        return _without_axes(x)
    places = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, places, axis=dim), places


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The largest, or the smallest, along an axis, and where they were."""
    if not x.ndim:
        return tuple(each[0] for each in topk(x[None], k)) if k else (jnp.zeros(0, x.dtype), jnp.zeros(0, jnp.int32))
    moved = jnp.moveaxis(x, dim, -1)
    turned = -moved if jnp.issubdtype(x.dtype, jnp.inexact) else ~moved  # the smallest integer has no negative
    _, places = lax.top_k(moved if largest else turned, k)
    found = jnp.take_along_axis(moved, places, axis=-1)
    return jnp.moveaxis(found, -1, dim), jnp.moveaxis(places, -1, dim)


def running_extreme(largest: bool) -> Callable[..., Any]:
    """The largest, or the smallest, so far along an axis, and where it was: the last of equal ones."""

    def apply(x: Any, dim: int) -> Any:
        if not x.ndim:
            return _without_axes(x)
        places = jnp.broadcast_to(lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim), x.shape)

        def later(one: Any, other: Any) -> Any:
            takes = ((other[0] >= one[0]) if largest else (other[0] <= one[0])) | (other[0] != other[0])
            return jnp.where(takes, other[0], one[0]), jnp.where(takes, other[1], one[1])

        return lax.associative_scan(later, (x, places), axis=dim)

    return apply


def median(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower one of two; of all, or along an axis with its place."""
    if dim is None and not x.size and jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.full((), jnp.nan, x.dtype)
    if dim is None:
        return median(x.ravel(), 0)[0]
    if not x.ndim:
        return _without_axes(x)
    places = jnp.argsort(x, axis=dim, stable=True)
    at = lax.index_in_dim(places, (x.shape[dim] - 1) // 2, dim % x.ndim)
    unknown = x != x
    at = jnp.where(unknown.any(dim, keepdims=True), jnp.argmax(unknown, axis=dim, keepdims=True), at)
    found = jnp.take_along_axis(x, at, axis=dim)
    return (found, at) if keepdim else (jnp.squeeze(found, dim), jnp.squeeze(at, dim))


def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest along an axis, and its place."""
    if not x.ndim:
        return _without_axes(x)
    values, places = sort(x, dim)
    found = [lax.index_in_dim(each, k - 1, dim % x.ndim, keepdims=keepdim) for each in (values, places)]
    return tuple(found)


def _running(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: int, *, dtype: Dtype | None = None) -> Any:
        x = x.astype(jax_dtype(dtype, x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32))
        return function(x, axis=dim) if x.ndim else x

    return apply


OPS: dict[str, Callable[..., Any]] = {
    "sum": _reduced(jnp.sum), "mean": _reduced(jnp.mean, floats=True), "prod": _reduced(jnp.prod),
    "any": _reduced(jnp.any), "all": _reduced(jnp.all), "amax": _reduced(jnp.max), "amin": _reduced(jnp.min),
    "max": _extreme(jnp.max, jnp.argmax), "min": _extreme(jnp.min, jnp.argmin),
    "argmax": _place(jnp.argmax), "argmin": _place(jnp.argmin), "var": variance,
    "std": lambda x, dim=None, *, correction=1, keepdim=False: jnp.sqrt(
        variance(x, dim, correction=correction, keepdim=keepdim)
    ), "var_mean": variance_mean,
    "linalg_vector_norm": norm, "_cdist_forward": distances, "_softmax": _softmax(jax.nn.softmax),
    "_log_softmax": _softmax(jax.nn.log_softmax),
    "logsumexp": lambda x, dim, keepdim=False: jax.nn.logsumexp(x, axis=axes(dim, x.ndim), keepdims=keepdim),
    "cummax": running_extreme(True), "cummin": running_extreme(False), "median": median,
    "kthvalue": kthvalue, "dist": lambda a, b, p=2: norm(a - b, p),
    "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x,
    "cumsum": _running(jnp.cumsum), "cumprod": _running(jnp.cumprod), "sort": sort, "topk": topk,
    "argsort": lambda x, dim=-1, descending=False, *, stable=False: sort(x, dim, descending)[1],
}  # fmt: skip
"""By name."""
