"""Operations along axes: sums, extremes, norms, softmax, cumulative operations and sorting."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import as_float, axes, is_inexact, jax_dtype


def _reduction(function: Callable[..., Any], to_float: bool = False) -> Callable[..., Any]:
    def apply(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Dtype | None = None) -> Any:
        x = x.astype(jax_dtype(dtype, x.dtype))
        if to_float:
            x = as_float(x)
        elif not is_inexact(x) and function in (jnp.sum, jnp.prod):
            x = x.astype(jnp.int32)
        y = function(x, axis=axes(dim, x.ndim), keepdims=keepdim)
        return y.astype(jnp.uint8) if y.dtype == jnp.bool_ and x.dtype == jnp.uint8 else y

    return apply


def _with_zero_index(x: Any) -> Any:
    return x, jnp.zeros((), jnp.int32)


def _take_along(x: Any, indices: Any, dim: int, keepdim: bool) -> Any:
    values = jnp.take_along_axis(x, indices, axis=dim)
    return (values, indices) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(indices, dim))


def _extreme(function: Callable[..., Any], arg_function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return function(x)
        if not x.ndim:
            return _with_zero_index(x)
        return function(x, axis=dim, keepdims=keepdim), arg_function(x, axis=dim, keepdims=keepdim)

    return apply


def _arg_extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=None, keepdim=False: function(x, axis=dim if x.ndim else None, keepdims=keepdim)


def _var(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(x, axis=axes(dim, x.ndim), ddof=1 if correction is None else correction, keepdims=keepdim)


def _var_mean(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    mean = jnp.mean(x, axis=axes(dim, x.ndim), keepdims=keepdim)
    return _var(x, dim, correction=correction, keepdim=keepdim), mean


def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Dtype | None = None) -> Any:
    x, axis = x.astype(jax_dtype(dtype, x.dtype)), axes(dim, x.ndim)
    x = jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=axis, keepdims=keepdim))
    if math.isinf(ord):
        return (jnp.max if ord > 0 else jnp.min)(jnp.abs(x), axis=axis, keepdims=keepdim)
    if ord == 0:
        return jnp.sum(x != 0, axis=axis, keepdims=keepdim).astype(x.dtype)
    return jnp.sum(jnp.abs(x) ** ord, axis=axis, keepdims=keepdim) ** (1 / ord)


def _pairwise_distances(a: Any, b: Any, p: float, mode: int | None = None) -> Any:
    return _vector_norm(a[..., :, None, :] - b[..., None, :, :], p, [-1])


def _distances_of_pairs(x: Any, p: float = 2.0) -> Any:
    one, other = np.triu_indices(len(x), 1)
    return _vector_norm(x[one] - x[other], p, [-1])


def _softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: int, half_to_float: bool = False) -> Any:
        x = x.astype(jnp.float32) if half_to_float else x
        return function(x, dim) if x.ndim else function(x[None], 0)[0]

    return apply


def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    if not x.ndim:
        return _with_zero_index(x)
    return _take_along(x, jnp.argsort(x, axis=dim, stable=True, descending=descending), dim, True)


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not x.ndim:
        return tuple(y[0] for y in _topk(x[None], k)) if k else (jnp.zeros(0, x.dtype), jnp.zeros(0, jnp.int32))
    moved = jnp.moveaxis(x, dim, -1)
    reversed_ = -moved if is_inexact(x) else ~moved  # negating the smallest integer overflows
    _, indices = lax.top_k(moved if largest else reversed_, k)
    return _take_along(x, jnp.moveaxis(indices, -1, dim), dim, True)


def _running_extreme(largest: bool) -> Callable[..., Any]:
    def apply(x: Any, dim: int) -> Any:
        if not x.ndim:
            return _with_zero_index(x)
        indices = jnp.broadcast_to(lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim), x.shape)

        def later(a: Any, b: Any) -> Any:  # the last of equal elements wins, and NaN always does
            takes_b = ((b[0] >= a[0]) if largest else (b[0] <= a[0])) | (b[0] != b[0])
            return jnp.where(takes_b, b[0], a[0]), jnp.where(takes_b, b[1], a[1])

        return lax.associative_scan(later, (x, indices), axis=dim)

    return apply


def _median(ignores_nan: bool) -> Callable[..., Any]:
    def apply(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the lower median of all elements, or along an axis with its index."""
        if dim is None and not x.size and is_inexact(x):
            return jnp.full((), jnp.nan, x.dtype)
        if dim is None:
            return apply(x.ravel(), 0)[0]
        if not x.ndim:
            return _with_zero_index(x)
        is_nan = x != x
        middle = jnp.maximum((~is_nan).sum(dim, keepdims=True) - 1, 0) // 2  # NaN are last in the order
        index = jnp.take_along_axis(jnp.argsort(x, axis=dim, stable=True), middle, axis=dim)
        if not ignores_nan:
            index = jnp.where(is_nan.any(dim, keepdims=True), jnp.argmax(is_nan, axis=dim, keepdims=True), index)
        return _take_along(x, index, dim, keepdim)

    return apply


