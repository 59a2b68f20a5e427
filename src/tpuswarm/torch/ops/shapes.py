"""What changes the shape of arrays, takes parts of them, or makes new ones."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.errors import InputError
from tpuswarm.torch.graph import Dtype
from tpuswarm.torch.ops.dtypes import axes, jax_dtype


def expand(x: Any, size: Sequence[int], **_: Any) -> Any:
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


def _places(indices: Sequence[Any]) -> tuple[Any, ...]:
    found = []
    for each in indices:
        if each is not None and each.dtype == jnp.bool_:
            raise InputError(
                "a mask as an index gives a shape that depends on the data, which no compiled program has: use "
                "torch.where or a sum with weights"
            )
        found.append(slice(None) if each is None else each)
    return tuple(found)


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


def gather(x: Any, dim: int, places: Any, **_: Any) -> Any:
    """x at places along one axis."""
    if not x.ndim:
        return x
    return x[_along(x, dim, places)]


def scatter(x: Any, dim: int, places: Any, src: Any, **_: Any) -> Any:
    """A copy with `src`, an array or a number, at places along one axis."""
    src = jnp.asarray(src, x.dtype)
    return x.at[_along(x, dim, places)].set(src[tuple(slice(each) for each in places.shape)] if src.ndim else src)


def scatter_add(x: Any, dim: int, places: Any, src: Any) -> Any:
    """A copy to which `src` is added at places along one axis."""
    part = src[tuple(slice(each) for each in places.shape)]
    return x.at[_along(x, dim, places)].add(part.astype(x.dtype))


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


def _pad(mode: str) -> Callable[..., Any]:
    return lambda x, padding: jnp.pad(x, _pairs(x, padding), mode=mode)


def _dtype_of(value: Any) -> Any:
    return jnp.float32 if isinstance(value, float) else jnp.bool_ if isinstance(value, bool) else jnp.int32


def full(size: Sequence[int], value: Any, *, dtype: Dtype | None = None, **_: Any) -> Any:
    """A new array of one number."""
    return jnp.full(size, value, jax_dtype(dtype, _dtype_of(value)))


def full_like(x: Any, value: Any, *, dtype: Dtype | None = None, **_: Any) -> Any:
    """The same in the shape of another one."""
    return jnp.full(x.shape, value, jax_dtype(dtype, x.dtype))


def arange(*bounds: Any, dtype: Dtype | None = None, **_: Any) -> Any:
    """Numbers one after the other."""
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1)}.get(len(bounds), bounds)
    floats = any(isinstance(each, float) for each in bounds)
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
    dim %= x.ndim
    starts = np.arange(0, x.shape[dim] - size + 1, step)
    return jnp.moveaxis(jnp.take(x, starts[:, None] + np.arange(size), axis=dim), dim + 1, -1)


def _new(value: Any) -> Callable[..., Any]:
    return lambda x, size, *, dtype=None, **_: jnp.full(size, value, jax_dtype(dtype, x.dtype))


def _nothing(*_: Any, **__: Any) -> None:
    return None


OPS: dict[str, Callable[..., Any]] = {
    "view": lambda x, size: x.reshape(size), "_unsafe_view": lambda x, size: x.reshape(size),
    "reshape": lambda x, size: x.reshape(size), "permute": lambda x, dims: jnp.transpose(x, dims),
    "transpose": lambda x, a, b: jnp.swapaxes(x, a, b), "t": jnp.transpose, "unsqueeze": jnp.expand_dims,
    "squeeze": squeeze, "expand": expand, "cat": cat, "stack": lambda xs, dim=0: jnp.stack(xs, dim),
    "slice": slice_, "slice_scatter": slice_scatter, "select": select, "select_scatter": select_scatter,
    "split": split, "split_with_sizes": split, "unbind": lambda x, dim=0: list(jnp.moveaxis(x, dim, 0)),
    "index": index, "_unsafe_index": index, "index_put": index_put, "_unsafe_index_put": index_put,
    "index_select": lambda x, dim, places: jnp.take(x, places, axis=dim),
    "gather": gather, "scatter": scatter, "scatter_add": scatter_add,
    "flip": lambda x, dims: jnp.flip(x, tuple(dims)), "repeat": repeat, "roll": roll,
    "constant_pad_nd": constant_pad_nd, "reflection_pad1d": _pad("reflect"), "reflection_pad2d": _pad("reflect"),
    "reflection_pad3d": _pad("reflect"), "replication_pad1d": _pad("edge"), "replication_pad2d": _pad("edge"),
    "replication_pad3d": _pad("edge"), "diagonal": diagonal, "tril": jnp.tril, "triu": jnp.triu,
    "pixel_shuffle": pixel_shuffle, "unfold": unfold,
    "full": full, "full_like": full_like, "new_full": lambda x, size, value, **k: full_like(x, 0, **k) if size is None
    else jnp.full(size, value, jax_dtype(k.get("dtype"), x.dtype)),
    "zeros": lambda size, **k: full(size, 0.0, **k), "ones": lambda size, **k: full(size, 1.0, **k),
    "empty": lambda size, **k: full(size, 0.0, **k), "zeros_like": lambda x, **k: full_like(x, 0, **k),
    "ones_like": lambda x, **k: full_like(x, 1, **k), "empty_like": lambda x, **k: full_like(x, 0, **k),
    "new_zeros": _new(0), "new_ones": _new(1), "new_empty": _new(0),
    "scalar_tensor": lambda value, **k: full((), value, **{"dtype": k.get("dtype") or Dtype("float32")}),
    "arange": arange, "eye": lambda n, m=None, *, dtype=None, **_: jnp.eye(n, m, dtype=jax_dtype(dtype, jnp.float32)),
    "sym_size": lambda x, dim: x.shape[dim], "sym_numel": lambda x: x.size, "sym_max": max, "sym_min": min,
    "sym_float": float, "sym_int": int, "sym_not": operator.not_, "_assert_scalar": _nothing,
    "_assert_tensor_metadata": _nothing, "sym_constrain_range": _nothing, "sym_constrain_range_for_size": _nothing,
    "_assert_async": _nothing,
    "operator.getitem": operator.getitem,
    **{f"operator.{each.__name__}": each for each in (
        operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.neg,
        operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.and_,
        operator.or_,
    )},
    "math.ceil": math.ceil, "math.floor": math.floor, "math.trunc": math.trunc,
}  # fmt: skip
"""By name; those of `operator` and `sym_…` are on sizes, which are numbers by the time a program is run."""
