"""What both networks are made of: FIR resampling, layers with an equalised learning rate, modulated convolution.

Weights are drawn from N(0, 1) and scaled as they are used, so that Adam moves all of them at one rate (Karras et al.
2018, 1710.10196, section 4.1). All of it is plain JAX that can be differentiated twice, as R1 and path length need.
"""

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]

TAPS = (1.0, 3.0, 3.0, 1.0)
"""The FIR filter of each axis (Zhang 2019, 1904.11486; Karras et al. 2020, appendix B)."""
LEAK = 0.2
GAIN = 2**0.5
"""Restores the variance that a leaky ReLU takes."""


def _filter(x_BxHxWxC: jax.Array, axis: int, low: int, high: int, up: int, gain: float) -> jax.Array:
    """Zeros between the rows (up - 1) and around them, then the FIR filter along one axis.

    A sum of four shifted arrays: the compiler makes one loop of it, where a convolution per channel would be slow.
    """
    edges = [(0, 0, 0)] * 4
    edges[axis] = (low, high, up - 1)
    x = jax.lax.pad(x_BxHxWxC, jnp.zeros((), x_BxHxWxC.dtype), edges)
    length = x.shape[axis] - len(TAPS) + 1
    parts = (
        jax.lax.slice_in_dim(x, shift, shift + length, axis=axis) * (gain * tap / sum(TAPS))
        for shift, tap in enumerate(TAPS)
    )
    return sum(parts, start=jnp.zeros((), x.dtype))


def blur(x_BxHxWxC: jax.Array, low: int, high: int, gain: float = 1.0) -> jax.Array:
    """The FIR filter along both axes, with `low` and `high` zeros before and after each."""
    return _filter(_filter(x_BxHxWxC, 1, low, high, 1, gain), 2, low, high, 1, gain)


def upsample(x_BxHxWxC: jax.Array) -> jax.Array:
    """Twice the height and width: x_Bx2Hx2WxC."""
    return _filter(_filter(x_BxHxWxC, 1, 2, 2, 2, 2.0), 2, 2, 2, 2, 2.0)


def downsample(x_BxHxWxC: jax.Array) -> jax.Array:
    """Half the height and width: x_BxH/2xW/2xC."""
    return blur(x_BxHxWxC, 1, 1)[:, ::2, ::2]


def convolve(x_BxHxWxI: jax.Array, w_KxKxIxO: jax.Array, half: bool, up: int = 1, down: int = 1) -> jax.Array:
    """Convolution, with FIR resampling by 2 where `up` or `down` asks for it; the result has the dtype of x.

    half: products of bfloat16, whatever x is; a TPU would make those of float32 in the same precision.
    """
    kept, product = x_BxHxWxI.dtype, jnp.bfloat16 if half else x_BxHxWxI.dtype
    pad = w_KxKxIxO.shape[0] // 2
    padding = (pad, pad)
    if up == 2:
        padding = (2, 2)
    if down == 2:
        x_BxHxWxI, padding = blur(x_BxHxWxI, 1 + pad, 1 + pad), (0, 0)
    x_BxHxWxO = jax.lax.conv_general_dilated(
        x_BxHxWxI.astype(product),
        w_KxKxIxO.astype(product),
        window_strides=(down, down),
        padding=(padding, padding),
        lhs_dilation=(up, up),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ).astype(kept)
    return blur(x_BxHxWxO, 1, 1, gain=2.0) if up == 2 else x_BxHxWxO


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
    """Bias over the last axis, leaky ReLU, gain."""
    if bias is not None:
        x = x + jnp.broadcast_to(bias.astype(x.dtype), x.shape)
    return jax.nn.leaky_relu(x, LEAK) * GAIN


def modulated(
    x_BxHxWxI: jax.Array, w_BxD: jax.Array, layer: Params, half: bool, *, up: int = 1, demodulate: bool = True
) -> jax.Array:
    """Convolution with weights of each picture's own, scaled by its style (Karras et al. 2020, section 2.2).

    Weights w' = s_i w and their demodulation are the same as scaling what goes in and what comes out: one convolution
    over the batch in the place of one for each picture. Styles and the sum over weights stay in float32.
    """
    style_BxI = dense(w_BxD, layer["style"])
    kernel_KxKxIxO = scaled(layer["w"])
    x_BxHxWxO = convolve(x_BxHxWxI * style_BxI[:, None, None].astype(x_BxHxWxI.dtype), kernel_KxKxIxO, half, up=up)
    if demodulate:
        energy_IxO = jnp.square(kernel_KxKxIxO).sum((0, 1))
        scale_BxO = jax.lax.rsqrt(jnp.square(style_BxI) @ energy_IxO + 1e-8)
        x_BxHxWxO = x_BxHxWxO * scale_BxO[:, None, None].astype(x_BxHxWxO.dtype)
    return x_BxHxWxO
