"""The generator: mapping network, and synthesis with skip connections to RGB."""

import jax
import jax.numpy as jnp

from tpuswarm.recipes.stylegan2.config import MIN_RESOLUTION, Config
from tpuswarm.recipes.stylegan2.convolution import spread_over_channels, upsample
from tpuswarm.recipes.stylegan2.layers import Form, Params, activate, dense, modulated, new_convolution, new_dense

MAPPING_RATE_FACTOR = 0.01
"""The mapping network learns at this share of the learning rate (Karras et al. 2019, appendix C)."""


def init(key: jax.Array, config: Config) -> Params:
    """Fresh float32 parameters."""
    D = config.latent
    keys = iter(jax.random.split(key, 1 + config.mapping + 6 * len(config.resolutions)))

    def styled(size: int, inputs: int, outputs: int) -> Params:
        layer = new_convolution(next(keys), size, inputs, outputs)
        return layer | {"style": new_dense(next(keys), D, inputs, bias=1.0)}

    def noisy(inputs: int, outputs: int) -> Params:
        return styled(3, inputs, outputs) | {"noise": jnp.zeros((), jnp.float32)}

    mapping = {f"{layer}": new_dense(next(keys), D, D, rate=MAPPING_RATE_FACTOR) for layer in range(config.mapping)}
    blocks: Params = {}
    C_before = config.width(MIN_RESOLUTION)
    constant = jax.random.normal(next(keys), (MIN_RESOLUTION, MIN_RESOLUTION, C_before), jnp.float32)
    for resolution in config.resolutions:
        C = config.width(resolution)
        block = {} if resolution == MIN_RESOLUTION else {"up": noisy(C_before, C)}
        blocks[f"{resolution}"] = block | {"same": noisy(C, C), "rgb": styled(1, C, 3)}
        C_before = C
    return {"mapping": mapping, "constant": constant, "blocks": blocks}


def to_w(params: Params, z_BxD: jax.Array) -> jax.Array:
    """Map latent codes z from N(0, 1) to w_BxD."""
    x = z_BxD * jax.lax.rsqrt(jnp.square(z_BxD).mean(-1, keepdims=True) + 1e-8)
    for layer in range(len(params["mapping"])):
        x = activate(dense(x, params["mapping"][f"{layer}"], MAPPING_RATE_FACTOR))
    return x


def truncate(w_BxD: jax.Array, mean_D: jax.Array, truncation: float | jax.Array) -> jax.Array:
    """Pull codes towards their mean: 1 keeps them, 0 returns the mean (Karras et al. 2019, appendix B)."""
    mean_BxD = jnp.broadcast_to(mean_D, w_BxD.shape)
    return mean_BxD + (w_BxD - mean_BxD) * truncation


def in_layers(w_BxD: jax.Array, config: Config) -> jax.Array:
    """Repeat one code for all layers: w_BxLxD."""
    return jnp.broadcast_to(w_BxD[:, None], (len(w_BxD), config.layers, config.latent))


def synthesize(params: Params, w_BxLxD: jax.Array, key: jax.Array | None, config: Config, form: Form) -> jax.Array:
    """Return pictures x_BxHxWx3, about -1 to 1; noise is drawn from `key`, None leaves it out.

    The picture is summed in float32.
    """
    B = len(w_BxLxD)
    constant = params["constant"]
    x = jnp.broadcast_to(constant, (B, *constant.shape))
    picture = jnp.zeros((B, MIN_RESOLUTION, MIN_RESOLUTION, 3), jnp.float32)
    noise_BxP = None
    if key is not None:  # one draw for all layers: each draw compiles to hundreds of operations
        noise_BxP = jax.random.normal(key, (B, 2 * sum(side * side for side in config.resolutions)))
    layer = noise_start = 0
    fold = 1
    for resolution in config.resolutions:
        fold_before, fold = fold, form.fold(config.width(resolution), resolution)
        block = params["blocks"][f"{resolution}"]
        x = x.astype(form.dtype(resolution, config.resolution))
        for name, up in (("up", 2), ("same", 1)):
            if name in block:
                x = modulated(x, w_BxLxD[:, layer], block[name], form.half, up=up, folds=(fold_before, fold))
                fold_before = fold
                if noise_BxP is not None:
                    noise = noise_BxP[:, noise_start : noise_start + resolution**2].reshape(B, resolution, resolution)
                    noise = spread_over_channels(noise, config.width(resolution), fold)
                    x = x + (noise * block[name]["noise"]).astype(x.dtype)
                    noise_start += resolution**2
                x = activate(x, block[name]["b"])
                layer += 1
        rgb = modulated(x, w_BxLxD[:, layer], block["rgb"], form.half, demodulate=False, folds=(fold, 1))
        rgb = rgb.astype(jnp.float32)
        picture = upsample(picture) if resolution > MIN_RESOLUTION else picture
        picture = picture + rgb + jnp.broadcast_to(block["rgb"]["b"], rgb.shape)
    return picture
