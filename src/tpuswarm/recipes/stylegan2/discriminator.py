"""The discriminator: residual blocks, minibatch deviation, one score for each picture."""

import math

import jax
import jax.numpy as jnp

from tpuswarm.recipes.stylegan2.config import FIRST, Config
from tpuswarm.recipes.stylegan2.generator import HALVES
from tpuswarm.recipes.stylegan2.layers import (
    Params,
    activate,
    convolve,
    dense,
    downsample,
    new_convolution,
    new_dense,
    scaled,
)


def init(key: jax.Array, config: Config) -> Params:
    """Fresh float32 parameters."""
    keys = iter(jax.random.split(key, 4 + 3 * len(config.resolutions)))
    blocks: Params = {}
    for resolution in config.resolutions[:0:-1]:
        C, after = config.width(resolution), config.width(resolution // 2)
        blocks[f"{resolution}"] = {
            "same": new_convolution(next(keys), 3, C, C),
            "down": new_convolution(next(keys), 3, C, after),
            "skip": {"w": new_convolution(next(keys), 1, C, after)["w"]},
        }
    C = config.width(FIRST)
    return {
        "rgb": new_convolution(next(keys), 1, 3, config.width(config.resolution)),
        "blocks": blocks,
        "last": {
            "same": new_convolution(next(keys), 3, C + 1, C),
            "dense": new_dense(next(keys), FIRST * FIRST * C, C),
            "score": new_dense(next(keys), C, 1),
        },
    }


def score(params: Params, x_BxHxWx3: jax.Array, config: Config, half: bool) -> jax.Array:
    """Scores s_B in float32: the larger, the more a picture looks like those of the data.

    half: the highest resolutions compute in bfloat16.
    """
    x = x_BxHxWx3
    for resolution in config.resolutions[:0:-1]:
        x = x.astype(jnp.bfloat16 if half and resolution << HALVES > config.resolution else jnp.float32)
        if resolution == config.resolution:
            x = activate(convolve(x, scaled(params["rgb"]["w"])), params["rgb"]["b"])
        block = params["blocks"][f"{resolution}"]
        skip = convolve(downsample(x), scaled(block["skip"]["w"]))
        x = activate(convolve(x, scaled(block["same"]["w"])), block["same"]["b"])
        x = activate(convolve(x, scaled(block["down"]["w"]), down=2), block["down"]["b"])
        x = (x + skip) * 0.5**0.5  # the variance of a sum of two
    last = params["last"]
    x = with_deviation(x.astype(jnp.float32), config.group)
    x = activate(convolve(x, scaled(last["same"]["w"])), last["same"]["b"])
    x = activate(dense(x.reshape(len(x), -1), last["dense"]))
    return dense(x, last["score"])[:, 0]


def with_deviation(x_BxHxWxC: jax.Array, group: int) -> jax.Array:
    """One more channel: how much a picture's group varies, on average over everything (Karras et al. 2018, section 3).

    A group is `group` pictures in a row, which lie on one device wherever its share of the batch holds whole groups;
    what remains of held-out pictures may be too few for whole groups, and is taken in smaller ones.
    """
    group = math.gcd(group, len(x_BxHxWxC))
    B, H, W, C = x_BxHxWxC.shape
    x_NxGxHxWxC = x_BxHxWxC.reshape(B // group, group, H, W, C)
    variance_NxHxWxC = jnp.square(x_NxGxHxWxC - x_NxGxHxWxC.mean(1, keepdims=True)).mean(1)
    deviation_N = jnp.sqrt(variance_NxHxWxC + 1e-8).mean((1, 2, 3))
    channel = jnp.broadcast_to(deviation_N[:, None, None, None, None], (B // group, group, H, W, 1))
    return jnp.concatenate([x_BxHxWxC, channel.reshape(B, H, W, 1)], -1)
