"""What both networks are made of: layers with an equalised learning rate, modulated convolution.

Weights are drawn from N(0, 1) and scaled as they are used, so that Adam moves all of them at one rate (Karras et al.
2018, 1710.10196, section 4.1). All of it is plain JAX that can be differentiated twice, as R1 and path length need.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.recipes.stylegan2.convolution import convolve
from tpuswarm.recipes.stylegan2.fold import tiled
from tpuswarm.train.program.rounding import broadcast_then_round

Params = dict[str, Any]

LEAK = 0.2
GAIN = 2**0.5
"""Restores the variance that a leaky ReLU takes."""


def new_convolution(key: jax.Array, size: int, inputs: int, outputs: int) -> Params:
    """Weights and bias of a convolution of size x size."""
    shape = (size, size, inputs, outputs)
    return {"w": jax.random.normal(key, shape, jnp.float32), "b": jnp.zeros((outputs,), jnp.float32)}


def new_dense(key: jax.Array, inputs: int, outputs: int, *, bias: float = 0.0, rate: float = 1.0) -> Params:
    """Weights and bias of a layer that learns at `rate` times the learning rate."""
    w = jax.random.normal(key, (inputs, outputs), jnp.float32) / rate
    return {"w": w, "b": jnp.full((outputs,), bias, jnp.float32)}


def scaled(w: jax.Array) -> jax.Array:
    """Weights as they are used: divided by the root of the inputs of one output."""
    return w * (w.size // w.shape[-1]) ** -0.5


def dense(x_BxI: jax.Array, layer: Params, rate: float = 1.0) -> jax.Array:
    """x_BxO in float32."""
    x_BxO = x_BxI @ (scaled(layer["w"]) * rate)
    return x_BxO + jnp.broadcast_to(layer["b"] * rate, x_BxO.shape)


def activate(x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Bias over the last axis, or over each pixel's part of it, leaky ReLU, gain."""
    if bias is not None:
        x = x + broadcast_then_round(tiled(bias, x.shape[-1]), x)
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
    """Convolution with weights of each picture's own, scaled by its style (Karras et al. 2020, section 2.2).

    Weights w' = s_i w and their demodulation are the same as scaling what goes in and what comes out: one convolution
    over the batch in the place of one for each picture. Styles and the sum over weights stay in float32. folds: as in
    `convolve`; the channels are then those of all pixels in a place.
    """
    style_BxI = dense(w_BxD, layer["style"])
    kernel_KxKxIxO = scaled(layer["w"])
    x_BxHxWxI = x_BxHxWxI * broadcast_then_round(tiled(style_BxI, x_BxHxWxI.shape[-1])[:, None, None], x_BxHxWxI)
    x_BxHxWxO = convolve(x_BxHxWxI, kernel_KxKxIxO, half, up=up, folds=folds)
    if demodulate:
        energy_IxO = jnp.square(kernel_KxKxIxO).sum((0, 1))
        scale_BxO = jax.lax.rsqrt(jnp.square(style_BxI) @ energy_IxO + 1e-8)
        x_BxHxWxO = x_BxHxWxO * broadcast_then_round(tiled(scale_BxO, x_BxHxWxO.shape[-1])[:, None, None], x_BxHxWxO)
    return x_BxHxWxO
