"""Convolve pictures, with FIR resampling by 2 and with rows folded for a TPU.

A TPU stores channels in tiles of 128 and multiplies them in a unit of the same width. 32 channels therefore cost the
memory, traffic and time of 128. Folding puts neighbouring pixels of a row into the channels: folded by 4, x_BxHxWx32
becomes x_BxHxW/4x128, a reshape. Its convolution has 128 channels and a kernel with zeros.
"""

from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.train.program.flops import stated_flops

FIR_TAPS = (1.0, 3.0, 3.0, 1.0)
"""The filter of each axis (Zhang 2019, 1904.11486; Karras et al. 2020, appendix B)."""


def convolve(
    x_BxHxWxI: jax.Array, w_KxKxIxO: jax.Array, half: bool, up: int = 1, down: int = 1, folds: tuple[int, int] = (1, 1)
) -> jax.Array:
    """Convolve square pictures in x's dtype; `up` or `down` of 2 also resamples with the FIR filter.

    half: multiply in bfloat16, whatever x's dtype; a TPU does so for float32 anyway. folds: pixels in one place of a
    row, of x and of the result.
    """
    K, _, inputs, outputs = w_KxKxIxO.shape
    B, H = x_BxHxWxI.shape[:2]
    pad, dtype = K // 2, x_BxHxWxI.dtype
    product_dtype = jnp.bfloat16 if half else dtype
    blurred_axes = (1, 2) if folds == (1, 1) else (1,)  # along folded rows the kernel filters
    if down == 2:
        x_BxHxWxI = blur(x_BxHxWxI, 1 + pad, 1 + pad, axes=blurred_axes)
    edge = 2 if up == 2 else pad if down == 1 else 0
    multiply = partial(
        jax.lax.conv_general_dilated, x_BxHxWxI.astype(product_dtype), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    if folds == (1, 1):
        x_BxHxWxO = multiply(w_KxKxIxO.astype(product_dtype), (down, down), [(edge, edge)] * 2, lhs_dilation=(up, up))
    else:
        fold_in, fold_out = folds[0], folds[0] * up // down
        taps = tuple(up * tap / sum(FIR_TAPS) for tap in FIR_TAPS) if up * down > 1 else (1.0,)
        kernel = folded_kernel(w_KxKxIxO, taps, up, down, fold_in, fold_out).astype(product_dtype)
        row_pad = kernel.shape[1] // 2
        products = K * H // down - (2 * pad if up * down == 1 else 0)  # pairs of a pixel and a tap along an axis
        with stated_flops(2 * B * inputs * outputs * products**2):
            x_BxHxWxO = multiply(kernel, (down, 1), [(edge, edge), (row_pad, row_pad)], lhs_dilation=(up, 1))
        x_BxHxWxO = refold(x_BxHxWxO, fold_out, folds[1])
    x_BxHxWxO = x_BxHxWxO.astype(dtype)
    return blur(x_BxHxWxO, 1, 1, gain=2.0, axes=blurred_axes) if up == 2 else x_BxHxWxO


def blur(x_BxHxWxC: jax.Array, low: int, high: int, gain: float = 1.0, axes: tuple[int, ...] = (1, 2)) -> jax.Array:
    """Apply the FIR filter along axes, with `low` and `high` zeros before and after each."""
    for axis in axes:
        x_BxHxWxC = _filter(x_BxHxWxC, axis, low, high, 1, gain)
    return x_BxHxWxC


def upsample(x_BxHxWxC: jax.Array) -> jax.Array:
    """Double height and width: x_Bx2Hx2WxC."""
    return _filter(_filter(x_BxHxWxC, 1, 2, 2, 2, 2.0), 2, 2, 2, 2, 2.0)


def _filter(x_BxHxWxC: jax.Array, axis: int, low: int, high: int, up: int, gain: float) -> jax.Array:
    # A sum of four shifted arrays becomes one loop; a convolution per channel would be slow.
    edges = [(0, 0, 0)] * 4
    edges[axis] = (low, high, up - 1)
    x = jax.lax.pad(x_BxHxWxC, jnp.zeros((), x_BxHxWxC.dtype), edges)
    length = x.shape[axis] - len(FIR_TAPS) + 1
    shifted = (
        jax.lax.slice_in_dim(x, shift, shift + length, axis=axis) * (gain * tap / sum(FIR_TAPS))
        for shift, tap in enumerate(FIR_TAPS)
    )
    return sum(shifted, start=jnp.zeros((), x.dtype))


def refold(x_BxHxVxF: jax.Array, before: int, after: int) -> jax.Array:
    """Change the pixels in one place of a row from `before` to `after`."""
    B, H, V, F = x_BxHxVxF.shape
    return x_BxHxVxF.reshape(B, H, V * before // after, F // before * after)


def repeat_channels(x: jax.Array, channels: int) -> jax.Array:
    """Repeat per-channel values on the last axis for every pixel in a place of `channels` channels."""
    return jnp.tile(x, channels // x.shape[-1])


def spread_over_channels(x_BxHxW: jax.Array, channels: int, fold: int) -> jax.Array:
    """Give all channels of a pixel its value: x_BxHxW/foldx(fold·channels).

    A sum of masks, because a TPU would store a reshape in nearly empty tiles.
    """
    masks = np.repeat(np.eye(fold, dtype=np.float32), channels, axis=1)
    return reduce(add, (x_BxHxW[:, :, pixel::fold, None] * mask[None, None, None] for pixel, mask in enumerate(masks)))


def folded_kernel(
    w_KxKxIxO: jax.Array, taps: tuple[float, ...], up: int, down: int, fold_in: int, fold_out: int
) -> jax.Array:
    """Return the kernel w_KxQx(fold_in·I)x(fold_out·O) of a convolution of folded rows; K is 3 or 1.

    Along rows it resamples by `up` or `down` and filters by `taps`. Q is odd; its middle tap is the pixels' own place.
    """
    K, _, inputs, outputs = w_KxKxIxO.shape
    first = K // 2 + len(taps) // 2 - (down - 1)
    places_KxQxJxP = np.zeros((K, 3, fold_in, fold_out), np.float32)
    for column in range(K):
        for number, tap in enumerate(taps):
            for pixel in range(fold_out):
                source, remainder = divmod(pixel * down + column + number - first, up)
                if not remainder:
                    place, within = divmod(source, fold_in)
                    places_KxQxJxP[column, 1 + place, within, pixel] += tap
    if not places_KxQxJxP[:, ::2].any():
        places_KxQxJxP = places_KxQxJxP[:, 1:2]
    with stated_flops(0):
        kernel = jnp.einsum("hkio,kqjp->hqjipo", w_KxKxIxO, places_KxQxJxP, precision="highest")
    return kernel.reshape(K, places_KxQxJxP.shape[1], fold_in * inputs, fold_out * outputs)
