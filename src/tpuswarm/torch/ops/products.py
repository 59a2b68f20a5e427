"""Products of matrices, convolutions, attention, and look-ups in tables."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuswarm.torch.ops.dtypes import alike, within
from tpuswarm.train.program.attention import kernel, usable_form
from tpuswarm.train.recipe import Options


def matmul(a: Any, b: Any) -> Any:
    """Of two matrices, or of equally many."""
    a, b = alike(a, b)
    if a.ndim == b.ndim > 1 and a.shape[-1] == 1:
        return a * b  # an outer product: a matrix unit may take float32 in 16 bits
    return a @ b


def addmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta·c + alpha·(a @ b)."""
    c, a, b = alike(c, a, b)
    product = a @ b if alpha == 1 else (a @ b) * alpha
    return product if beta == 0 else (c if beta == 1 else c * beta) + product


def addbmm(c: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """beta·c + alpha·the sum of all a @ b."""
    c, a, b = alike(c, a, b)
    product = jnp.einsum("bij,bjk->ik", a, b) * jnp.asarray(alpha, a.dtype)
    return jnp.broadcast_to(product if beta == 0 else c * jnp.asarray(beta, c.dtype) + product, product.shape)


def convolution(
    x: Any, w: Any, bias: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """x [N, C, …], w [O, C / groups, …]; transposed: w [C, O / groups, …]."""
    axes_ = x.ndim - 2
    letters = "DHW"[3 - axes_ :]
    numbers = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    stride, padding, dilation, output_padding = (
        list(each) * axes_ if len(each) == 1 else list(each) for each in (stride, padding, dilation, output_padding)
    )
    x, w = alike(x, w)
    if transposed:
        size = w.shape[2:]
        inputs, outputs = w.shape[0], w.shape[1]
        w = w.reshape(groups, inputs // groups, outputs, *size).swapaxes(1, 2)
        w = jnp.flip(w.reshape(groups * outputs, inputs // groups, *size), tuple(range(2, 2 + axes_)))
        reach = [d * (k - 1) for d, k in zip(dilation, size, strict=True)]
        pads = [(r - p, r - p + more) for r, p, more in zip(reach, padding, output_padding, strict=True)]
        y = lax.conv_general_dilated(
            x, w, [1] * axes_, pads, lhs_dilation=stride, rhs_dilation=dilation, dimension_numbers=numbers,
            feature_group_count=groups,
        )  # fmt: skip
    else:
        y = lax.conv_general_dilated(
            x, w, stride, [(p, p) for p in padding], rhs_dilation=dilation, dimension_numbers=numbers,
            feature_group_count=groups,
        )  # fmt: skip
    return y if bias is None else y + bias.astype(y.dtype).reshape(1, -1, *[1] * axes_)


def convolution_backward(
    gradient: Any, x: Any, w: Any, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """The gradients of x, w and the bias; None where one is not wanted."""

    def forward(x: Any, w: Any) -> Any:
        return convolution(x, w, None, stride, padding, dilation, transposed, output_padding, groups)

    _, pull = jax.vjp(forward, x, w)
    of_x, of_w = pull(gradient.astype(x.dtype)) if wanted[0] or wanted[1] else (None, None)
    of_bias = gradient.sum((0, *range(2, gradient.ndim)), dtype=jnp.float32) if wanted[2] else None
    return of_x, of_w, of_bias


def embedding(
    w: Any, places: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:  # fmt: skip
    """Rows of a table."""
    return w[places]


def attention(
    key: jax.Array | None, options: Options, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool,
    scale: float | None, groups: bool,
) -> Any:  # fmt: skip
    """Scaled dot-product attention of […, H, T, K]. mask: of booleans, true where it may look, or added to scores.

    Without a mask it is done by the kernel that `options.attention` names, where that can. A place that may look
    nowhere gets zeros.
    """
    many = q.ndim > 3
    dtype = jnp.bfloat16 if options.precision == "bf16" else v.dtype
    q, k, v = (each.astype(dtype) for each in (q, k, v))

    def heads_later(x: Any) -> Any:
        x = x.reshape(-1, *x.shape[-3:]) if many else x.reshape(-1, 1, *x.shape[-2:])
        return jnp.swapaxes(x, 1, 2)

    q_BxTxHxK, k_BxSxGxK, v_BxSxGxK = heads_later(q), heads_later(k), heads_later(v)
    width, queries, keys = q.shape[-1], q.shape[-2], k.shape[-2]
    form = usable_form(
        options.attention, bf16=v.dtype == jnp.bfloat16, head_width=max(width, v.shape[-1]), queries=queries, keys=keys
    )
    if not dropout_p:
        key = None
    odd = is_causal and queries != keys
    bias = looks = None
    if mask is not None:
        if not many and mask.ndim > 2:
            mask = mask.reshape(*mask.shape[:-2], 1, *mask.shape[-2:])
        lead = q.shape[:-2] if many else (*q.shape[:-2], 1)
        mask = jnp.broadcast_to(mask, (*lead, queries, keys))
        mask = mask.reshape(-1, *mask.shape[-3:])
        looks = (mask if mask.dtype == jnp.bool_ else mask > -jnp.inf).any(-1, keepdims=True)
        mask = jnp.where(looks, mask, jnp.ones((), mask.dtype))
        mask, bias = (mask, None) if mask.dtype == jnp.bool_ else (None, within(mask, dtype))
    elif form != "xla" and key is None and not odd:
        scale = width**-0.5 if scale is None else scale
        y = kernel(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, form, causal=is_causal, scale=scale)
        return _heads_first(y, q, v)
    if key is not None or width != v.shape[-1]:
        y = _plainly(key, q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, mask, bias, dropout_p, is_causal, scale)
    else:
        y = jax.nn.dot_product_attention(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, bias, mask, scale=scale, is_causal=is_causal)
    if looks is not None:
        y = jnp.where(jnp.swapaxes(looks, 1, 2), y, 0)
    return _heads_first(y, q, v)


def _heads_first(y_BxTxHxK: Any, q: Any, v: Any) -> Any:
    return jnp.swapaxes(y_BxTxHxK, 1, 2).reshape(*q.shape[:-1], v.shape[-1])


def _plainly(
    key: jax.Array | None, q: Any, k: Any, v: Any, mask: Any, bias: Any, rate: float, is_causal: bool,
    scale: float | None,
) -> Any:  # fmt: skip
    """With dropout of the weights, or values of another width, which JAX's own does not have."""
    heads = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(each, heads, axis=2) if heads > 1 else each for each in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    if is_causal:
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)  # type: ignore[no-untyped-call]
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(q.dtype)
    if key is not None:
        weights = jnp.where(jax.random.bernoulli(key, 1 - rate, weights.shape), weights / (1 - rate), 0).astype(q.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def trilinear(
    a: Any, b: Any, c: Any, expand_a: Sequence[int], expand_b: Sequence[int], expand_c: Sequence[int],
    summed: Sequence[int], unroll: int = 1,
) -> Any:  # fmt: skip
    """The product of three arrays that get axes of length 1, summed up over some."""
    a, b, c = (jnp.expand_dims(each, tuple(at)) for each, at in ((a, expand_a), (b, expand_b), (c, expand_c)))
    letters = "abcdefgh"[: a.ndim]
    terms = ["".join(x for x, size in zip(letters, each.shape, strict=True) if size > 1) for each in (a, b, c)]
    kept = "".join(x for at, x in enumerate(letters) if at not in summed and any(x in term for term in terms))
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    found = jnp.einsum(f"{','.join(terms)}->{kept}", *(each.squeeze() for each in (a, b, c)))
    alone = math.prod(shape[at] for at in summed if not any(letters[at] in term for term in terms))
    return (found * alone).reshape([size for at, size in enumerate(shape) if at not in summed])


OPS: dict[str, Callable[..., Any]] = {
    "_trilinear": trilinear, "mm": matmul, "bmm": matmul, "mv": matmul, "dot": matmul, "matmul": matmul, "addmm": addmm,
    "baddbmm": addmm, "addmv": addmm, "addbmm": addbmm, "convolution": convolution,
    "convolution_backward": convolution_backward, "embedding": embedding,
}  # fmt: skip
"""By name."""

WHOLE = {"tpuswarm.attention": attention}
"""What has its derivative with it; a key and the options come first."""
