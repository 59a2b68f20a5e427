"""Layer, group and batch normalization with their gradients; statistics are float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.ops.dtypes import last_axes

NO_STATISTICS = np.zeros(0, np.float32)
"""torch returns this instead of batch statistics in evaluation."""


def _normalize(x: Any, over: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(over, keepdims=True)
    rstd = lax.rsqrt(jnp.square(wide - mean).mean(over, keepdims=True) + eps)
    return ((wide - mean) * rstd).astype(x.dtype), mean, rstd


def _normalize_backward(gradient: Any, normal: Any, rstd: Any, over: tuple[int, ...]) -> Any:
    mean, covariance = (value.mean(over, keepdims=True) for value in (gradient, gradient * normal))
    return rstd * (gradient - mean - normal * covariance)


def _affine(x: Any, w: Any, b: Any, shape: Sequence[int]) -> Any:
    y = x if w is None else x * w.astype(x.dtype).reshape(shape)
    return y if b is None else y + b.astype(x.dtype).reshape(shape)


def _layer_norm(x: Any, shape: Sequence[int], w: Any, b: Any, eps: float) -> Any:
    y, mean, rstd = _normalize(x, last_axes(x, len(shape)), eps)
    return _affine(y, w, b, shape), mean, rstd


def _layer_norm_backward(
    gradient: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, w: Any, b: Any, output_mask: Sequence[bool]
) -> Any:  # fmt: skip
    gradient, outer = gradient.astype(jnp.float32), tuple(range(x.ndim - len(shape)))
    normal = (x.astype(jnp.float32) - mean) * rstd
    dx = _normalize_backward(gradient if w is None else gradient * w, normal, rstd, last_axes(x, len(shape)))
    dw = (gradient * normal).sum(outer) if w is not None and output_mask[1] else None
    db = gradient.sum(outer) if b is not None and output_mask[2] else None
    return dx.astype(x.dtype), dw, db


def _group_norm(x: Any, w: Any, b: Any, n: int, channels: int, size: int, groups: int, eps: float) -> Any:
    y, mean, rstd = _normalize(x.reshape(n, groups, channels // groups * size), (2,), eps)
    return _affine(y.reshape(x.shape), w, b, _by_channel(x)), mean[..., 0], rstd[..., 0]


def _group_norm_backward(
    gradient: Any, x: Any, mean: Any, rstd: Any, w: Any, n: int, channels: int, size: int, groups: int,
    output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    grouped = (x.shape[0], groups, channels // groups, size)
    wide, gradient = (array.astype(jnp.float32).reshape(grouped) for array in (x, gradient))
    mean, rstd = mean[..., None, None], rstd[..., None, None]
    normal = (wide - mean) * rstd
    scaled = gradient if w is None else gradient * w.reshape(1, groups, -1, 1)
    dx = _normalize_backward(scaled, normal, rstd, (2, 3)).reshape(x.shape).astype(x.dtype)
    dw = (gradient * normal).sum((0, 3)).reshape(-1) if output_mask[1] else None
    db = gradient.sum((0, 3)).reshape(-1) if output_mask[2] else None
    return dx, dw, db


def _by_channel(x: Any) -> tuple[int, ...]:
    return (1, -1) + (1,) * (x.ndim - 2)


def _normalize_batch(x: Any, w: Any, b: Any, mean: Any, var: Any, eps: float) -> Any:
    shape = _by_channel(x)
    wide = (x.astype(jnp.float32) - mean.reshape(shape)) * lax.rsqrt(var.reshape(shape) + eps)
    return _affine(wide.astype(x.dtype), w, b, shape)


def _batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, train: bool, momentum: float, eps: float) -> Any:
    """Return y, batch mean, 1 / batch deviation and the new running statistics, over the batches of all devices."""
    if not train:
        return _normalize_batch(x, w, b, mean, var, eps), NO_STATISTICS, NO_STATISTICS, mean, var
    over = (0, *range(2, x.ndim))
    wide = x.astype(jnp.float32)
    batch_mean, batch_var, count = wide.mean(over), wide.var(over), x.size // x.shape[1]
    y = _normalize_batch(x, w, b, batch_mean, batch_var, eps)
    if mean is not None:
        mean = mean * (1 - momentum) + momentum * batch_mean
        var = var * (1 - momentum) + momentum * batch_var * count / max(1, count - 1)
    return y, batch_mean, lax.rsqrt(batch_var + eps), mean, var


def _batch_norm_legit(x: Any, w: Any, b: Any, *args: Any) -> Any:
    *statistics, train, momentum, eps = args  # running statistics may be missing
    mean, var = statistics or (None, None)
    return _batch_norm(x, w, b, mean, var, train, momentum, eps)[:3]


def _batch_norm_no_training(x: Any, w: Any, b: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    return _batch_norm(x, w, b, mean, var, False, momentum, eps)[:3]


def _batch_norm_backward(
    gradient: Any, x: Any, w: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any, train: bool, eps: float,
    output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    shape, over = _by_channel(x), (0, *range(2, x.ndim))
    wide, gradient = x.astype(jnp.float32), gradient.astype(jnp.float32)
    if not train:
        mean, rstd = running_mean, lax.rsqrt(running_var + eps)
    rstd = rstd.reshape(shape)
    normal = (wide - mean.reshape(shape)) * rstd
    db, dw = gradient.sum(over), (gradient * normal).sum(over)
    if train:
        gradient = gradient - (db.reshape(shape) + normal * dw.reshape(shape)) / max(x.size // x.shape[1], 1)
    dx = gradient * (rstd if w is None else rstd * w.reshape(shape))
    return dx.astype(x.dtype), dw if output_mask[1] else None, db if output_mask[2] else None


OPS: dict[str, Callable[..., Any]] = {
    "native_layer_norm": _layer_norm, "native_layer_norm_backward": _layer_norm_backward,
    "native_group_norm": _group_norm, "native_group_norm_backward": _group_norm_backward,
    "_native_batch_norm_legit_functional": _batch_norm, "_native_batch_norm_legit": _batch_norm_legit,
    "_native_batch_norm_legit_no_training": _batch_norm_no_training,
    "native_batch_norm_backward": _batch_norm_backward,
}  # fmt: skip
