"""What torch's backward pass consists of: derivatives that torch has as operators, and that stay in one piece here."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuswarm.torch.ops import layers, shapes
from tpuswarm.torch.ops.dtypes import axes


def _pulled(form: Callable[..., Any], gradient: Any, *args: Any) -> Any:
    """The gradients of arrays by JAX's derivative of our own form, which is smooth there."""
    found, pull = jax.vjp(form, *args)
    return pull(gradient.astype(found.dtype))


def layer_norm_backward(
    gradient: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, w: Any, b: Any, wanted: Sequence[bool]
) -> Any:  # fmt: skip
    """Of x, weight and bias."""
    wide = x.astype(jnp.float32)
    gradient = gradient.astype(jnp.float32)
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    outer = tuple(range(x.ndim - len(shape)))
    normal = (wide - mean) * rstd
    scaled = gradient if w is None else gradient * w
    of_x = rstd * (scaled - scaled.mean(inner, keepdims=True) - normal * (scaled * normal).mean(inner, keepdims=True))
    of_w = (gradient * normal).sum(outer) if w is not None and wanted[1] else None
    of_b = gradient.sum(outer) if b is not None and wanted[2] else None
    return of_x.astype(x.dtype), of_w, of_b


def rms_norm_backward(
    gradient: Any, x: Any, shape: Sequence[int], rstd: Any, w: Any, wanted: Sequence[bool]
) -> Any:  # fmt: skip
    """Of x and weight."""
    wide, gradient = x.astype(jnp.float32), gradient.astype(jnp.float32)
    inner, outer = tuple(range(x.ndim - len(shape), x.ndim)), tuple(range(x.ndim - len(shape)))
    scaled = gradient if w is None else gradient * w
    of_x = rstd * (scaled - wide * rstd**2 * (scaled * wide).mean(inner, keepdims=True))
    of_w = (gradient * wide * rstd).sum(outer) if w is not None and wanted[1] else None
    return of_x.astype(x.dtype), of_w


