"""Convolution with FIR resampling, of folded rows too."""

from functools import partial

import jax
import jax.numpy as jnp

from tpuswarm.recipes.stylegan2.fold import folded_kernel, refold
from tpuswarm.recipes.stylegan2.resample import TAPS, blur
from tpuswarm.train.program.flops import stated_flops


def convolve(
    x_BxHxWxI: jax.Array, w_KxKxIxO: jax.Array, half: bool, up: int = 1, down: int = 1, folds: tuple[int, int] = (1, 1)
) -> jax.Array:
    """Convolution of square pictures, with FIR resampling by 2 where `up` or `down` asks for it; of x's dtype.

    half: products of bfloat16, whatever x is; a TPU would make those of float32 in the same precision. folds: pixels
    that a place of a row holds, of x and of the result, which has no more than x where its rows are half as long.
    """
    K, _, inputs, outputs = w_KxKxIxO.shape
    B, H = x_BxHxWxI.shape[:2]
    pad, kept = K // 2, x_BxHxWxI.dtype
    product = jnp.bfloat16 if half else kept
    along = (1, 2) if folds == (1, 1) else (1,)  # along folded rows the kernel filters
    if down == 2:
        x_BxHxWxI = blur(x_BxHxWxI, 1 + pad, 1 + pad, along=along)
    edge = 2 if up == 2 else pad if down == 1 else 0
    multiply = partial(
        jax.lax.conv_general_dilated, x_BxHxWxI.astype(product), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    if folds == (1, 1):
        x_BxHxWxO = multiply(w_KxKxIxO.astype(product), (down, down), [(edge, edge)] * 2, lhs_dilation=(up, up))
    else:
        inside, outside = folds[0], folds[0] * up // down
        taps = tuple(up * tap / sum(TAPS) for tap in TAPS) if up * down > 1 else (1.0,)
        kernel = folded_kernel(w_KxKxIxO, taps, up, down, inside, outside).astype(product)
        near = kernel.shape[1] // 2
        meet = K * H // down - (2 * pad if up * down == 1 else 0)  # pairs of a pixel and a tap along an axis
        with stated_flops(2 * B * inputs * outputs * meet**2):
            x_BxHxWxO = multiply(kernel, (down, 1), [(edge, edge), (near, near)], lhs_dilation=(up, 1))
        x_BxHxWxO = refold(x_BxHxWxO, outside, folds[1])
    x_BxHxWxO = x_BxHxWxO.astype(kept)
    return blur(x_BxHxWxO, 1, 1, gain=2.0, along=along) if up == 2 else x_BxHxWxO
