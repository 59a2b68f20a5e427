"""Read and write elements at positions that an array gives; reading outside an array gives NaN."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpuswarm.torch.ops.dtypes import is_inexact, lowest, with_axes


def _as_index(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def take(x: Any, index: tuple[Any, ...], *, is_negative_valid: bool = False) -> Any:
    """Return elements of x, and NaN or the smallest integer where torch raises an error."""
    return x.at[index].get(mode="fill", wrap_negative_indices=is_negative_valid)


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    is_mask = len(indices) == 1 and indices[0] is not None and indices[0].dtype == jnp.bool_
    values = values.astype(x.dtype)
    if is_mask and values.size == 1:  # x[mask] = number, the only form whose shape does not depend on the data
        mask = indices[0].reshape(indices[0].shape + (1,) * (x.ndim - indices[0].ndim))
        return jnp.where(mask, x + values.reshape(()) if accumulate else values.reshape(()), x)
    at = x.at[_as_index(indices)]
    return at.add(values) if accumulate else at.set(values)


def _along(x: Any, dim: int, positions: Any) -> tuple[Any, ...]:
    index: list[Any] = list(jnp.indices(positions.shape, sparse=True))
    index[dim] = positions
    return tuple(index)


def _gather(x: Any, dim: int, positions: Any, *, sparse_grad: bool = False) -> Any:
    return take(x, _along(x, dim, positions)) if x.ndim else jnp.broadcast_to(x, positions.shape)


def _index_select(x: Any, dim: int, positions: Any) -> Any:
    return take(x, (slice(None),) * (dim % x.ndim) + (jnp.atleast_1d(positions),))


def _scatter(
    x: Any, dim: int, positions: Any, src: Any, reduce: str | None = None, *, include_self: bool = True
) -> Any:  # fmt: skip
    src, at = jnp.asarray(src, x.dtype), _along(x, dim, positions)
    src = src[tuple(map(slice, positions.shape))] if src.ndim else src
    return x.at[at].set(src) if reduce is None else _reduce_at(x, at, src, reduce, include_self)


def _index_reduce(x: Any, dim: int, positions: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    moved, src = (jnp.moveaxis(jnp.atleast_1d(array), dim, 0) for array in (x, src))
    return jnp.moveaxis(_reduce_at(moved, (jnp.atleast_1d(positions),), src, reduce, include_self), 0, dim)


def _reduce_at(x: Any, at: Any, src: Any, reduce: str, include_self: bool) -> Any:
    src = src.astype(x.dtype)
    if not include_self:
        if reduce == "amax":
            neutral = lowest(x.dtype)
        elif reduce == "amin":
            neutral = np.inf if is_inexact(x) else np.iinfo(x.dtype).max
        else:
            neutral = 1 if reduce == "prod" else 0
        x = x.at[at].set(jnp.asarray(neutral, x.dtype))
    if reduce == "mean":
        counts = jnp.full(x.shape, int(include_self), jnp.int32).at[at].add(1)
        total, counts = x.at[at].add(src), jnp.maximum(counts, 1).astype(x.dtype)
        return total / counts if is_inexact(x) else total // counts
    return getattr(x.at[at], {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}.get(reduce, reduce))(src)


def _masked_scatter(x: Any, mask: Any, src: Any) -> Any:
    x, mask = jnp.broadcast_arrays(x, mask)
    order = jnp.clip(jnp.cumsum(mask.ravel().astype(jnp.int32)) - 1, 0, src.size - 1)
    return jnp.where(mask, src.ravel()[order].reshape(x.shape).astype(x.dtype), x)


def _masked_scatter_backward(gradient: Any, mask: Any, sizes: Sequence[int]) -> Any:
    mask, count = jnp.broadcast_to(mask, gradient.shape).ravel(), math.prod(sizes)
    order = jnp.where(mask, jnp.cumsum(mask.astype(jnp.int32)) - 1, count)
    return jnp.zeros(count, gradient.dtype).at[order].add(gradient.ravel(), mode="drop").reshape(sizes)


def _diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    along = jnp.arange(src.shape[-1])
    moved = moved.at[..., along + max(-offset, 0), along + max(offset, 0)].set(src.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


def _strided_positions(size: Sequence[int], stride: Sequence[int], offset: int | None) -> Any:
    positions = np.full((), offset or 0)
    for count, step in zip(size, stride, strict=True):
        positions = positions[..., None] + np.arange(count) * step
    return positions


def _as_strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    return x.ravel()[_strided_positions(size, stride, offset)]


def _as_strided_scatter(x: Any, src: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    return x.ravel().at[_strided_positions(size, stride, offset)].set(src).reshape(x.shape)


def _searchsorted(
    bounds: Any, values: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None,
) -> Any:  # fmt: skip
    values = jnp.asarray(values)
    bounds = bounds if sorter is None else jnp.take_along_axis(bounds, sorter, axis=-1)
    side = side or ("right" if right else "left")
    if bounds.ndim == 1:
        return jnp.searchsorted(bounds, values, side=side).astype(jnp.int32)
    bounds, values = bounds[..., None, :], values[..., None]  # a row of bounds for each row of values
    return (bounds <= values if side == "right" else bounds < values).sum(-1).astype(jnp.int32)


def _bucketize(values: Any, bounds: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _searchsorted(bounds, values, right=right)


def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    if not x.size:
        return jnp.zeros(bins, x.dtype)
    low, high = (x.min(), x.max()) if min == max else (jnp.asarray(bound, x.dtype) for bound in (min, max))
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    positions = jnp.minimum(((x - low) * bins / (high - low)).astype(jnp.int32), bins - 1)
    positions = jnp.where((x >= low) & (x <= high), positions, bins)
    return jnp.zeros(bins, x.dtype).at[positions.ravel()].add(1, mode="drop")


OPS: dict[str, Callable[..., Any]] = {
    "index": lambda x, indices: take(x, _as_index(indices), is_negative_valid=True),
    "_unsafe_index": lambda x, indices: x[_as_index(indices)], "index_put": _index_put, "_unsafe_index_put": _index_put,
    **with_axes({
        "index_select": _index_select, "index_reduce": _index_reduce, "scatter": _scatter,
        "index_add": lambda x, dim, positions, src, *, alpha=1: _index_reduce(x, dim, positions, src * alpha, "sum"),
        "scatter_add": lambda x, dim, positions, src: _scatter(x, dim, positions, src, reduce="add"),
        "scatter_reduce": _scatter,
    }),
    "gather": _gather,
    "put": lambda x, positions, src, accumulate=False: (
        _index_put(x.ravel(), [positions.ravel()], src.ravel(), accumulate).reshape(x.shape)
    ),
    "masked_scatter": _masked_scatter, "masked_scatter_backward": _masked_scatter_backward,
    "diagonal_scatter": _diagonal_scatter,
    "as_strided": _as_strided, "as_strided_scatter": _as_strided_scatter, "searchsorted": _searchsorted,
    "bucketize": _bucketize, "histc": _histc,
}  # fmt: skip
