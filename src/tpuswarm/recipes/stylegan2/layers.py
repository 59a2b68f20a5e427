"""Layers of both networks, with an equalised learning rate, and modulated convolution.

Weights are drawn from N(0, 1) and scaled when used, so that Adam moves all of them at one rate (Karras et al. 2018,
1710.10196, section 4.1). R1 and path length differentiate all layers twice.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tpuswarm.recipes.stylegan2.config import MIN_RESOLUTION
from tpuswarm.recipes.stylegan2.convolution import convolve, repeat_channels
from tpuswarm.train.program.rounding import broadcast_then_round

Params = dict[str, Any]

LEAK = 0.2
GAIN = 2**0.5
"""Restores the variance that a leaky ReLU takes."""
HALF_RESOLUTION_COUNT = 4
"""With bf16, this many of the highest resolutions, of 8 or more, compute in it (Karras et al. 2020, 2006.06676,
appendix C)."""
TILE_SIZE = 128
"""Channels of a TPU's tile (https://docs.jax.dev/en/latest/pallas/tpu/details.html)."""


class Form(NamedTuple):
    """Precision and memory layout of the networks.

    half: multiply in bfloat16, and compute the highest resolutions in it. folds: fold rows with few channels.
    """

    half: bool = False
    folds: bool = False

    def dtype(self, resolution: int, highest: int) -> Any:
        """Return the dtype of activations at a resolution, in networks for pictures of `highest` x `highest`."""
        is_half = self.half and resolution > MIN_RESOLUTION and resolution << HALF_RESOLUTION_COUNT > highest
        return jnp.bfloat16 if is_half else jnp.float32

    def fold(self, channels: int, side: int) -> int:
        """Return how many pixels of a row of `side` share a place: a power of two."""
        most = min(TILE_SIZE // channels, side // MIN_RESOLUTION) if self.folds else 1
        return 1 << max(0, most.bit_length() - 1)


def new_convolution(key: jax.Array, size: int, inputs: int, outputs: int) -> Params:
    """Return weights and bias of a convolution of size x size."""
    shape = (size, size, inputs, outputs)
    return {"w": jax.random.normal(key, shape, jnp.float32), "b": jnp.zeros((outputs,), jnp.float32)}


def new_dense(key: jax.Array, inputs: int, outputs: int, *, bias: float = 0.0, rate: float = 1.0) -> Params:
    """Return weights and bias of a layer that learns at `rate` times the learning rate."""
    w = jax.random.normal(key, (inputs, outputs), jnp.float32) / rate
    return {"w": w, "b": jnp.full((outputs,), bias, jnp.float32)}


def scaled(w: jax.Array) -> jax.Array:
    """Divide weights by the square root of one output's inputs."""
    return w * (w.size // w.shape[-1]) ** -0.5


def dense(x_BxI: jax.Array, layer: Params, rate: float = 1.0) -> jax.Array:
    """Return x_BxO in float32."""
    x_BxO = x_BxI @ (scaled(layer["w"]) * rate)
    return x_BxO + jnp.broadcast_to(layer["b"] * rate, x_BxO.shape)


def activate(x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Add the bias to the last axis, or to every pixel in a folded place; leaky ReLU, gain."""
    if bias is not None:
        x = x + broadcast_then_round(repeat_channels(bias, x.shape[-1]), x)
    return jax.nn.leaky_relu(x, LEAK) * GAIN


def modulated(
    x_BxHxWxI: jax.Array,
    w_BxD: jax.Array,
    layer: Params,
    half: bool,
    *,
    up: int = 1,
    demodulate: bool = True,
    folds: tuple[int, int] = (1, 1),
) -> jax.Array:
    """Convolve with weights scaled by each picture's style (Karras et al. 2020, section 2.2).

    Scaling inputs and outputs equals weights w' = s_i w and their demodulation, and needs one convolution for the whole
    batch. Styles and the sum over weights stay in float32. folds: as in `convolve`.
    """
    style_BxI = dense(w_BxD, layer["style"])
    kernel_KxKxIxO = scaled(layer["w"])
    style = repeat_channels(style_BxI, x_BxHxWxI.shape[-1])[:, None, None]
    x_BxHxWxI = x_BxHxWxI * broadcast_then_round(style, x_BxHxWxI)
    x_BxHxWxO = convolve(x_BxHxWxI, kernel_KxKxIxO, half, up=up, folds=folds)
    if demodulate:
        energy_IxO = jnp.square(kernel_KxKxIxO).sum((0, 1))
        scale_BxO = jax.lax.rsqrt(jnp.square(style_BxI) @ energy_IxO + 1e-8)
        scale = repeat_channels(scale_BxO, x_BxHxWxO.shape[-1])[:, None, None]
        x_BxHxWxO = x_BxHxWxO * broadcast_then_round(scale, x_BxHxWxO)
    return x_BxHxWxO