def _mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the smallest of the most frequent elements, and the index of the last one equal to it."""
    if not x.ndim:
        return _with_zero_index(x)
    axis = dim % x.ndim
    order = jnp.argsort(x, axis=axis, stable=True)
    values, places = jnp.take_along_axis(x, order, axis=axis), lax.broadcasted_iota(jnp.int32, x.shape, axis)
    first_of_equal = lax.cummax(jnp.where(values == jnp.roll(values, 1, axis), 0, places), axis)
    longest = jnp.argmax(places - first_of_equal, axis=axis, keepdims=True)
    return _take_along(x, jnp.take_along_axis(order, longest, axis=axis), axis, keepdim)


def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not x.ndim:
        return _with_zero_index(x)
    order = jnp.argsort(x, axis=dim, stable=True)
    return _take_along(x, lax.index_in_dim(order, k - 1, dim % x.ndim), dim, keepdim)


def _cumulative(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: int, *, dtype: Dtype | None = None) -> Any:
        x = x.astype(jax_dtype(dtype, x.dtype if is_inexact(x) else jnp.int32))
        return function(x, axis=dim) if x.ndim else x

    return apply


OPS: dict[str, Callable[..., Any]] = {
    "sum": _reduction(jnp.sum), "mean": _reduction(jnp.mean, to_float=True), "prod": _reduction(jnp.prod),
    "any": _reduction(jnp.any), "all": _reduction(jnp.all), "amax": _reduction(jnp.max), "amin": _reduction(jnp.min),
    "max": _extreme(jnp.max, jnp.argmax), "min": _extreme(jnp.min, jnp.argmin),
    "argmax": _arg_extreme(jnp.argmax), "argmin": _arg_extreme(jnp.argmin),
    "var": _var, "var_mean": _var_mean, "linalg_vector_norm": _vector_norm,
    "dist": lambda a, b, p=2: _vector_norm(a - b, p), "_cdist_forward": _pairwise_distances,
    "_pdist_forward": _distances_of_pairs,
    "_softmax": _softmax(jax.nn.softmax), "_log_softmax": _softmax(jax.nn.log_softmax),
    "logsumexp": lambda x, dim, keepdim=False: jax.nn.logsumexp(x, axis=axes(dim, x.ndim), keepdims=keepdim),
    "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim) if x.ndim else x,
    "cumsum": _cumulative(jnp.cumsum), "cumprod": _cumulative(jnp.cumprod),
    "cummax": _running_extreme(True), "cummin": _running_extreme(False),
    "sort": _sort, "topk": _topk, "kthvalue": _kthvalue, "median": _median(False), "nanmedian": _median(True),
    "mode": _mode,
}  # fmt: skip