def group_norm_backward(
    gradient: Any, x: Any, mean: Any, rstd: Any, w: Any, n: int, channels: int, rest: int, groups: int,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """Of x, weight and bias."""
    grouped = (x.shape[0], groups, channels // groups, rest)
    wide, gradient = (each.astype(jnp.float32).reshape(grouped) for each in (x, gradient))
    mean, rstd = mean[..., None, None], rstd[..., None, None]
    normal = (wide - mean) * rstd
    scaled = gradient if w is None else gradient * w.reshape(1, groups, -1, 1)
    of_x = rstd * (scaled - scaled.mean((2, 3), keepdims=True) - normal * (scaled * normal).mean((2, 3), keepdims=True))
    of_w = (gradient * normal).sum((0, 3)).reshape(-1) if wanted[1] else None
    of_b = gradient.sum((0, 3)).reshape(-1) if wanted[2] else None
    return of_x.reshape(x.shape).astype(x.dtype), of_w, of_b


def batch_norm_backward(
    gradient: Any, x: Any, w: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any, train: bool, eps: float,
    wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """Of x, weight and bias; with the batch's statistics in training, else with those that were given."""
    shape, over = layers.channels(x), (0, *range(2, x.ndim))
    wide, gradient = x.astype(jnp.float32), gradient.astype(jnp.float32)
    if not train:
        mean, rstd = running_mean, lax.rsqrt(running_var + eps)
    mean, rstd = mean.reshape(shape), rstd.reshape(shape)
    normal = (wide - mean) * rstd
    of_b, of_w = gradient.sum(over), (gradient * normal).sum(over)
    scale = rstd if w is None else rstd * w.reshape(shape)
    count = x.size // x.shape[1]
    rest = (of_b.reshape(shape) + normal * of_w.reshape(shape)) / max(count, 1) if train else 0
    return ((gradient - rest) * scale).astype(x.dtype), of_w if wanted[1] else None, of_b if wanted[2] else None


def dropout_backward(gradient: Any, mask: Any, scale: float) -> Any:
    """What was kept has a gradient, `scale` times; a mask of floats is that of a dropout that was off."""
    return (jnp.where(mask, gradient * scale, 0) if mask.dtype == jnp.bool_ else gradient).astype(gradient.dtype)


def softmax_backward(gradient: Any, y: Any, dim: int, dtype: Any) -> Any:
    """Of the argument, by the result."""
    return (y * (gradient - (gradient * y).sum(axes(dim, y.ndim), keepdims=True))).astype(y.dtype)


def log_softmax_backward(gradient: Any, y: Any, dim: int, dtype: Any) -> Any:
    """The same for its logarithm."""
    return gradient - jnp.exp(y) * gradient.sum(axes(dim, y.ndim), keepdims=True)


def nll_backward(
    gradient: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any
) -> Any:  # fmt: skip
    """Of the logarithms of probabilities, whose axis of classes is the second one, or the only one."""
    axis = min(1, x.ndim - 1)
    counts = target != ignored
    share = jnp.where(counts, 1 if weight is None else weight[jnp.where(counts, target, 0)], 0) * -gradient
    share = share / total if reduction == 1 else share  # a mean
    classes = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where(classes == jnp.expand_dims(target, axis), jnp.expand_dims(share, axis), 0).astype(x.dtype)


def gelu_backward(gradient: Any, x: Any, *, approximate: str = "none") -> Any:
    """Exact, or with tanh."""
    return _pulled(lambda x: jax.nn.gelu(x, approximate=approximate == "tanh"), gradient, x)[0]


def embedding_backward(gradient: Any, places: Any, count: int, padding_idx: int, by_frequency: bool) -> Any:
    """Sums for each row of the table, in float32."""
    flat, wide = places.reshape(-1), gradient.astype(jnp.float32).reshape(-1, gradient.shape[-1])
    if by_frequency:
        often = jnp.zeros(count, jnp.float32).at[flat].add(1)
        wide = wide / often[flat][:, None]
    found = jnp.zeros((count, wide.shape[-1]), jnp.float32).at[flat].add(wide)
    return found.at[padding_idx].set(0) if padding_idx >= 0 else found


def select_backward(gradient: Any, sizes: Sequence[int], dim: int, index: int) -> Any:
    """Zeros but for one place of an axis."""
    return slice_backward(jnp.expand_dims(gradient, dim % len(sizes)), sizes, dim, index, index + 1 or None, 1)


def slice_backward(gradient: Any, sizes: Sequence[int], dim: int, start: int, end: Any, step: int) -> Any:
    """Zeros but for a part of an axis."""
    dim %= len(sizes)
    first, _, _ = slice(start, end, step).indices(sizes[dim])
    count = gradient.shape[dim]
    behind = sizes[dim] - first - ((count - 1) * step + 1 if count else 0)
    pads = [(first, behind, step - 1) if at == dim else (0, 0, 0) for at in range(len(sizes))]
    return lax.pad(gradient, jnp.zeros((), gradient.dtype), pads)


def max_pool_backward(
    gradient: Any, x: Any, size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, places: Any
) -> Any:  # fmt: skip
    """To the places that were the largest."""
    count = len(size)
    if set(dilation) == {1}:  # XLA has an operator for it, which finds them again
        pool = layers.OPS[f"max_pool{count}d_with_indices"]
        return _pulled(lambda x: pool(x, size, stride, padding, 1, ceil)[0], gradient, x)[0]
    return _to_places(gradient, x, places, count)


def _to_places(gradient: Any, x: Any, places: Any, count: int) -> Any:
    """count: of the last axes, whose elements are numbered."""
    lead, few, many = (math.prod(each) for each in (x.shape[:-count], gradient.shape[-count:], x.shape[-count:]))
    flat = gradient.reshape(lead, few)
    rows = jnp.arange(len(flat))[:, None]
    found = jnp.zeros((len(flat), many), gradient.dtype).at[rows, places.reshape(flat.shape)].add(flat)
    return found.reshape(x.shape)


def weight_norm_backward(gradient: Any, v: Any, g: Any, norms: Any, dim: int) -> Any:
    """Of the direction and the length."""
    over = tuple(at for at in range(v.ndim) if at != dim % v.ndim)
    return _pulled(lambda v, g: v * (g / jnp.sqrt(jnp.square(v).sum(over, keepdims=True))), gradient, v, g)


def distances_backward(gradient: Any, a: Any, b: Any, p: float, distances: Any) -> Any:
    """Of the first points; 0 where two points are one."""
    apart = a[..., :, None, :] - b[..., None, :, :]
    gradient, distances = gradient[..., None], distances[..., None]
    zero = distances == 0
    safe = jnp.where(zero, 1, distances)
    if p == 0:
        slopes = jnp.zeros_like(apart)
    elif p == 1:
        slopes = jnp.sign(apart)
    elif p == math.inf:
        slopes = jnp.sign(apart) * (jnp.abs(apart) == distances)
    else:
        size = jnp.where(apart == 0, 1, jnp.abs(apart))
        slopes = jnp.where(zero | (apart == 0), 0, jnp.sign(apart) * (size / safe) ** (p - 1))
    return (gradient * slopes).sum(-2)


def rrelu_backward(
    gradient: Any, x: Any, slopes: Any, low: float, high: float, train: bool, is_result: bool
) -> Any:  # fmt: skip
    """By the slopes that were drawn, in evaluation by the mean one."""
    return gradient * (slopes if train else jnp.where(x > 0, 1, (low + high) / 2).astype(x.dtype))


def _smooth(form: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of a linear operator whose arguments follow its gradient and its array."""
    return lambda gradient, x, *args: _pulled(lambda x: form(x, *args), gradient, x)[0]


def _resized(form: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of resizing, which names the sizes of its result and of its argument."""

    def apply(gradient: Any, size: Any, shape: Sequence[int], *args: Any) -> Any:
        transposed = jax.linear_transpose(
            lambda x: form(x, size, *args), jax.ShapeDtypeStruct(tuple(shape), gradient.dtype)
        )
        return transposed(gradient)[0]

    return apply


OPS: dict[str, Callable[..., Any]] = {
    "native_layer_norm_backward": layer_norm_backward, "_fused_rms_norm_backward": rms_norm_backward,
    "native_group_norm_backward": group_norm_backward, "native_batch_norm_backward": batch_norm_backward,
    "native_dropout_backward": dropout_backward, "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": log_softmax_backward, "nll_loss_backward": nll_backward,
    "nll_loss2d_backward": nll_backward, "gelu_backward": gelu_backward,
    "silu_backward": lambda gradient, x: _pulled(jax.nn.silu, gradient, x)[0],
    "_weight_norm_interface_backward": weight_norm_backward, "embedding_dense_backward": embedding_backward,
    "select_backward": select_backward,
    "slice_backward": slice_backward, "max_pool2d_with_indices_backward": max_pool_backward,
    "max_pool3d_with_indices_backward": max_pool_backward,
    **{f"adaptive_max_pool{n}d_backward": lambda gradient, x, places, n=n: _to_places(gradient, x, places, n)
       for n in (2, 3)},
    "_cdist_backward": distances_backward, "rrelu_with_noise_backward": rrelu_backward,
    **{f"avg_pool{n}d_backward": _smooth(layers.OPS[f"avg_pool{n}d"]) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward": lambda gradient, x, n=n: _pulled(
        lambda x: layers.adaptive_pool(x, gradient.shape[-n:]), gradient, x
    )[0] for n in (2, 3)},
    **{f"replication_pad{n}d_backward": _smooth(shapes.OPS[f"replication_pad{n}d"]) for n in (1, 2, 3)},
    **{f"{name}_backward": _resized(layers.OPS[name]) for name in (
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
        "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    )},
}  # fmt: skip
"""By name."""
