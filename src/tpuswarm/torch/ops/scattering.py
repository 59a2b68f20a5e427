"""What is read or written at places that an array names. Places outside are moved to the nearest inside, as in JAX."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def _places(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if each is None else each for each in indices)


def index(x: Any, indices: Sequence[Any]) -> Any:
    """x[indices], None for whole axes."""
    return x[_places(indices)]


def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """A copy with values at places."""
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype == jnp.bool_:
        mask = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        if values.size == 1:  # x[mask] = number, the only one whose shape does not depend on the data
            new = values.reshape(()).astype(x.dtype)
            return jnp.where(mask, x + new if accumulate else new, x)
    at = x.at[_places(indices)]
    values = values.astype(x.dtype)
    return at.add(values) if accumulate else at.set(values)


def _along(x: Any, dim: int, places: Any) -> tuple[Any, ...]:
    found: list[Any] = list(jnp.indices(places.shape, sparse=True))
    found[dim] = places
    return tuple(found)


def gather(x: Any, dim: int, places: Any, *, sparse_grad: bool = False) -> Any:
    """x at places along one axis."""
    return x[_along(x, dim, places)] if x.ndim else jnp.broadcast_to(x, places.shape)


def scatter(x: Any, dim: int, places: Any, src: Any, *, reduce: str | None = None) -> Any:
    """A copy with `src`, an array or a number, at places along one axis, or added or multiplied there."""
    if not x.ndim:
        return scatter(x[None], 0, jnp.reshape(places, (1,)), jnp.reshape(src, (1,)), reduce=reduce)[0]
    src = jnp.asarray(src, x.dtype)
    src = src[tuple(slice(each) for each in places.shape)] if src.ndim else src
    at = x.at[_along(x, dim, places)]
    return at.set(src) if reduce is None else at.add(src) if reduce == "add" else at.multiply(src)


def scatter_add(x: Any, dim: int, places: Any, src: Any) -> Any:
    """A copy to which `src` is added at places along one axis."""
    return scatter(x, dim, places, src, reduce="add")


def scatter_reduce(x: Any, dim: int, places: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """A copy in which `src` is summed up, multiplied, averaged or compared at places along one axis."""
    if not x.ndim:
        one, at, new = (jnp.reshape(each, -1) for each in (x, places, src))
        return scatter_reduce(one, 0, at, new, reduce, include_self=include_self)[0]
    src = src[tuple(slice(each) for each in places.shape)].astype(x.dtype)
    return _reduced(x, _along(x, dim, places), src, reduce, include_self)


def index_reduce(x: Any, dim: int, places: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """The same for whole parts along one axis."""
    moved, src = jnp.moveaxis(jnp.atleast_1d(x), dim, 0), jnp.moveaxis(jnp.atleast_1d(src), dim, 0).astype(x.dtype)
    found = _reduced(moved, (jnp.atleast_1d(places),), src, reduce, include_self)
    return jnp.moveaxis(found, 0, dim).reshape(x.shape)


def _reduced(x: Any, at: Any, src: Any, reduce: str, include_self: bool) -> Any:
    if not include_self:
        first = {"sum": 0, "mean": 0, "prod": 1, "amax": -math.inf, "amin": math.inf}[reduce]
        if not jnp.issubdtype(x.dtype, jnp.inexact) and math.isinf(first):
            first = np.iinfo(x.dtype).min if first < 0 else np.iinfo(x.dtype).max
        x = x.at[at].set(jnp.asarray(first, x.dtype))
    if reduce == "mean":
        counts = jnp.full(x.shape, int(include_self), jnp.int32).at[at].add(1)
        total, counts = x.at[at].add(src), jnp.maximum(counts, 1).astype(x.dtype)
        return total / counts if jnp.issubdtype(x.dtype, jnp.inexact) else total // counts
    way = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    return getattr(x.at[at], way)(src)


def index_add(x: Any, dim: int, places: Any, src: Any, *, alpha: Any = 1) -> Any:
    """A copy to which parts are added along one axis."""
    moved = jnp.moveaxis(jnp.atleast_1d(x), dim, 0)
    new = moved.at[jnp.atleast_1d(places)].add((jnp.moveaxis(jnp.atleast_1d(src), dim, 0) * alpha).astype(x.dtype))
    return jnp.moveaxis(new, 0, dim).reshape(x.shape)


def masked_scatter(x: Any, mask: Any, src: Any) -> Any:
    """A copy in which the elements of `src` come one after the other where the mask holds."""
    x, mask = jnp.broadcast_arrays(x, mask)
    places = jnp.clip(jnp.cumsum(mask.ravel().astype(jnp.int32)) - 1, 0, src.size - 1)
    return jnp.where(mask, src.ravel()[places].reshape(x.shape).astype(x.dtype), x)


def masked_scatter_backward(gradient: Any, mask: Any, sizes: Sequence[int]) -> Any:
    """Of its `src`."""
    mask = jnp.broadcast_to(mask, gradient.shape).ravel()
    places = jnp.where(mask, jnp.cumsum(mask.astype(jnp.int32)) - 1, math.prod(sizes))
    return jnp.zeros(math.prod(sizes), gradient.dtype).at[places].add(gradient.ravel(), mode="drop").reshape(sizes)


def diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """A copy with `src` on a diagonal of two axes."""
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    along = jnp.arange(src.shape[-1])
    new = moved.at[..., along + max(-offset, 0), along + max(offset, 0)].set(src.astype(x.dtype))
    return jnp.moveaxis(new, (-2, -1), (dim1, dim2))


def _strided(size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    places = np.full((), offset or 0)
    for count, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(count) * step
    return places


def as_strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """A view by steps in memory, of an array without gaps."""
    return x.ravel()[_strided(size, stride, offset)]


def as_strided_scatter(x: Any, src: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """A copy with `src` in such a view."""
    return x.ravel().at[_strided(size, stride, offset)].set(src).reshape(x.shape)


def searchsorted(
    bounds: Any, values: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None,
) -> Any:  # fmt: skip
    """Where values belong between ascending bounds; of several rows of bounds each for its row of values."""
    values = jnp.asarray(values)
    if sorter is not None:
        bounds = jnp.take_along_axis(bounds, sorter, axis=-1)
    side = side or ("right" if right else "left")
    if bounds.ndim == 1:
        return jnp.searchsorted(bounds, values, side=side).astype(jnp.int32)
    bounds, wanted = bounds[..., None, :], values[..., None]
    return (bounds <= wanted if side == "right" else bounds < wanted).sum(-1).astype(jnp.int32)


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """How often each number below `minlength` is there. Raises ValueError without it: the data would decide a shape."""
    if not minlength:
        raise ValueError("bincount without minlength has a shape that depends on the data: give it one")
    return jnp.bincount(x, weights, length=minlength)


def histc(x: Any, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """How many elements are in each of equal parts; what is outside of the bounds does not count."""
    if not x.size:
        return jnp.zeros(bins, x.dtype)
    least, most = (x.min(), x.max()) if low == high else (jnp.asarray(each, x.dtype) for each in (low, high))
    least, most = jnp.where(least == most, least - 1, least), jnp.where(least == most, most + 1, most)
    places = jnp.minimum(((x - least) * bins / (most - least)).astype(jnp.int32), bins - 1)
    places = jnp.where((x >= least) & (x <= most), places, bins)
    return jnp.zeros(bins, x.dtype).at[places.ravel()].add(1, mode="drop")


def bucketize(values: Any, bounds: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Where values belong between ascending bounds."""
    return searchsorted(bounds, values, right=right)


OPS: dict[str, Callable[..., Any]] = {
    "index": index, "_unsafe_index": index, "index_put": index_put, "_unsafe_index_put": index_put,
    "index_select": lambda x, dim, places: jnp.take(x, jnp.atleast_1d(places), axis=dim) if x.ndim else x,
    "index_add": index_add, "index_reduce": index_reduce, "gather": gather, "scatter": scatter,
    "scatter_add": scatter_add, "scatter_reduce": scatter_reduce, "masked_scatter": masked_scatter,
    "masked_scatter_backward": masked_scatter_backward, "diagonal_scatter": diagonal_scatter,
    "as_strided": as_strided, "as_strided_scatter": as_strided_scatter, "searchsorted": searchsorted,
    "bucketize": bucketize, "bincount": bincount,
    "histc": histc,
}  # fmt: skip
"""By name."""
