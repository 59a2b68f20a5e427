"""The discriminator: residual blocks, minibatch deviation, one score for each picture."""

import jax
import jax.numpy as jnp

from tpuswarm.recipes.stylegan2.config import MIN_RESOLUTION, Config
from tpuswarm.recipes.stylegan2.convolution import convolve, refold
from tpuswarm.recipes.stylegan2.layers import Form, Params, activate, dense, new_convolution, new_dense, scaled


def init(key: jax.Array, config: Config) -> Params:
    """Fresh float32 parameters."""
    keys = iter(jax.random.split(key, 4 + 3 * len(config.resolutions)))
    blocks: Params = {}
    for resolution in config.resolutions[:0:-1]:
        C, C_after = config.width(resolution), config.width(resolution // 2)
        blocks[f"{resolution}"] = {
            "same": new_convolution(next(keys), 3, C, C),
            "down": new_convolution(next(keys), 3, C, C_after),
            "skip": {"w": new_convolution(next(keys), 1, C, C_after)["w"]},
        }
    C = config.width(MIN_RESOLUTION)
    return {
        "rgb": new_convolution(next(keys), 1, 3, config.width(config.resolution)),
        "blocks": blocks,
        "last": {
            "same": new_convolution(next(keys), 3, C + 1, C),
            "dense": new_dense(next(keys), MIN_RESOLUTION * MIN_RESOLUTION * C, C),
            "score": new_dense(next(keys), C, 1),
        },
    }


def score(params: Params, x_BxHxWx3: jax.Array, config: Config, form: Form) -> jax.Array:
    """Scores s_B in float32: higher for pictures that look real."""
    x = x_BxHxWx3
    half = form.half
    for resolution in config.resolutions[:0:-1]:
        fold, fold_after = (form.fold(config.width(side), side) for side in (resolution, resolution // 2))
        x = x.astype(form.dtype(resolution, config.resolution))
        if resolution == config.resolution:
            x = convolve(refold(x, 1, fold), scaled(params["rgb"]["w"]), half, folds=(fold, fold))
            x = activate(x, params["rgb"]["b"])
        block = params["blocks"][f"{resolution}"]
        skip = convolve(x, scaled(block["skip"]["w"]), half, down=2, folds=(fold, fold_after))
        x = activate(convolve(x, scaled(block["same"]["w"]), half, folds=(fold, fold)), block["same"]["b"])
        x = convolve(x, scaled(block["down"]["w"]), half, down=2, folds=(fold, fold_after))
        x = (activate(x, block["down"]["b"]) + skip) * 0.5**0.5  # keeps the variance
    last = params["last"]
    x = x.astype(jnp.float32)
    w_3x3xIxO = scaled(last["same"]["w"])
    C = x.shape[-1]  # the deviation's channel is convolved apart: with it the channels would fill another TPU tile
    features = convolve(x, w_3x3xIxO[:, :, :C], half)
    ones = jnp.ones((1, MIN_RESOLUTION, MIN_RESOLUTION, 1), jnp.float32)
    deviation_weight = convolve(ones, w_3x3xIxO[:, :, C:], half)
    x = features + deviation_weight * deviation(x, config.group)[:, None, None, None]
    x = activate(x, last["same"]["b"])
    x = activate(dense(x.reshape(len(x), -1), last["dense"]))
    return dense(x, last["score"])[:, 0]


def deviation(x_BxHxWxC: jax.Array, group: int) -> jax.Array:
    """Mean standard deviation of each picture's group: d_B (Karras et al. 2018, section 3).

    A group is `group` pictures in a row; all are on one device if its share of the batch is whole groups.
    """
    B, H, W, C = x_BxHxWxC.shape
    x_NxGxHxWxC = x_BxHxWxC.reshape(B // group, group, H, W, C)
    variance_NxHxWxC = jnp.square(x_NxGxHxWxC - x_NxGxHxWxC.mean(1, keepdims=True)).mean(1)
    deviation_N = jnp.sqrt(variance_NxHxWxC + 1e-8).mean((1, 2, 3))
    return jnp.broadcast_to(deviation_N[:, None], (B // group, group)).reshape(B)
