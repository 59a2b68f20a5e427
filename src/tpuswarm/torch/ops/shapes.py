"""Reshape, slice, join, pad and create arrays."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import axes, jax_dtype


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


def _reflection_pad(x: Any, padding: Sequence[int]) -> Any:
    widths = _pad_widths(x, padding)
    inside = [slice(max(-low, 0), size - max(-high, 0)) for size, (low, high) in zip(x.shape, widths, strict=True)]
    return jnp.pad(x[tuple(inside)], [(max(low, 0), max(high, 0)) for low, high in widths], mode="reflect")


def replication_pad(x: Any, padding: Sequence[int]) -> Any:
    """Repeat the border; negative padding crops."""
    for axis, (low, high) in enumerate(_pad_widths(x, padding)):
        if low or high:
            positions = np.clip(np.arange(-low, x.shape[axis] + high), 0, x.shape[axis] - 1)
            x = jnp.take(x, positions, axis=axis)
    return x


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


def _assert_async(x: Any, message: str = "") -> None:
    return None


def _assert_tensor_metadata(x: Any, size: Any = None, stride: Any = None, dtype: Any = None) -> None:
    return None


OPS: dict[str, Callable[..., Any]] = {
    "view": jnp.reshape, "_unsafe_view": jnp.reshape, "permute": jnp.transpose, "t": jnp.transpose,
    "transpose": lambda x, dim0, dim1: jnp.swapaxes(x, dim0, dim1) if x.ndim else x,
    "unsqueeze": jnp.expand_dims, "squeeze": _squeeze, "expand": _expand, "cat": _cat,
    "stack": lambda xs, dim=0: jnp.stack(xs, dim), "slice": _slice, "slice_scatter": _slice_scatter,
    "narrow": lambda x, dim, start, length: _slice(x, dim, start, start + length), "select": _select,
    "select_scatter": lambda x, src, dim, index: x.at[_at(x, dim, index)].set(src.astype(x.dtype)),
    "split": _split, "split_with_sizes": _split, "unbind": lambda x, dim=0: list(jnp.moveaxis(x, dim, 0)),
    "flip": lambda x, dims: jnp.flip(x, tuple(dims)) if x.ndim else x, "repeat": jnp.tile, "roll": _roll,
    "constant_pad_nd": _constant_pad,
    **{f"reflection_pad{n}d": _reflection_pad for n in (1, 2, 3)},
    **{f"replication_pad{n}d": replication_pad for n in (1, 2, 3)},
    "diagonal": jnp.diagonal, "tril": jnp.tril, "triu": jnp.triu, "unfold": _unfold,
    "full": _full, "full_like": _full_like,
    **{name: lambda size, *, dtype=None: _full(size, 0.0, dtype=dtype) for name in ("empty", "_efficientzerotensor")},
    **{name: lambda size, order, *, dtype=None: _full(size, 0.0, dtype=dtype) for name in (
        "empty_strided", "empty_permuted",
    )},
    "new_empty_strided": lambda x, size, stride, *, dtype=None: jnp.zeros(size, jax_dtype(dtype, x.dtype)),
    "scalar_tensor": lambda value, *, dtype=None: _full((), value, dtype=dtype or Dtype("float32")),
    "arange": _arange, "eye": lambda n, m=None, *, dtype=None: jnp.eye(n, m, dtype=jax_dtype(dtype, jnp.float32)),
    "_assert_tensor_metadata": _assert_tensor_metadata, "_assert_async": _assert_async, "getitem": operator.getitem,
}  # fmt: skip
