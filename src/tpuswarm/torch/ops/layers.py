"""Normalization, pooling and resizing."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.ops.pointwise import truncated

NOTHING = np.zeros(0, np.float32)
"""What torch saves of a batch whose statistics it does not take."""


def _normalized(x: Any, over: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    """Of mean 0 and variance 1 over axes, in float32; the mean and 1 / deviation."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(over, keepdims=True)
    rstd = lax.rsqrt(jnp.square(wide - mean).mean(over, keepdims=True) + eps)
    return ((wide - mean) * rstd).astype(x.dtype), mean, rstd


def _affine(x: Any, w: Any, b: Any, shape: Sequence[int]) -> Any:
    y = x if w is None else x * w.astype(x.dtype).reshape(shape)
    return y if b is None else y + b.astype(x.dtype).reshape(shape)


def layer_norm(x: Any, shape: Sequence[int], w: Any, b: Any, eps: float) -> Any:
    """Over the last axes."""
    y, mean, rstd = _normalized(x, tuple(range(x.ndim - len(shape), x.ndim)), eps)
    return _affine(y, w, b, shape), mean, rstd


def rms_norm(x: Any, shape: Sequence[int], w: Any = None, eps: float | None = None) -> Any:
    """Divided by the root of the mean square over the last axes."""
    wide = x.astype(jnp.float32)
    over = tuple(range(x.ndim - len(shape), x.ndim))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps  # type: ignore[no-untyped-call]
    return _affine((wide * lax.rsqrt(jnp.square(wide).mean(over, keepdims=True) + eps)).astype(x.dtype), w, None, shape)


