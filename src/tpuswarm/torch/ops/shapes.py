"""Reshape, slice, join, pad and create arrays."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import axes, jax_dtype, with_axes


def _expand(x: Any, size: Sequence[int], *, implicit: bool = False) -> Any:
    added = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[axis - added] if n == -1 else n for axis, n in enumerate(size)])


def _squeeze(x: Any, dim: Any = None) -> Any:
    return jnp.squeeze(x, tuple(axis for axis in axes(dim, x.ndim) if x.shape[axis] == 1))


def _cat(arrays: Sequence[Any], dim: int = 0) -> Any:
    arrays = [array for array in arrays if array.size or array.ndim > 1] or arrays[:1]  # torch skips empty vectors
    dtype = jnp.result_type(*(array.dtype for array in arrays))
    return jnp.concatenate([array.astype(dtype) for array in arrays], dim)


def _at(x: Any, dim: int, position: Any) -> tuple[Any, ...]:
    index = [slice(None)] * x.ndim
    index[dim] = position
    return tuple(index)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x[_at(x, dim, slice(start, end, step))]


def _slice_scatter(x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x.at[_at(x, dim, slice(start, end, step))].set(src.astype(x.dtype))


def _select(x: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(x, index % x.shape[dim], dim % x.ndim, keepdims=False)


def _split(x: Any, sizes: Any, dim: int = 0) -> list[Any]:
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - start) for start in range(0, x.shape[dim], sizes)]
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


def _roll(x: Any, shifts: Any, dims: Any = None) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


def _pad_widths(x: Any, padding: Sequence[int]) -> list[tuple[int, int]]:
    pairs = [(padding[at], padding[at + 1]) for at in range(len(padding) - 2, -1, -2)]  # torch begins at the last axis
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs


def _constant_pad(x: Any, padding: Sequence[int], value: Any = 0) -> Any:
    return lax.pad(x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in _pad_widths(x, padding)])


def _pad_by(position_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a padding that reads positions outside at `position_of(position, size)`; negative padding crops."""

    def pad(x: Any, padding: Sequence[int]) -> Any:
        for axis, (low, high) in enumerate(_pad_widths(x, padding)):
            if low or high:
                positions = position_of(np.arange(-low, x.shape[axis] + high), x.shape[axis])
                x = jnp.take(x, positions, axis=axis)
        return x

    return pad


_replication_pad = _pad_by(lambda position, size: np.clip(position, 0, size - 1))
_reflection_pad = _pad_by(lambda position, size: size - 1 - np.abs(size - 1 - np.abs(position)))


def _full(size: Sequence[int], value: Any, *, dtype: Dtype | None = None) -> Any:
    default = jnp.float32 if isinstance(value, float) else jnp.bool_ if isinstance(value, bool) else jnp.int32
    return jnp.full(size, value, jax_dtype(dtype, default))


def _full_like(x: Any, value: Any, *, dtype: Dtype | None = None) -> Any:
    return jnp.full(x.shape, value, jax_dtype(dtype, x.dtype))


def _arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Dtype | None = None) -> Any:
    start, end = (0, start) if end is None else (start, end)
    has_floats = any(isinstance(bound, float) for bound in (start, end, step))
    return jnp.arange(start, end, step, jax_dtype(dtype, jnp.float32 if has_floats else jnp.int32))


def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    if not x.ndim:
        return x[None][:size]
    dim %= x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    return jnp.moveaxis(jnp.take(x, starts[:, None] + np.arange(size), axis=dim), dim + 1, -1)


OPS: dict[str, Callable[..., Any]] = {
    "view": jnp.reshape, "_unsafe_view": jnp.reshape, "permute": jnp.transpose, "t": jnp.transpose,
    **with_axes({"transpose": lambda x, dim0, dim1: jnp.swapaxes(x, dim0, dim1)}),
    "unsqueeze": jnp.expand_dims, "squeeze": _squeeze, "expand": _expand, "cat": _cat,
    "stack": lambda xs, dim=0: jnp.stack(xs, dim), "slice": _slice, "slice_scatter": _slice_scatter,
    "narrow": lambda x, dim, start, length: _slice(x, dim, start, start + length), "select": _select,
    "select_scatter": lambda x, src, dim, index: x.at[_at(x, dim, index)].set(src.astype(x.dtype)),
    "split": _split, "split_with_sizes": _split, "unbind": lambda x, dim=0: list(jnp.moveaxis(x, dim, 0)),
    **with_axes({"flip": lambda x, dims: jnp.flip(x, tuple(dims))}), "repeat": jnp.tile, "roll": _roll,
    "constant_pad_nd": _constant_pad,
    **{f"reflection_pad{n}d": _reflection_pad for n in (1, 2, 3)},
    **{f"replication_pad{n}d": _replication_pad for n in (1, 2, 3)},
    **{f"replication_pad{n}d_backward": lambda gradient, x, padding: (
        jax.vjp(lambda x: _replication_pad(x, padding), x)[1](gradient)[0]
    ) for n in (1, 2, 3)},
    "diagonal": jnp.diagonal, "tril": jnp.tril, "triu": jnp.triu, "unfold": _unfold,
    "full": _full, "full_like": _full_like,
    **{name: lambda size, *, dtype=None: _full(size, 0.0, dtype=dtype) for name in ("empty", "_efficientzerotensor")},
    **{name: lambda size, order, *, dtype=None: _full(size, 0.0, dtype=dtype) for name in (
        "empty_strided", "empty_permuted",
    )},
    "new_empty_strided": lambda x, size, stride, *, dtype=None: jnp.zeros(size, jax_dtype(dtype, x.dtype)),
    "scalar_tensor": lambda value, *, dtype=None: _full((), value, dtype=dtype or Dtype("float32")),
    "triu_indices": lambda rows, columns, offset=0, *, dtype=None: jnp.stack(np.triu_indices(rows, offset, columns)),
    "arange": _arange, "eye": lambda n, m=None, *, dtype=None: jnp.eye(n, m, dtype=jax_dtype(dtype, jnp.float32)),
    "getitem": operator.getitem,
}  # fmt: skip
