"""Max, average and adaptive pooling with their gradients."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.ops.dtypes import is_inexact, lowest
from tpuswarm.torch.ops.pointwise import truncating_divide


class _Windows(NamedTuple):
    """Windows over the last axes of an array."""

    size: list[int]
    stride: list[int]
    dilation: list[int]
    pads: list[tuple[int, int]]

    def reduce(self, x: Any, initial: Any, function: Callable[..., Any]) -> Any:
        """Reduce each window of an array, or of a tuple of arrays."""
        lead = jax.tree.leaves(x)[0].ndim - len(self.size)
        size, stride, dilation = ((1,) * lead + tuple(values) for values in self[:3])
        pads = ((0, 0),) * lead + tuple(self.pads)
        initial = jax.tree.map(lambda array, value: np.asarray(value, array.dtype), x, initial)
        return lax.reduce_window(x, initial, function, size, stride, pads, window_dilation=dilation)


def _per_axis(value: Any, rank: int) -> list[int]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * rank if len(values) == 1 else values


def _windows(x: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, rank: int) -> _Windows:
    size, padding, dilation = (_per_axis(value, rank) for value in (size, padding, dilation))
    stride = _per_axis(stride, rank) if stride not in (None, []) else size
    pads = []
    for n, k, s, p, d in zip(x.shape[-rank:], size, stride, padding, dilation, strict=True):
        room = n + 2 * p - d * (k - 1) - 1
        count = (-(-room // s) if ceil_mode else room // s) + 1
        if ceil_mode and (count - 1) * s >= n + p:  # the last window must start inside the array or its left padding
            count -= 1
        pads.append((p, max(p, (count - 1) * s + d * (k - 1) + 1 - n - p)))
    return _Windows(size, stride, dilation, pads)


def _first_of_largest(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Reduce (value, index); NaN is the largest."""
    takes_b = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1])) | ((b[0] != b[0]) & (a[0] == a[0]))
    return jnp.where(takes_b, b[0], a[0]), jnp.where(takes_b, b[1], a[1])


def _max_pool(
    rank: int, x: Any, size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:  # fmt: skip
    """Return the maxima and their flat indices, the first of equal elements."""
    windows, count = _windows(x, size, stride, padding, dilation, ceil_mode, rank), math.prod(x.shape[-rank:])
    indices = jnp.broadcast_to(jnp.arange(count).reshape(x.shape[-rank:]), x.shape)
    _, indices = windows.reduce((x, indices), (lowest(x.dtype), count), _first_of_largest)
    return windows.reduce(x, lowest(x.dtype), lax.max), indices


def _max_pool_backward(
    rank: int, gradient: Any, x: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: Any
) -> Any:  # fmt: skip
    if set(dilation) != {1}:
        return _scatter_to_indices(rank, gradient, x, indices)
    windows = _windows(x, size, stride, padding, 1, ceil_mode, rank)  # XLA has an operator for this gradient
    return _vjp(lambda x: windows.reduce(x, lowest(x.dtype), lax.max), x, gradient)


def _scatter_to_indices(rank: int, gradient: Any, x: Any, indices: Any) -> Any:
    outputs, inputs = (math.prod(shape[-rank:]) for shape in (gradient.shape, x.shape))
    flat = gradient.reshape(math.prod(x.shape[:-rank]), outputs)
    rows = jnp.arange(len(flat))[:, None]
    dx = jnp.zeros((len(flat), inputs), gradient.dtype).at[rows, indices.reshape(flat.shape)].add(flat)
    return dx.reshape(x.shape)


def _avg_pool(
    rank: int, x: Any, size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    windows = _windows(x, size, stride, padding, 1, ceil_mode, rank)
    divide = jnp.divide if is_inexact(x) else truncating_divide
    total = windows.reduce(x, 0, lax.add)
    if divisor_override is not None:
        return divide(total, divisor_override)
    ones = jnp.ones(x.shape[-rank:], x.dtype)
    if count_include_pad:  # padding counts, but not what ceil_mode adds
        padding = _per_axis(padding, rank)
        ones = jnp.pad(ones, [(p, p) for p in padding], constant_values=1)
        pads = [(low - p, high - p) for (low, high), p in zip(windows.pads, padding, strict=True)]
        windows = windows._replace(pads=pads)
    return divide(total, windows.reduce(ones, 0, lax.add))


def _parts(size: int, count: int) -> list[tuple[int, int]]:
    return [(at * size // count, -(-(at + 1) * size // count)) for at in range(count)]


def _adaptive_avg_pool(x: Any, size: Sequence[int]) -> Any:
    for axis, count in enumerate(size, x.ndim - len(size)):
        n = x.shape[axis]
        if not count:
            x = lax.slice_in_dim(x, 0, 0, axis=axis)
        elif n % count == 0:
            x = x.reshape(*x.shape[:axis], count, n // count, *x.shape[axis + 1 :]).mean(axis + 1)
        else:
            means = [lax.slice_in_dim(x, low, high, axis=axis).mean(axis) for low, high in _parts(n, count)]
            x = jnp.stack(means, axis)
    return x


def _vjp(function: Callable[..., Any], x: Any, gradient: Any) -> Any:
    return jax.vjp(function, x)[1](gradient.astype(x.dtype))[0]


def _adaptive_max_pool(x: Any, size: Sequence[int]) -> Any:
    """Return the maxima and their flat indices, the first of equal elements."""
    rank = len(size)
    flat = np.zeros([1] * 2 * rank, int)
    for axis, (n, count) in enumerate(zip(x.shape[-rank:], size, strict=True)):
        bounds = _parts(n, count)
        longest = max(high - low for low, high in bounds)
        inside = np.array([[min(low + step, high - 1) for step in range(longest)] for low, high in bounds])
        shape = [1] * 2 * rank
        shape[axis], shape[rank + axis] = inside.shape
        flat = flat * n + inside.reshape(shape)
    flat = flat.reshape(*size, math.prod(flat.shape[rank:]))
    values = x.reshape(*x.shape[:-rank], math.prod(x.shape[-rank:]))[..., flat]
    best = jnp.argmax(values, -1, keepdims=True)
    indices = jnp.take_along_axis(jnp.broadcast_to(jnp.asarray(flat), values.shape), best, -1)
    return jnp.take_along_axis(values, best, -1)[..., 0], indices[..., 0]


def _ops(rank: int) -> dict[str, Callable[..., Any]]:
    return {
        f"max_pool{rank}d_with_indices": partial(_max_pool, rank),
        f"max_pool{rank}d_with_indices_backward": partial(_max_pool_backward, rank),
        f"avg_pool{rank}d": partial(_avg_pool, rank),
        f"avg_pool{rank}d_backward": lambda gradient, x, *args: _vjp(lambda x: _avg_pool(rank, x, *args), x, gradient),
        f"_adaptive_avg_pool{rank}d": _adaptive_avg_pool,
        f"_adaptive_avg_pool{rank}d_backward": lambda gradient, x: _vjp(
            lambda x: _adaptive_avg_pool(x, gradient.shape[-rank:]), x, gradient
        ),
        f"adaptive_max_pool{rank}d": _adaptive_max_pool,
        f"adaptive_max_pool{rank}d_backward": partial(_scatter_to_indices, rank),
    }


OPS = _ops(2) | _ops(3)
