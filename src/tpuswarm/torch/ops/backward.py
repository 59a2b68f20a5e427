"""Gradients that torch computes with one operator and that have no forward operator next to them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.ops.random_numbers import keep_scaled
from tpuswarm.torch.ops.shapes import replication_pad


def _vjp(function: Callable[..., Any], gradient: Any, *args: Any) -> Any:
    y, pullback = jax.vjp(function, *args)
    return pullback(gradient.astype(y.dtype))


def _dropout_backward(gradient: Any, mask: Any, scale: float) -> Any:
    if mask.dtype != jnp.bool_:  # dropout was off
        return gradient
    return keep_scaled(gradient, mask, scale)


def _nll_backward(
    gradient: Any, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int, total_weight: Any
) -> Any:  # fmt: skip
    axis = min(1, x.ndim - 1)
    counts = target != ignore_index
    gradient = gradient / total_weight if reduction == 1 else gradient  # a mean
    scaled = jnp.where(counts, -gradient * (1 if weight is None else weight[jnp.where(counts, target, 0)]), 0)
    classes = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(classes == jnp.expand_dims(target, axis), jnp.expand_dims(scaled, axis), 0).astype(x.dtype)


def _weight_norm_backward(gradient: Any, v: Any, g: Any, norms: Any, dim: int) -> Any:
    over = tuple(axis for axis in range(v.ndim) if axis != dim % v.ndim)
    return _vjp(lambda v, g: v * (g / jnp.sqrt(jnp.square(v).sum(over, keepdims=True))), gradient, v, g)


def _pairwise_distances_backward(gradient: Any, a: Any, b: Any, p: float, distances: Any) -> Any:
    """Return the gradient of the points a: 0 where two points are equal."""
    delta = a[..., :, None, :] - b[..., None, :, :]
    gradient, distances = gradient[..., None], distances[..., None]
    if p == 0:
        slopes = jnp.zeros_like(delta)
    elif p == 1:
        slopes = jnp.sign(delta)
    elif p == math.inf:
        slopes = jnp.sign(delta) * (jnp.abs(delta) == distances)
    else:
        is_zero = (distances == 0) | (delta == 0)
        ratio = jnp.where(delta == 0, 1, jnp.abs(delta)) / jnp.where(distances == 0, 1, distances)
        slopes = jnp.where(is_zero, 0, jnp.sign(delta) * ratio ** (p - 1))
    total = (gradient * slopes).sum(-2)
    return _vjp(lambda a: jnp.broadcast_to(a, total.shape), total, a)[0]  # sum over the batches that a is repeated for


def _distances_of_pairs_backward(gradient: Any, x: Any, p: float, distances: Any) -> Any:
    def square(values: Any) -> Any:
        upper = jnp.zeros((len(x), len(x)), values.dtype).at[np.triu_indices(len(x), 1)].set(values)
        return upper + upper.T

    return _pairwise_distances_backward(square(gradient), x, x, p, square(distances))


def _rrelu_backward(
    gradient: Any, x: Any, slopes: Any, lower: float, upper: float, train: bool, self_is_result: bool
) -> Any:  # fmt: skip
    return gradient * (slopes if train else jnp.where(x > 0, 1, (lower + upper) / 2).astype(x.dtype))


def _replication_pad_backward(gradient: Any, x: Any, padding: Sequence[int]) -> Any:
    return _vjp(lambda x: replication_pad(x, padding), gradient, x)[0]


OPS: dict[str, Callable[..., Any]] = {
    "native_dropout_backward": _dropout_backward, "nll_loss_backward": _nll_backward,
    "nll_loss2d_backward": _nll_backward, "_weight_norm_interface_backward": _weight_norm_backward,
    "_cdist_backward": _pairwise_distances_backward, "_pdist_backward": _distances_of_pairs_backward,
    "rrelu_with_noise_backward": _rrelu_backward,
    **{f"replication_pad{n}d_backward": _replication_pad_backward for n in (1, 2, 3)},
}  # fmt: skip
