"""GPT-2 (Radford et al. 2019): parameters and forward pass.

Pre-norm blocks, learned positions, tanh GELU, LayerNorm with epsilon 1e-5 in float32, output head tied to the token
embedding. The layers' parameters are stacked on a leading axis L; options choose whether to scan or unroll it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.recipes.gpt2 import attention
from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.language.dropout import dropout
from tpuswarm.train.program.attention import recomputed
from tpuswarm.train.program.mesh import gathered, gathered_as
from tpuswarm.train.program.rounding import broadcast_then_round
from tpuswarm.train.recipe import Options

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Any]]
"""(q, k, v, key) → (attention output BxTxHxK, an extra output of the layer)."""


def init(key: jax.Array, config: Config) -> Params:
    """Fresh float32 parameters: normal, residual projections scaled by 1/sqrt(2L), biases 0, scales 1.

    The deviation is GPT-2's 0.02. Models narrower than 768 get 0.02 sqrt(768 / width), so that a layer's outputs start
    as large (gpt2-tiny after 2,000 steps: validation loss 1.75 instead of 1.89).
    """
    L, D, V = config.layers, config.width, config.padded_vocab
    keys = iter(jax.random.split(key, 6))
    default_deviation = 0.02 * max(1.0, (768 / D) ** 0.5)

    def weights(*shape: int, deviation: float = default_deviation) -> jax.Array:
        return deviation * jax.random.normal(next(keys), shape, jnp.float32)

    def norm(*shape: int) -> Params:
        return {"scale": jnp.ones(shape, jnp.float32), "bias": jnp.zeros(shape, jnp.float32)}

    def linear(inputs: int, outputs: int, deviation: float = default_deviation) -> Params:
        return {"w": weights(L, inputs, outputs, deviation=deviation), "b": jnp.zeros((L, outputs), jnp.float32)}

    residual_deviation = default_deviation / (2 * L) ** 0.5
    return {
        "wte": weights(V, D),
        "wpe": weights(config.context, D),
        "blocks": {
            "ln_1": norm(L, D),
            "attn": {"qkv": linear(D, 3 * D), "proj": linear(D, D, residual_deviation)},
            "ln_2": norm(L, D),
            "mlp": {"fc": linear(D, 4 * D), "proj": linear(4 * D, D, residual_deviation)},
        },
        "ln_f": norm(D),
    }


def compute_dtype(options: Options) -> Any:
    """Return the dtype of activations and matmul inputs."""
    return jnp.bfloat16 if options.precision == "bf16" else jnp.float32


def hidden(params: Params, tokens_BxT: jax.Array, config: Config, options: Options, key: jax.Array | None) -> jax.Array:
    """Return hidden states x_BxTxD after the last norm; `key` is for dropout, None turns it off."""
    form = attention.form_of(config, options)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array | None) -> tuple[jax.Array, None]:
        return attention.causal(q, k, v, form, config.dropout, key), None

    x_BxTxD, _ = run_blocks(params, tokens_BxT, config, options, key, attend)
    return x_BxTxD


def run_blocks(
    params: Params, tokens_BxT: jax.Array, config: Config, options: Options, key: jax.Array | None, attend: Attend
) -> tuple[jax.Array, Any]:
    """Apply embedding, blocks and last norm; also return the extra outputs of `attend`, stacked over layers."""
    positions_T = jnp.arange(tokens_BxT.shape[1])
    x_BxTxD = embed(params, tokens_BxT, positions_T, options)
    keys_L = None
    if key is not None and config.dropout > 0:
        key, embed_key = jax.random.split(key)
        x_BxTxD = dropout(x_BxTxD, config.dropout, embed_key)
        keys_L = jax.random.split(key, config.layers)

    def body(x_BxTxD: jax.Array, layer: tuple[Params, jax.Array | None]) -> tuple[jax.Array, Any]:
        return block(x_BxTxD, *layer, config, options, attend)

    unroll = config.layers if options.loop == "unroll" else 1
    x_BxTxD, extra = jax.lax.scan(recomputed(body, options.remat), x_BxTxD, (params["blocks"], keys_L), unroll=unroll)
    return layer_norm(x_BxTxD, params["ln_f"]), extra


def embed(params: Params, tokens_BxT: jax.Array, positions_T: jax.Array, options: Options) -> jax.Array:
    """Add token and position embeddings: x_BxTxD in the compute dtype."""
    dtype = compute_dtype(options)
    wte_VxD = gathered_as(params["wte"], dtype)  # shared with the head
    return (wte_VxD[tokens_BxT] + params["wpe"][positions_T][None]).astype(dtype)


def block(
    x_BxTxD: jax.Array, layer: Params, key: jax.Array | None, config: Config, options: Options, attend: Attend
) -> tuple[jax.Array, Any]:
    """Apply one layer; also return the extra output of `attend`."""
    attn_key, proj_key, mlp_key = (None,) * 3 if key is None else jax.random.split(key, 3)
    B, T, D = x_BxTxD.shape
    qkv_BxTx3D = linear(layer_norm(x_BxTxD, layer["ln_1"]), layer["attn"]["qkv"], options)
    q, k, v = (part.reshape(B, T, config.heads, config.head_width) for part in jnp.split(qkv_BxTx3D, 3, axis=-1))
    mixed_BxTxHxK, extra = attend(q, k, v, attn_key)
    mixed_BxTxD = linear(mixed_BxTxHxK.reshape(B, T, D), layer["attn"]["proj"], options)
    x_BxTxD = x_BxTxD + dropout(mixed_BxTxD, config.dropout, proj_key)
    h_BxTx4D = linear(layer_norm(x_BxTxD, layer["ln_2"]), layer["mlp"]["fc"], options)
    mlp_BxTxD = linear(jax.nn.gelu(h_BxTx4D, approximate=True), layer["mlp"]["proj"], options)
    return x_BxTxD + dropout(mlp_BxTxD, config.dropout, mlp_key), extra


def linear(x: jax.Array, p: Params, options: Options) -> jax.Array:
    """x @ w + b over the last axis, in the dtype of x."""
    # On a CPU, XLA transposes a batch of matrices for w's gradient: a sixth of a step of gpt2-tiny.
    inputs = x.reshape(-1, x.shape[-1]) if options.platform == "cpu" else x
    outputs = inputs @ gathered(p["w"].astype(x.dtype))
    outputs = outputs.reshape(*x.shape[:-1], -1)
    return outputs + broadcast_then_round(p["b"], outputs)


def layer_norm(x: jax.Array, p: Params) -> jax.Array:
    """LayerNorm over the last axis, computed in float32 and returned in the dtype of x."""
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    shape = normed.shape
    return (normed * jnp.broadcast_to(p["scale"], shape) + jnp.broadcast_to(p["bias"], shape)).astype(x.dtype)