def group_norm(x: Any, w: Any, b: Any, n: int, channels: int, rest: int, groups: int, eps: float) -> Any:
    """Over the channels of a group and all places."""
    y, mean, rstd = _normalized(x.reshape(n, groups, channels // groups * rest), (2,), eps)
    y = _affine(y.reshape(x.shape), w, b, (1, x.shape[1]) + (1,) * (x.ndim - 2))
    return y, mean[..., 0], rstd[..., 0]


def channels(x: Any) -> tuple[int, ...]:
    """The shape of what there is once for each channel."""
    return (1, -1) + (1,) * (x.ndim - 2)


def batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, eps: float) -> Any:
    """With given statistics."""
    shape = channels(x)
    wide = (x.astype(jnp.float32) - mean.reshape(shape)) * lax.rsqrt(var.reshape(shape) + eps)
    return _affine(wide.astype(x.dtype), w, b, shape)


def batch_norm_train(x: Any, w: Any, b: Any, mean: Any, var: Any, train: bool, momentum: float, eps: float) -> Any:
    """With the batch's own statistics, of all devices; y, mean, 1 / deviation, and the running ones afterwards."""
    if not train:
        return batch_norm(x, w, b, mean, var, eps), NOTHING, NOTHING, mean, var
    over = (0, *range(2, x.ndim))
    wide = x.astype(jnp.float32)
    now, spread, count = wide.mean(over), wide.var(over), x.size // x.shape[1]
    y = batch_norm(x, w, b, now, spread, eps)
    if mean is not None:
        mean = mean * (1 - momentum) + momentum * now
        var = var * (1 - momentum) + momentum * spread * count / max(1, count - 1)
    return y, now, lax.rsqrt(spread + eps), mean, var


def batch_norm_legit(x: Any, w: Any, b: Any, *rest: Any) -> Any:
    """The same without running statistics, or with some that do not change here."""
    *statistics, train, momentum, eps = rest
    mean, var = statistics or (None, None)
    return batch_norm_train(x, w, b, mean, var, train, momentum, eps)[:3]


def _sizes(given: Any, axes: int) -> list[int]:
    given = list(given) if isinstance(given, (list, tuple)) else [given]
    return given * axes if len(given) == 1 else given


def _windows(
    x: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, axes: int
) -> tuple[list[int], list[int], list[int], list[tuple[int, int]]]:
    """Size, stride and dilation of each axis, and how much is added before and after it."""
    size, padding, dilation = (_sizes(each, axes) for each in (size, padding, dilation))
    stride = _sizes(stride, axes) if stride not in (None, []) else size
    pads = []
    for n, k, s, p, d in zip(x.shape[-axes:], size, stride, padding, dilation, strict=True):
        room = n + 2 * p - d * (k - 1) - 1
        count = (-(-room // s) if ceil else room // s) + 1
        if ceil and (count - 1) * s >= n + p:  # the last window begins within the array or its padding before it
            count -= 1
        pads.append((p, max(p, (count - 1) * s + d * (k - 1) + 1 - n - p)))
    return size, stride, dilation, pads


def _lead(x: Any, axes: int, each: Any) -> tuple[Any, ...]:
    return (each,) * (x.ndim - axes)


def places(
    x: Any, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], pads: Sequence[tuple[int, int]],
    shape: Sequence[int],
) -> Any:  # fmt: skip
    """Where the largest of each window is, the first of equal ones: its number in the axes of the picture."""
    axes = len(size)
    sizes, counts = x.shape[-axes:], shape[-axes:]
    lowest = jnp.asarray(-jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else np.iinfo(x.dtype).min, x.dtype)
    padded = lax.pad(x, lowest, [(0, 0, 0)] * (x.ndim - axes) + [(max(low, 0), max(high, 0), 0) for low, high in pads])
    best: Any = None
    found: Any = None
    for offset in np.ndindex(*size):
        first = [o * d for o, d in zip(offset, dilation, strict=True)]
        ends = [f + (c - 1) * s + 1 for f, c, s in zip(first, counts, stride, strict=True)]
        lead = x.ndim - axes
        value = lax.slice(
            padded, [0] * lead + first, [*x.shape[:lead], *ends], [1] * lead + [int(each) for each in stride]
        )
        at = [f + np.arange(c) * s - p[0] for f, c, s, p in zip(first, counts, stride, pads, strict=True)]
        number = jnp.asarray(np.ravel_multi_index(np.meshgrid(*at, indexing="ij"), sizes, mode="clip"), jnp.int32)
        number = jnp.broadcast_to(number, value.shape)
        better = True if best is None else value > best
        best = value if best is None else jnp.where(better, value, best)
        found = number if found is None else jnp.where(better, number, found)
    return found


def _max_pool(axes: int) -> Callable[..., Any]:
    def apply(x: Any, size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil: bool = False) -> Any:
        k, s, d, pads = _windows(x, size, stride, padding, dilation, ceil, axes)
        lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else np.iinfo(x.dtype).min
        one, none = _lead(x, axes, 1), _lead(x, axes, (0, 0))
        y = lax.reduce_window(
            x, np.asarray(lowest, x.dtype), lax.max, (*one, *k), (*one, *s), (*none, *pads), window_dilation=(*one, *d)
        )
        return y, places(x, k, s, d, pads, y.shape)

    return apply


def _avg_pool(axes: int) -> Callable[..., Any]:
    def apply(
        x: Any, size: Any, stride: Any = None, padding: Any = 0, ceil: bool = False, count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:  # fmt: skip
        k, s, _, pads = _windows(x, size, stride, padding, 1, ceil, axes)
        one, none = _lead(x, axes, 1), _lead(x, axes, (0, 0))

        def summed(array: Any, around: Sequence[tuple[int, int]]) -> Any:
            zero = np.zeros((), array.dtype)
            return lax.reduce_window(array, zero, lax.add, (*one, *k), (*one, *s), (*none, *around))

        divide = jnp.divide if jnp.issubdtype(x.dtype, jnp.inexact) else truncated
        total = summed(x, pads)
        if divisor_override is not None:
            return divide(total, divisor_override)
        p = _sizes(padding, axes)
        counted = jnp.ones(x.shape[-axes:], x.dtype)
        if count_include_pad:  # the padding that was asked for counts, what `ceil` adds does not
            counted = jnp.pad(counted, [(each, each) for each in p], constant_values=1)
            pads = [(low - each, high - each) for (low, high), each in zip(pads, p, strict=True)]
        ones = counted.reshape((*one, *counted.shape))
        return divide(total, summed(ones, pads))

    return apply


def adaptive_pool(x: Any, size: Sequence[int]) -> Any:
    """Means of as many parts of each axis, which may overlap by one."""
    for parts, at in zip(size, range(x.ndim - len(size), x.ndim), strict=True):
        n = x.shape[at]
        parts = n if parts is None else parts
        if not parts:
            x = lax.slice_in_dim(x, 0, 0, axis=at)
        elif n % parts == 0:
            x = x.reshape(*x.shape[:at], parts, n // parts, *x.shape[at + 1 :]).mean(at + 1)
        else:
            bounds = [(each * n // parts, -(-(each + 1) * n // parts)) for each in range(parts)]
            means = [lax.slice_in_dim(x, low, high, axis=at).mean(at) for low, high in bounds]
            x = jnp.stack(means, at)
    return x


def adaptive_max_pool(x: Any, size: Sequence[int]) -> Any:
    """The largest of as many parts of each axis, and where each is, the first of equal ones."""
    axes, numbers = len(size), np.zeros([1] * 2 * len(size), int)
    for axis, (n, parts) in enumerate(zip(x.shape[-axes:], size, strict=True)):
        bounds = [(each * n // parts, -(-(each + 1) * n // parts)) for each in range(parts)]
        longest = max(high - low for low, high in bounds)
        inside = np.array([[min(low + step, high - 1) for step in range(longest)] for low, high in bounds])
        shape = [1] * 2 * axes
        shape[axis], shape[axes + axis] = inside.shape
        numbers = numbers * n + inside.reshape(shape)
    numbers = numbers.reshape(*size, math.prod(numbers.shape[axes:]))
    found = x.reshape(*x.shape[:-axes], math.prod(x.shape[-axes:]))[..., numbers]
    best = jnp.argmax(found, -1, keepdims=True)
    at = jnp.take_along_axis(jnp.broadcast_to(jnp.asarray(numbers), found.shape), best, -1)
    return jnp.take_along_axis(found, best, -1)[..., 0], at[..., 0]


def antialiased(cubic: bool) -> Callable[..., Any]:
    """Resizing in which every pixel of the result is a mean over all that it covers."""

    def weight(x: Any) -> Any:
        x = np.abs(x)
        if not cubic:
            return np.maximum(1 - x, 0)
        a = -0.5
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        return np.where(x < 1, near, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * a, 0))

    def apply(x: Any, size: Any, align_corners: bool, *given: Any) -> Any:
        scales = _scales(given)
        for offset, new in enumerate(_target(x, size, scales, 2)):
            at = x.ndim - 2 + offset
            old = x.shape[at]
            if align_corners:
                ratio = (old - 1) / (new - 1) if new > 1 else 0.0
            else:
                scale = scales[offset] if scales else None
                ratio = 1 / scale if scale else old / new
            reach = (2 if cubic else 1) * max(ratio, 1)
            table = np.zeros((new, old))
            for row in range(new):
                middle = ratio * (row + 0.5)
                low, high = max(int(middle - reach + 0.5), 0), min(int(middle + reach + 0.5), old)
                table[row, low:high] = weight((np.arange(low, high) - middle + 0.5) / max(ratio, 1))
            table /= table.sum(1, keepdims=True)
            x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(table, x.dtype), (at, 1)), -1, at)
        return x

    return apply


def _scales(given: Sequence[Any]) -> list[float | None] | None:
    """What torch gives as a list, or as one argument for each axis; None: none is given."""
    found = list(given[0]) if given and isinstance(given[0], (list, tuple)) else list(given)
    return None if None in found or not found else found


def _target(x: Any, size: Any, scales: Any, axes: int) -> list[int]:
    if size is not None:
        return list(size)
    return [math.floor(n * scale) for n, scale in zip(x.shape[-axes:], scales, strict=True)]


def _nearest(axes: int) -> Callable[..., Any]:
    def apply(x: Any, size: Any, *given: Any) -> Any:
        scales = _scales(given)
        target = _target(x, size, scales, axes)
        for offset, new in enumerate(target):
            at = x.ndim - axes + offset
            old = x.shape[at]
            scale = scales[offset] if scales else None
            ratio = 1 / scale if scale else old / new
            places = np.floor(np.arange(new, dtype=np.float32) * np.float32(ratio))  # torch's rounding, in 32 bits
            places = np.minimum(places.astype(int), old - 1)
            x = jnp.take(x, places, axis=at)
        return x

    return apply


def _linear(axes: int) -> Callable[..., Any]:
    def apply(x: Any, size: Any, align_corners: bool, *given: Any) -> Any:
        scales = _scales(given)
        target = _target(x, size, scales, axes)
        for offset, new in enumerate(target):
            at = x.ndim - axes + offset
            old = x.shape[at]
            if align_corners:
                places = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
            else:
                scale = scales[offset] if scales else None
                places = np.maximum((np.arange(new) + 0.5) * (1 / scale if scale else old / new) - 0.5, 0)
            low = np.minimum(np.floor(places).astype(int), old - 1)
            share = jnp.asarray((places - low).reshape((-1,) + (1,) * (x.ndim - 1 - at)), x.dtype)
            high = np.minimum(low + 1, old - 1)
            x = jnp.take(x, low, axis=at) * (1 - share) + jnp.take(x, high, axis=at) * share
        return x

    return apply


def _bicubic(x: Any, size: Any, align_corners: bool, *given: Any) -> Any:
    """With the cubic of a = -0.75 that torch takes."""
    scales = _scales(given)
    a = -0.75
    for offset, new in enumerate(_target(x, size, scales, 2)):
        at = x.ndim - 2 + offset
        old = x.shape[at]
        if align_corners:
            places = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
        else:
            scale = scales[offset] if scales else None
            places = (np.arange(new) + 0.5) * (1 / scale if scale else old / new) - 0.5
        low = np.floor(places).astype(int)
        total: Any = 0
        for step in range(-1, 3):
            distance = np.abs(places - (low + step))
            near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
            far = ((distance - 5) * distance + 8) * distance * a - 4 * a
            weight = np.where(distance <= 1, near, np.where(distance < 2, far, 0)).reshape(
                -1, *(1,) * (x.ndim - 1 - at)
            )
            total = total + jnp.take(x, np.clip(low + step, 0, old - 1), axis=at) * jnp.asarray(weight, x.dtype)
        x = total
    return x


OPS: dict[str, Callable[..., Any]] = {
    "native_layer_norm": layer_norm, "_fused_rms_norm": lambda x, shape, w, eps: (rms_norm(x, shape, w, eps), None),
    "rms_norm": rms_norm, "native_group_norm": group_norm,
    "_native_batch_norm_legit_no_training": lambda x, w, b, mean, var, momentum, eps: (
        batch_norm(x, w, b, mean, var, eps), NOTHING, NOTHING
    ),
    "_native_batch_norm_legit_functional": batch_norm_train,
    "_native_batch_norm_legit": batch_norm_legit,
    "max_pool1d_with_indices": _max_pool(1), "max_pool2d_with_indices": _max_pool(2),
    "max_pool3d_with_indices": _max_pool(3), "avg_pool1d": _avg_pool(1),
    "avg_pool2d": _avg_pool(2), "avg_pool3d": _avg_pool(3), "_adaptive_avg_pool2d": adaptive_pool,
    "_adaptive_avg_pool3d": adaptive_pool, "adaptive_avg_pool1d": adaptive_pool,
    "upsample_nearest1d": _nearest(1), "upsample_nearest2d": _nearest(2), "upsample_nearest3d": _nearest(3),
    "upsample_linear1d": _linear(1), "upsample_bilinear2d": _linear(2), "upsample_trilinear3d": _linear(3),
    "upsample_bicubic2d": _bicubic, "_upsample_bilinear2d_aa": antialiased(False),
    "_upsample_bicubic2d_aa": antialiased(True), "adaptive_max_pool2d": adaptive_max_pool,
    "adaptive_max_pool3d": adaptive_max_pool,
}  # fmt: skip
"""By name."""
