"""Operations along axes: sums, extremes, softmax, cumulative operations and sorting."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import as_float, axes, is_inexact, jax_dtype, with_axes


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


def _take_along(x: Any, indices: Any, dim: int, keepdim: bool) -> Any:
    values = jnp.take_along_axis(x, indices, axis=dim)
    return (values, indices) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(indices, dim))


def _extreme(function: Callable[..., Any], arg_function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return function(x)
        return function(x, axis=dim, keepdims=keepdim), arg_function(x, axis=dim, keepdims=keepdim)

    return apply


def _arg_extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim=None, keepdim=False: function(x, axis=dim, keepdims=keepdim)


def _var(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(x, axis=axes(dim, x.ndim), ddof=1 if correction is None else correction, keepdims=keepdim)


def _var_mean(x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    mean = jnp.mean(x, axis=axes(dim, x.ndim), keepdims=keepdim)
    return _var(x, dim, correction=correction, keepdim=keepdim), mean


def _nll_backward(
    gradient: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any
) -> Any:  # fmt: skip
    """Return the gradient of log probabilities by comparing classes, as a scatter takes memory."""
    axis = min(1, x.ndim - 1)
    counts = target != ignore_index
    gradient = gradient / total_weight if reduction == 1 else gradient  # a mean
    scaled = jnp.where(counts, -gradient * (1 if weight is None else weight[jnp.where(counts, target, 0)]), 0)
    classes = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(classes == jnp.expand_dims(target, axis), jnp.expand_dims(scaled, axis), 0).astype(x.dtype)


def _softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: int, half_to_float: bool = False) -> Any:
        return function(x.astype(jnp.float32) if half_to_float else x, dim)

    return apply


def _sort(x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    return _take_along(x, jnp.argsort(x, axis=dim, stable=True, descending=descending), dim, True)


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    moved = jnp.moveaxis(x, dim, -1)
    reversed_ = -moved if is_inexact(x) else ~moved  # negating the smallest integer overflows
    _, indices = lax.top_k(moved if largest else reversed_, k)
    return _take_along(x, jnp.moveaxis(indices, -1, dim), dim, True)


def _running_extreme(largest: bool) -> Callable[..., Any]:
    def apply(x: Any, dim: int) -> Any:
        indices = lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)

        def later(a: Any, b: Any) -> Any:  # the last of equal elements wins, and NaN always does
            takes_b = ((b[0] >= a[0]) if largest else (b[0] <= a[0])) | (b[0] != b[0])
            return jnp.where(takes_b, b[0], a[0]), jnp.where(takes_b, b[1], a[1])

        return lax.associative_scan(later, (x, indices), axis=dim)

    return apply


def _median(ignores_nan: bool) -> Callable[..., Any]:
    def apply(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        """Return the lower median of all elements, or along an axis with its index."""
        if dim is None:
            return apply(x.ravel(), 0)[0] if x.size else jnp.full((), jnp.nan, x.dtype)
        is_nan = x != x
        middle = jnp.maximum((~is_nan).sum(dim, keepdims=True) - 1, 0) // 2  # NaN are last in the order
        index = jnp.take_along_axis(jnp.argsort(x, axis=dim, stable=True), middle, axis=dim)
        if not ignores_nan:
            index = jnp.where(is_nan.any(dim, keepdims=True), jnp.argmax(is_nan, axis=dim, keepdims=True), index)
        return _take_along(x, index, dim, keepdim)

    return apply


def _mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the smallest of the most frequent elements, and the index of the last one equal to it."""
    axis = dim % x.ndim
    order = jnp.argsort(x, axis=axis, stable=True)
    values, places = jnp.take_along_axis(x, order, axis=axis), lax.broadcasted_iota(jnp.int32, x.shape, axis)
    first_of_equal = lax.cummax(jnp.where(values == jnp.roll(values, 1, axis), 0, places), axis)
    longest = jnp.argmax(places - first_of_equal, axis=axis, keepdims=True)
    return _take_along(x, jnp.take_along_axis(order, longest, axis=axis), axis, keepdim)


def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    order = jnp.argsort(x, axis=dim, stable=True)
    return _take_along(x, lax.index_in_dim(order, k - 1, dim % x.ndim), dim, keepdim)


def _cumulative(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: int, *, dtype: Dtype | None = None) -> Any:
        x = x.astype(jax_dtype(dtype, x.dtype if is_inexact(x) else jnp.int32))
        return function(x, axis=dim)

    return apply


OPS: dict[str, Callable[..., Any]] = {
    "sum": _reduction(jnp.sum), "mean": _reduction(jnp.mean, to_float=True), "prod": _reduction(jnp.prod),
    "any": _reduction(jnp.any), "all": _reduction(jnp.all), "amax": _reduction(jnp.max), "amin": _reduction(jnp.min),
    "var": _var, "var_mean": _var_mean, "nll_loss_backward": _nll_backward, "nll_loss2d_backward": _nll_backward,
    "logsumexp": lambda x, dim, keepdim=False: jax.nn.logsumexp(x, axis=axes(dim, x.ndim), keepdims=keepdim),
    **with_axes({
        "max": _extreme(jnp.max, jnp.argmax), "min": _extreme(jnp.min, jnp.argmin),
        "argmax": _arg_extreme(jnp.argmax), "argmin": _arg_extreme(jnp.argmin),
        "_softmax": _softmax(jax.nn.softmax), "_log_softmax": _softmax(jax.nn.log_softmax),
        "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim),
        "cumsum": _cumulative(jnp.cumsum), "cumprod": _cumulative(jnp.cumprod),
        "cummax": _running_extreme(True), "cummin": _running_extreme(False),
        "sort": _sort, "topk": _topk, "kthvalue": _kthvalue, "median": _median(False), "nanmedian": _median(True),
        "mode": _mode,
    }),
}  # fmt: skip
