"""Layer, group and batch normalization; statistics are float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

NO_STATISTICS = np.zeros(0, np.float32)
"""torch returns this instead of batch statistics in evaluation."""


def _statistics(x: Any, over: tuple[int, ...]) -> tuple[Any, Any]:
    wide = x.astype(jnp.float32)
    return wide.mean(over, keepdims=True), wide.var(over, keepdims=True)


def _normalize(x: Any, mean: Any, var: Any, eps: float, w: Any, b: Any, shape: Sequence[int]) -> Any:
    """Normalize x, then scale and shift it; shape: of w and b beside x."""
    y = ((x.astype(jnp.float32) - mean) * lax.rsqrt(var + eps)).astype(x.dtype)
    y = y if w is None else y * w.astype(x.dtype).reshape(shape)
    return y if b is None else y + b.astype(x.dtype).reshape(shape)


def _layer_norm(x: Any, shape: Sequence[int], w: Any, b: Any, eps: float) -> Any:
    mean, var = _statistics(x, tuple(range(x.ndim - len(shape), x.ndim)))
    return _normalize(x, mean, var, eps, w, b, shape), mean, lax.rsqrt(var + eps)


def _group_norm(x: Any, w: Any, b: Any, n: int, channels: int, size: int, groups: int, eps: float) -> Any:
    grouped = x.reshape(n, groups, channels // groups, size)
    mean, var = _statistics(grouped, (2, 3))
    y = _normalize(grouped, mean, var, eps, w, b, (1, groups, channels // groups, 1)).reshape(x.shape)
    return y, mean.reshape(n, groups), lax.rsqrt(var + eps).reshape(n, groups)


def _batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, train: bool, momentum: float, eps: float) -> Any:
    """Return y, batch mean, 1 / batch deviation and the new running statistics, over the batches of all devices."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    if not train:
        y = _normalize(x, mean.reshape(shape), var.reshape(shape), eps, w, b, shape)
        return y, NO_STATISTICS, NO_STATISTICS, mean, var
    batch_mean, batch_var = _statistics(x, (0, *range(2, x.ndim)))
    y = _normalize(x, batch_mean, batch_var, eps, w, b, shape)
    batch_mean, batch_var, count = batch_mean.ravel(), batch_var.ravel(), x.size // x.shape[1]
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


OPS: dict[str, Callable[..., Any]] = {
    "native_layer_norm": _layer_norm, "native_group_norm": _group_norm,
    "_native_batch_norm_legit_functional": _batch_norm, "_native_batch_norm_legit": _batch_norm_legit,
    "_native_batch_norm_legit_no_training": _batch_norm_no_training,
}  # fmt: skip
