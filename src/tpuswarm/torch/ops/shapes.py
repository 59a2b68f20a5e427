"""What changes the shape of arrays, takes parts of them, or makes new ones."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import axes, jax_dtype


def expand(x: Any, size: Sequence[int], *, implicit: bool = False) -> Any:
    """Repeat axes of length 1; -1 keeps one as it is."""
    missing = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[at - missing] if each == -1 else each for at, each in enumerate(size)])


def squeeze(x: Any, dim: Any = None) -> Any:
    """Without axes of length 1."""
    return jnp.squeeze(x, tuple(at for at in axes(dim, x.ndim) if x.shape[at] == 1))


def cat(arrays: Sequence[Any], dim: int = 0) -> Any:
    """One after the other; torch leaves out empty ones of one axis."""
    kept = [each for each in arrays if each.size or each.ndim > 1] or list(arrays[:1])
    dtype = jnp.result_type(*(each.dtype for each in kept))
    return jnp.concatenate([each.astype(dtype) for each in kept], dim)


def _part(x: Any, dim: int, start: Any, end: Any, step: int) -> tuple[slice, ...]:
    found = [slice(None)] * x.ndim
    found[dim] = slice(start, end, step)
    return tuple(found)


def slice_(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """A part of one axis."""
    return x[_part(x, dim, start, end, step)]


def slice_scatter(x: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """A copy in which `src` is a part of one axis."""
    return x.at[_part(x, dim, start, end, step)].set(src.astype(x.dtype))


def select(x: Any, dim: int, index: int) -> Any:
    """One place of an axis, without it."""
    return lax.index_in_dim(x, index % x.shape[dim], dim % x.ndim, keepdims=False)


def select_scatter(x: Any, src: Any, dim: int, index: int) -> Any:
    """A copy in which `src` is at one place of an axis."""
    found: list[Any] = [slice(None)] * x.ndim
    found[dim] = index
    return x.at[tuple(found)].set(src.astype(x.dtype))


def split(x: Any, sizes: Any, dim: int = 0) -> list[Any]:
    """Parts of given lengths, or of one length with a shorter last one."""
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - start) for start in range(0, x.shape[dim], sizes)]
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


def repeat(x: Any, counts: Sequence[int]) -> Any:
    """All of it, again along each axis."""
    return jnp.tile(x, counts)


def roll(x: Any, shifts: Any, dims: Any = None) -> Any:
    """Shifted around."""
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x.ravel(), shifts[0]).reshape(x.shape)


def _pairs(x: Any, padding: Sequence[int]) -> list[tuple[int, int]]:
    """torch names the last axis first."""
    pairs = [(padding[at], padding[at + 1]) for at in range(len(padding) - 2, -1, -2)]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs


def constant_pad_nd(x: Any, padding: Sequence[int], value: Any = 0) -> Any:
    """With a number around it; negative padding cuts."""
    low_high = [(low, high, 0) for low, high in _pairs(x, padding)]
    return lax.pad(x, jnp.asarray(value, x.dtype), low_high)


def reflection_pad(x: Any, padding: Sequence[int]) -> Any:
    """With a mirror image around it; negative padding cuts."""
    pairs = _pairs(x, padding)
    cut = [slice(max(-low, 0), size - max(-high, 0)) for size, (low, high) in zip(x.shape, pairs, strict=True)]
    return jnp.pad(x[tuple(cut)], [(max(low, 0), max(high, 0)) for low, high in pairs], mode="reflect")


def replication_pad(x: Any, padding: Sequence[int]) -> Any:
    """With its border around it; negative padding cuts."""
    for at, (low, high) in enumerate(_pairs(x, padding)):
        if low or high:
            x = jnp.take(x, np.clip(np.arange(-low, x.shape[at] + high), 0, x.shape[at] - 1), axis=at)
    return x


def _dtype_of(value: Any) -> Any:
    return jnp.float32 if isinstance(value, float) else jnp.bool_ if isinstance(value, bool) else jnp.int32


def full(size: Sequence[int], value: Any, *, dtype: Dtype | None = None) -> Any:
    """A new array of one number."""
    return jnp.full(size, value, jax_dtype(dtype, _dtype_of(value)))


def full_like(x: Any, value: Any, *, dtype: Dtype | None = None) -> Any:
    """The same in the shape of another one."""
    return jnp.full(x.shape, value, jax_dtype(dtype, x.dtype))


def new_full(x: Any, size: Sequence[int], value: Any, *, dtype: Dtype | None = None) -> Any:
    """The same in a shape, with the dtype of another one."""
    return jnp.full(size, value, jax_dtype(dtype, x.dtype))


def arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Dtype | None = None) -> Any:
    """Numbers one after the other; one bound is the end."""
    start, end = (0, start) if end is None else (start, end)
    floats = any(isinstance(each, float) for each in (start, end, step))
    return jnp.arange(start, end, step, jax_dtype(dtype, jnp.float32 if floats else jnp.int32))


def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Of two axes, which go; it is the last one."""
    return jnp.diagonal(x, offset, dim1, dim2)


