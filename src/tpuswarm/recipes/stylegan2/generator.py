"""The generator: mapping network, and synthesis with skip connections to RGB."""

import jax
import jax.numpy as jnp

from tpuswarm.recipes.stylegan2.config import FIRST, Config
from tpuswarm.recipes.stylegan2.fold import Form, beside
from tpuswarm.recipes.stylegan2.layers import (
    Params,
    activate,
    dense,
    modulated,
    new_convolution,
    new_dense,
)
from tpuswarm.recipes.stylegan2.resample import upsample

MAPPING_RATE = 0.01
"""Of the learning rate (Karras et al. 2019, appendix C)."""


def init(key: jax.Array, config: Config) -> Params:
    """Fresh float32 parameters."""
    D = config.latent
    keys = iter(jax.random.split(key, 1 + config.mapping + 6 * len(config.resolutions)))

    def styled(size: int, inputs: int, outputs: int) -> Params:
        layer = new_convolution(next(keys), size, inputs, outputs)
        return layer | {"style": new_dense(next(keys), D, inputs, bias=1.0)}

    def noisy(inputs: int, outputs: int) -> Params:
        return styled(3, inputs, outputs) | {"noise": jnp.zeros((), jnp.float32)}

    mapping = {f"{layer}": new_dense(next(keys), D, D, rate=MAPPING_RATE) for layer in range(config.mapping)}
    blocks: Params = {}
    before = config.width(FIRST)
    constant = jax.random.normal(next(keys), (FIRST, FIRST, before), jnp.float32)
    for resolution in config.resolutions:
        C = config.width(resolution)
        block = {} if resolution == FIRST else {"up": noisy(before, C)}
        blocks[f"{resolution}"] = block | {"same": noisy(C, C), "rgb": styled(1, C, 3)}
        before = C
    return {"mapping": mapping, "constant": constant, "blocks": blocks}


def to_w(params: Params, z_BxD: jax.Array) -> jax.Array:
    """The mapping network: latent codes z of N(0, 1) → w_BxD."""
    x = z_BxD * jax.lax.rsqrt(jnp.square(z_BxD).mean(-1, keepdims=True) + 1e-8)
    for layer in range(len(params["mapping"])):
        x = activate(dense(x, params["mapping"][f"{layer}"], MAPPING_RATE))
    return x


def truncate(w_BxD: jax.Array, mean_D: jax.Array, truncation: float | jax.Array) -> jax.Array:
    """Codes drawn towards their mean: 1 leaves them, 0 gives the mean (Karras et al. 2019, appendix B)."""
    mean_BxD = jnp.broadcast_to(mean_D, w_BxD.shape)
    return mean_BxD + (w_BxD - mean_BxD) * truncation


def in_layers(w_BxD: jax.Array, config: Config) -> jax.Array:
    """One code for all layers: w_BxLxD."""
    return jnp.broadcast_to(w_BxD[:, None], (len(w_BxD), config.layers, config.latent))


def synthesize(params: Params, w_BxLxD: jax.Array, key: jax.Array | None, config: Config, form: Form) -> jax.Array:
    """Pictures x_BxHxWx3 in float32, about -1 to 1; noise is drawn from `key`, None leaves it out.

    What is added up to the picture stays in float32.
    """
    B = len(w_BxLxD)
    constant = params["constant"]
    x = jnp.broadcast_to(constant, (B, *constant.shape))
    picture = jnp.zeros((B, FIRST, FIRST, 3), jnp.float32)
    noise_BxP = None
    if key is not None:  # drawn at once: every draw of its own is hundreds of operations to compile
        noise_BxP = jax.random.normal(key, (B, 2 * sum(side * side for side in config.resolutions)))
    index = at = 0
    fold = 1
    for resolution in config.resolutions:
        before, fold = fold, form.fold(config.width(resolution), resolution)
        block = params["blocks"][f"{resolution}"]
        x = x.astype(form.dtype(resolution, config.resolution))
        for name, up in (("up", 2), ("same", 1)):
            if name in block:
                x = modulated(x, w_BxLxD[:, index], block[name], form.half, up=up, folds=(before, fold))
                before = fold
                if noise_BxP is not None:
                    noise = noise_BxP[:, at : at + resolution**2].reshape(B, resolution, resolution)
                    noise = beside(noise, config.width(resolution), fold)
                    x = x + (noise * block[name]["noise"]).astype(x.dtype)
                    at += resolution**2
                x = activate(x, block[name]["b"])
                index += 1
        rgb = modulated(x, w_BxLxD[:, index], block["rgb"], form.half, demodulate=False, folds=(fold, 1))
        rgb = rgb.astype(jnp.float32)
        picture = upsample(picture) if resolution > FIRST else picture
        picture = picture + rgb + jnp.broadcast_to(block["rgb"]["b"], rgb.shape)
    return picture
