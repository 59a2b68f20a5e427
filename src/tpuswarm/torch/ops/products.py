"""Matrix products, convolutions, attention and embedding look-ups."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuswarm.torch.ops.dtypes import promote, saturating_cast
from tpuswarm.torch.ops.random_numbers import dropout
from tpuswarm.torch.ops.scattering import take
from tpuswarm.train.program.attention import kernel, usable_form
from tpuswarm.train.recipe import Options


def is_outer_product(a: Any, b: Any) -> bool:
    """Return whether a matrix product sums nothing."""
    return bool(a.ndim == b.ndim > 1 and a.shape[-1] == 1)


def _matmul(a: Any, b: Any) -> Any:
    a, b = promote(a, b)
    return a * b if is_outer_product(a, b) else a @ b  # a matrix unit may round float32 to 16 bits


def _addmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    c, a, b = promote(c, a, b)
    product = a @ b if alpha == 1 else (a @ b) * alpha
    return product if beta == 0 else (c if beta == 1 else c * beta) + product


def _addbmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    c, a, b = promote(c, a, b)
    product = jnp.einsum("bij,bjk->ik", a, b) * jnp.asarray(alpha, a.dtype)
    return product if beta == 0 else c * jnp.asarray(beta, c.dtype) + product


def _convolution(
    x: Any, w: Any, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """Convolve x [N, C, …] with w [O, C / groups, …], or with w [C, O / groups, …] if transposed."""
    rank = x.ndim - 2
    stride, padding, dilation, output_padding = (
        list(sizes) * rank if len(sizes) == 1 else list(sizes) for sizes in (stride, padding, dilation, output_padding)
    )
    x, w = promote(x, w)
    pads, input_dilation = [(p, p) for p in padding], [1] * rank
    if transposed:
        inputs, outputs, *size = w.shape
        w = w.reshape(groups, inputs // groups, outputs, *size).swapaxes(1, 2)
        w = jnp.flip(w.reshape(groups * outputs, inputs // groups, *size), tuple(range(2, 2 + rank)))
        reach = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        pads = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding, strict=True)]
        stride, input_dilation = input_dilation, stride
    y = lax.conv_general_dilated(
        x, w, stride, pads, lhs_dilation=input_dilation, rhs_dilation=dilation, feature_group_count=groups
    )
    return y if bias is None else y + bias.astype(y.dtype).reshape(1, -1, *[1] * rank)


def _convolution_backward(
    gradient: Any, x: Any, w: Any, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    def forward(x: Any, w: Any) -> Any:
        return _convolution(x, w, None, stride, padding, dilation, transposed, output_padding, groups)

    dx, dw = jax.vjp(forward, x, w)[1](gradient.astype(x.dtype)) if output_mask[0] or output_mask[1] else (None, None)
    db = gradient.sum((0, *range(2, gradient.ndim)), dtype=jnp.float32) if output_mask[2] else None
    return dx, dw, db


def _attention(
    key: jax.Array | None, options: Options, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Any:  # fmt: skip
    """Compute scaled dot-product attention of […, H, T, K].

    A boolean mask is true where a position may attend; a float mask is added to the scores. A position that may attend
    to nothing gets zeros. Without a mask the kernel of `options.attention` is used if it supports the shape.
    """
    shape = *q.shape[:-1], v.shape[-1]
    if q.ndim < 4:  # without heads
        q, k, v, mask = (None if x is None else jnp.expand_dims(x, -3) for x in (q, k, v, mask))
    dtype = jnp.bfloat16 if options.precision == "bf16" else v.dtype

    def heads_last(x: Any) -> Any:
        return jnp.swapaxes(x.astype(dtype).reshape(-1, *x.shape[-3:]), 1, 2)

    q_BxTxHxK, k_BxSxGxK, v_BxSxGxK = heads_last(q), heads_last(k), heads_last(v)
    width, queries, keys = q.shape[-1], q.shape[-2], k.shape[-2]
    is_bf16, head_width = dtype == jnp.bfloat16, max(width, v.shape[-1])
    form = usable_form(options.attention, bf16=is_bf16, head_width=head_width, queries=queries, keys=keys)
    key = key if dropout_p else None
    bias = can_attend = None
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*q.shape[:-2], queries, keys))
        mask = mask.reshape(-1, *mask.shape[-3:])
        can_attend = (mask if mask.dtype == jnp.bool_ else mask > -jnp.inf).any(-1, keepdims=True)
        mask = jnp.where(can_attend, mask, jnp.ones((), mask.dtype))
        mask, bias = (mask, None) if mask.dtype == jnp.bool_ else (None, saturating_cast(mask, dtype))
    if mask is None and bias is None and form != "xla" and key is None and (queries == keys or not is_causal):
        scale = width**-0.5 if scale is None else scale
        y = kernel(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, form, causal=is_causal, scale=scale)
    elif key is not None or width != v.shape[-1]:
        y = _plain_attention(key, q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask, bias, dropout_p, is_causal, scale)
    else:
        y = jax.nn.dot_product_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, bias, mask, scale=scale, is_causal=is_causal)
    if can_attend is not None:
        y = jnp.where(jnp.swapaxes(can_attend, 1, 2), y, 0)
    return jnp.swapaxes(y, 1, 2).reshape(shape)


def _plain_attention(
    key: jax.Array | None, q: Any, k: Any, v: Any, mask: Any, bias: Any, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> Any:  # fmt: skip
    """Compute attention with dropout of weights or with values of another width, which jax.nn does not support."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if is_causal:
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)  # type: ignore[no-untyped-call]
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(q.dtype)
    if key is not None:
        weights, _ = dropout(key, weights, dropout_p)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def _trilinear(
    a: Any, b: Any, c: Any, expand_a: Sequence[int], expand_b: Sequence[int], expand_c: Sequence[int],
    sum_dims: Sequence[int], unroll: int = 1,
) -> Any:  # fmt: skip
    a, b, c = (jnp.expand_dims(x, tuple(dims)) for x, dims in ((a, expand_a), (b, expand_b), (c, expand_c)))
    return (a * b * c).sum(tuple(sum_dims))


def _grouped_matmul(x: Any, w: Any, ends: Any) -> Any:
    """Multiply each group of rows of x with its matrix of w; ends: where each group ends."""
    return lax.ragged_dot(x, w, jnp.diff(ends, prepend=0).astype(jnp.int32))


def _grouped_matmul_backward(x: Any, w: Any, ends: Any, gradient: Any) -> Any:
    return jax.vjp(lambda x, w: _grouped_matmul(x, w, ends), x, w)[1](gradient.astype(x.dtype))


OPS: dict[str, Callable[..., Any]] = {
    "_trilinear": _trilinear, "mm": _matmul, "bmm": _matmul, "mv": _matmul, "dot": _matmul, "addmm": _addmm,
    "baddbmm": _addmm, "addmv": _addmm, "addbmm": _addbmm, "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding": lambda w, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False: take(w, (indices,)),
    "transformers.grouped_mm_fallback": _grouped_matmul,  # a mixture of experts
    "transformers.grouped_mm_fallback_backward": _grouped_matmul_backward,
}  # fmt: skip

DIFFERENTIABLE: dict[str, Callable[..., Any]] = {"tpuswarm.attention": _attention}