def pixel_shuffle(x: Any, factor: int) -> Any:
    """[…, C·r², H, W] → […, C, H·r, W·r]."""
    *batch, channels, height, width = x.shape
    x = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    first = len(batch)
    order = (*range(first), first, first + 3, first + 1, first + 4, first + 2)
    return x.transpose(order).reshape(*batch, channels // factor**2, height * factor, width * factor)


def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along one axis, as a last axis."""
    if not x.ndim:
        return x[None][:size]
    dim %= x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    return jnp.moveaxis(jnp.take(x, starts[:, None] + np.arange(size), axis=dim), dim + 1, -1)


def flip(x: Any, dims: Sequence[int]) -> Any:
    """Backwards along axes."""
    return jnp.flip(x, tuple(dims)) if x.ndim else x


def transpose(x: Any, dim0: int, dim1: int) -> Any:
    """Two axes in each other's place."""
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


def _of(value: float) -> Callable[..., Any]:
    return lambda size, *, dtype=None: full(size, value, dtype=dtype)


def _like(value: int) -> Callable[..., Any]:
    return lambda x, *, dtype=None: full_like(x, value, dtype=dtype)


def _new(value: int) -> Callable[..., Any]:
    return lambda x, size, *, dtype=None: new_full(x, size, value, dtype=dtype)


def _asserted(x: Any, message: str = "") -> None:
    return None


def _described(x: Any, size: Any = None, stride: Any = None, dtype: Any = None) -> None:
    return None


OPS: dict[str, Callable[..., Any]] = {
    "view": lambda x, size: x.reshape(size), "_unsafe_view": lambda x, size: x.reshape(size),
    "reshape": lambda x, size: x.reshape(size), "permute": lambda x, dims: jnp.transpose(x, dims),
    "transpose": transpose, "t": jnp.transpose, "unsqueeze": jnp.expand_dims,
    "squeeze": squeeze, "expand": expand, "cat": cat, "stack": lambda xs, dim=0: jnp.stack(xs, dim),
    "slice": slice_, "slice_scatter": slice_scatter, "select": select, "select_scatter": select_scatter,
    "split": split, "split_with_sizes": split, "unbind": lambda x, dim=0: list(jnp.moveaxis(x, dim, 0)),
    "flip": flip, "repeat": repeat, "roll": roll,
    "constant_pad_nd": constant_pad_nd, "reflection_pad1d": reflection_pad, "reflection_pad2d": reflection_pad,
    "reflection_pad3d": reflection_pad, "replication_pad1d": replication_pad, "replication_pad2d": replication_pad,
    "replication_pad3d": replication_pad, "diagonal": diagonal, "tril": jnp.tril, "triu": jnp.triu,
    "pixel_shuffle": pixel_shuffle, "unfold": unfold,
    "full": full, "full_like": full_like, "new_full": new_full, "zeros": _of(0.0), "ones": _of(1.0), "empty": _of(0.0),
    "zeros_like": _like(0), "ones_like": _like(1), "empty_like": _like(0), "new_zeros": _new(0), "new_ones": _new(1),
    "new_empty": _new(0), "new_empty_strided": lambda x, size, stride, *, dtype=None: new_full(x, size, 0, dtype=dtype),
    "empty_strided": lambda size, stride, *, dtype=None: full(size, 0.0, dtype=dtype),
    "empty_permuted": lambda size, order, *, dtype=None: full(size, 0.0, dtype=dtype),
    "narrow": lambda x, dim, start, length: slice_(x, dim, start, start + length),
    "_efficientzerotensor": _of(0.0),
    "scalar_tensor": lambda value, *, dtype=None: full((), value, dtype=dtype or Dtype("float32")),
    "arange": arange, "eye": lambda n, m=None, *, dtype=None: jnp.eye(n, m, dtype=jax_dtype(dtype, jnp.float32)),
    "_assert_tensor_metadata": _described, "_assert_async": _asserted,
    "getitem": operator.getitem,
}  # fmt: skip
"""By name."""
