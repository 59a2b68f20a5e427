"""Rows that hold neighbouring pixels as channels, so that few channels fill a TPU's tiles.

A TPU keeps channels in tiles of 128 and multiplies them in a unit as wide: 32 of them take the memory, the traffic and
the time of 128. Folded by 4, x_BxHxWx32 is x_BxHxW/4x128: a reshape. A convolution of it is one of 128 channels, whose
kernel has a tap, or zero, for each two of the pixels.
"""

from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.recipes.stylegan2.config import FIRST
from tpuswarm.train.program.flops import stated_flops

HALVES = 4
"""With bf16, so many of the highest resolutions compute in it, of 8 or more (Karras et al. 2020, 2006.06676, appendix
C)."""
LANES = 128
"""Channels of a TPU's tile (https://docs.jax.dev/en/latest/pallas/tpu/details.html)."""


class Form(NamedTuple):
    """How the networks compute."""

    half: bool = False
    """Products of bfloat16, and everything in it at the highest resolutions."""
    folds: bool = False
    """Rows are folded where channels are few."""

    def dtype(self, resolution: int, highest: int) -> Any:
        """The dtype of a block's activations, in networks whose pictures have `highest` pixels a side."""
        is_half = self.half and resolution > FIRST and resolution << HALVES > highest
        return jnp.bfloat16 if is_half else jnp.float32

    def fold(self, channels: int, side: int) -> int:
        """Pixels of a row of `side` that are held in one place, a power of two."""
        most = min(LANES // channels, side // FIRST) if self.folds else 1
        return 1 << max(0, most.bit_length() - 1)


def refold(x_BxHxVxF: jax.Array, before: int, after: int) -> jax.Array:
    """Rows that hold `after` pixels in a place, of rows that hold `before`."""
    B, H, V, F = x_BxHxVxF.shape
    return x_BxHxVxF.reshape(B, H, V * before // after, F // before * after)


def tiled(x: jax.Array, channels: int) -> jax.Array:
    """Numbers of each channel, on the last axis, as those of all pixels in a place, which has `channels`."""
    return jnp.tile(x, channels // x.shape[-1])


def beside(x_BxHxW: jax.Array, channels: int, fold: int) -> jax.Array:
    """A number of each pixel for all of its channels: x_BxHxW/foldx(fold·channels).

    A sum of masks: a TPU would spread a reshape over tiles that are nearly empty.
    """
    masks = np.repeat(np.eye(fold, dtype=np.float32), channels, axis=1)
    return reduce(add, (x_BxHxW[:, :, pixel::fold, None] * mask[None, None, None] for pixel, mask in enumerate(masks)))


def folded_kernel(
    w_KxKxIxO: jax.Array, taps: tuple[float, ...], up: int, down: int, inside: int, outside: int
) -> jax.Array:
    """The kernel w_KxQx(inside·I)x(outside·O) of a convolution of folded rows.

    Along rows it resamples by `up` or `down` and filters by `taps`, from rows that hold `inside` pixels in a place to
    such that hold `outside`; Q is odd, and its middle meets the pixels' own place. K is 3 or 1.
    """
    K, _, inputs, outputs = w_KxKxIxO.shape
    first = K // 2 + len(taps) // 2 - (down - 1)
    places_KxQxJxP = np.zeros((K, 3, inside, outside), np.float32)
    for at in range(K):
        for number, tap in enumerate(taps):
            for pixel in range(outside):
                source, between = divmod(pixel * down + at + number - first, up)
                if not between:
                    place, within = divmod(source, inside)
                    places_KxQxJxP[at, 1 + place, within, pixel] += tap
    if not places_KxQxJxP[:, ::2].any():
        places_KxQxJxP = places_KxQxJxP[:, 1:2]
    with stated_flops(0):
        kernel = jnp.einsum("hkio,kqjp->hqjipo", w_KxKxIxO, places_KxQxJxP, precision="highest")
    return kernel.reshape(K, places_KxQxJxP.shape[1], inside * inputs, outside * outputs)
