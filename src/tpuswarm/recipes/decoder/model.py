"""The decoder of today's language models: parameters and forward pass.

RMSNorm, rotary positions, grouped-query attention and a gated MLP, as in Llama (Touvron et al. 2023); `Config` chooses
what differs between families. The layers' parameters are stacked on a leading axis L.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tpuswarm.recipes.decoder import lora
from tpuswarm.recipes.decoder.config import DROPOUT_KEY, LORA_LEAVES, SCALE, Config
from tpuswarm.recipes.language import loss
from tpuswarm.recipes.language.dropout import dropout
from tpuswarm.train.program.attention import ATTENTION, Form, kernel, recomputed, usable_form
from tpuswarm.train.program.mesh import gathered, gathered_as
from tpuswarm.train.program.rounding import broadcast_then_round
from tpuswarm.train.recipe import Options

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(q, k, v, window, the layer's cache) → (attention output BxTxHxK, the layer's new cache)."""

NO_WINDOW = np.iinfo(np.int32).max


def init(key: jax.Array, config: Config) -> Params:
    """Fresh float32 parameters: normal, outputs of attention and MLP scaled by 1/sqrt(2L), biases 0, norms neutral.

    With adapters, the others have the dtype of the base.
    """
    L, D, F, K = len(config.layers), config.width, config.mlp_width, config.head_width
    H, G = config.heads, config.kv_heads
    keys = iter(jax.random.split(key, 9))
    out_deviation = config.deviation / (2 * L) ** 0.5

    def weights(*shape: int, deviation: float = config.deviation) -> jax.Array:
        return deviation * jax.random.normal(next(keys), shape, jnp.float32)

    def norm(*shape: int) -> Params:
        return {"scale": (jnp.zeros if config.norm_offset else jnp.ones)(shape, jnp.float32)}

    def linear(inputs: int, outputs: int, bias: bool, deviation: float = config.deviation) -> Params:
        found = {"w": weights(L, inputs, outputs, deviation=deviation)}
        return found | ({"b": jnp.zeros((L, outputs), jnp.float32)} if bias else {})

    attention = {name: linear(D, heads * K, config.qkv_bias) for name, heads in {"q": H, "k": G, "v": G}.items()}
    attention["out"] = linear(H * K, D, config.out_bias, out_deviation)
    if config.norm_heads == "each":
        attention |= {"q_norm": norm(L, K), "k_norm": norm(L, K)}
    if config.norm_heads == "all":
        attention |= {"q_norm": norm(L, H * K), "k_norm": norm(L, G * K)}
    mlp = {name: linear(D, F, config.mlp_bias) for name in ("gate", "up")}
    mlp["down"] = linear(F, D, config.mlp_bias, out_deviation)
    blocks: Params = {"attention": attention, "mlp": mlp}
    if config.norm_inputs:
        blocks |= {"attention_in": norm(L, D), "mlp_in": norm(L, D)}
    if config.norm_outputs:
        blocks |= {"attention_out": norm(L, D), "mlp_out": norm(L, D)}
    head = {} if config.tied else {"head": weights(config.padded_vocab, D)}
    params = {"embed": weights(config.padded_vocab, D), "blocks": blocks, "norm": norm(D), **head}
    if config.lora is None:
        return params
    return lora.init(jax.random.fold_in(key, 9), lora.as_base(params, config.lora.base), config.lora)


def compute_dtype(options: Options) -> Any:
    """Return the dtype of activations and matmul inputs."""
    return jnp.bfloat16 if options.precision == "bf16" else jnp.float32


def form_of(config: Config, options: Options) -> Form:
    """Return the form that `compile_step` wants if its kernel fits this model, else `xla`."""
    if not config.is_plain:
        return "xla"
    bf16, tokens = options.precision == "bf16", config.context
    return usable_form(options.attention, bf16=bf16, head_width=config.head_width, queries=tokens, keys=tokens)


def hidden(
    params: Params, tokens_BxT: jax.Array, config: Config, options: Options, segments_BxT: jax.Array | None = None
) -> jax.Array:
    """Return hidden states x_BxTxD after the last norm. A token attends only to those of its segment."""
    form = form_of(config, options)
    if segments_BxT is not None and form == "cudnn":  # has no segments
        form = "xla"
    attend = causal(config, form, segments_BxT)
    positions_T = jnp.arange(tokens_BxT.shape[1])
    return run_blocks(params, tokens_BxT, positions_T, config, options, attend)[0]


def head(params: Params) -> jax.Array:
    """Return the matrix VxD whose product with a hidden state gives the logits."""
    return params["head"] if "head" in params else params["embed"]


def logits(x_BxTxD: jax.Array, params: Params, config: Config) -> jax.Array:
    """Return float32 logits over the padded vocabulary; padding gets -1e30."""
    return loss.logits(x_BxTxD, head(params), config.vocab, config.logit_cap)


def mean_loss(
    x_BxTxD: jax.Array, params: Params, targets_BxT: jax.Array, config: Config,
    options: loss.LossOptions = loss.PLAIN, counted_BxT: jax.Array | None = None,
) -> Any:  # fmt: skip
    """Return the mean loss of the next tokens in nats; Weighted if only some of them are counted."""
    return loss.mean_loss(x_BxTxD, head(params), targets_BxT, config.vocab, options, config.logit_cap, counted_BxT)


def run_blocks(
    params: Params, tokens_BxT: jax.Array, positions_T: jax.Array, config: Config, options: Options, attend: Attend,
    cache_L: Any = None,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Apply embedding, blocks and last norm; also return the new caches of all layers, stacked as `cache_L`."""
    dtype = compute_dtype(options)
    embed_VxD = gathered_as(params["embed"], dtype) if config.tied else params["embed"]
    x_BxTxD = embed_VxD[tokens_BxT].astype(dtype)
    x_BxTxD *= jnp.asarray(config.embedding_scale, dtype)
    rotations_RxTxK = jnp.stack(
        [rotation(rotary.frequencies, positions_T) * rotary.scale for rotary in config.rotaries]
    )
    windows_L = np.array([layer.window or NO_WINDOW for layer in config.layers], np.int32)
    rotary_L = np.array([layer.rotary for layer in config.layers], np.int32)

    def body(x_BxTxD: jax.Array, layer: Any) -> tuple[jax.Array, Any]:
        params, rotary, window, cache = layer
        return block(x_BxTxD, params, rotations_RxTxK[rotary], window, config, options, attend, cache)

    unroll = len(config.layers) if options.loop == "unroll" else 1
    layers = params["blocks"], rotary_L, windows_L, cache_L
    x_BxTxD, new_cache_L = jax.lax.scan(recomputed(body, options.remat), x_BxTxD, layers, unroll=unroll)
    return rms_norm(x_BxTxD, params["norm"], config), new_cache_L


def block(
    x_BxTxD: jax.Array, layer: Params, rotation_TxK: jax.Array, window: jax.Array, config: Config, options: Options,
    attend: Attend, cache: Any,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Apply one layer; also return the new cache of `attend`."""
    p = layer["attention"]
    B, T, _ = x_BxTxD.shape
    h_BxTxD = rms_norm(x_BxTxD, layer["attention_in"], config) if config.norm_inputs else x_BxTxD
    q, k, v = (linear(h_BxTxD, p[name], config, options) for name in ("q", "k", "v"))
    if config.norm_heads == "all":
        q, k = rms_norm(q, p["q_norm"], config), rms_norm(k, p["k_norm"], config)
    q, k, v = (x.reshape(B, T, -1, config.head_width) for x in (q, k, v))
    if config.norm_heads == "each":
        q, k = rms_norm(q, p["q_norm"], config), rms_norm(k, p["k_norm"], config)
    q, k = rotate(q, rotation_TxK), rotate(k, rotation_TxK)
    mixed_BxTxHxK, cache = attend(q, k, v, window, cache)
    out_BxTxD = linear(mixed_BxTxHxK.reshape(B, T, -1), p["out"], config, options)
    if config.norm_outputs:
        out_BxTxD = rms_norm(out_BxTxD, layer["attention_out"], config)
    x_BxTxD = x_BxTxD + out_BxTxD
    h_BxTxD = rms_norm(x_BxTxD, layer["mlp_in"], config) if config.norm_inputs else x_BxTxD
    p = layer["mlp"]
    gate_BxTxF = linear(h_BxTxD, p["gate"], config, options)
    gate_BxTxF = jax.nn.silu(gate_BxTxF) if config.activation == "silu" else jax.nn.gelu(gate_BxTxF, approximate=True)
    up_BxTxF = linear(h_BxTxD, p["up"], config, options)
    out_BxTxD = linear(gate_BxTxF * up_BxTxF, p["down"], config, options)
    if config.norm_outputs:
        out_BxTxD = rms_norm(out_BxTxD, layer["mlp_out"], config)
    return x_BxTxD + out_BxTxD, cache


def causal(config: Config, form: Form, segments_BxT: jax.Array | None = None) -> Attend:
    """Return causal self-attention within each layer's window and each segment, as `xla`, `cudnn` or `splash`."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array, cache: None) -> tuple[jax.Array, None]:
        if form != "xla":
            return kernel(q, k, v, form, causal=True, scale=config.attention_scale, segments_BxT=segments_BxT), None
        positions_T = jnp.arange(q.shape[1])
        allowed = is_seen(positions_T, positions_T, window)
        if segments_BxT is not None:
            segments_Bx1x1xT = segments_BxT[:, None, None]
            allowed = allowed[None, None, None] & (segments_Bx1x1xT[..., None] == segments_Bx1x1xT[..., None, :])
        return checkpoint_name(attention(q, k, v, allowed, config), ATTENTION), None

    return attend


def is_seen(positions_T: jax.Array, positions_S: jax.Array, window: jax.Array) -> jax.Array:
    """Return which tokens S a token T attends to: bool[T, S]."""
    distance_TxS = positions_T[:, None] - positions_S[None]
    return (distance_TxS >= 0) & (distance_TxS < window)


def attention(
    q_BxTxHxK: jax.Array, k_BxSxGxK: jax.Array, v_BxSxGxK: jax.Array, allowed: jax.Array, config: Config
) -> jax.Array:
    """Softmax attention over allowed keys, bool TxS or BxGxRxTxS; scores and softmax in float32."""
    B, T, H, K = q_BxTxHxK.shape
    G = k_BxSxGxK.shape[2]
    q_BxTxGxRxK = q_BxTxHxK.reshape(B, T, G, H // G, K) * jnp.asarray(config.attention_scale, q_BxTxHxK.dtype)
    scores = jnp.einsum("btgrk,bsgk->bgrts", q_BxTxGxRxK, k_BxSxGxK, preferred_element_type=jnp.float32)
    if config.score_cap is not None:
        scores = config.score_cap * jnp.tanh(scores / config.score_cap)
    scores = jnp.where(allowed, scores, jnp.float32(-1e30))
    weights = jax.nn.softmax(scores).astype(v_BxSxGxK.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", weights, v_BxSxGxK).reshape(B, T, H, K)


def rotation(frequencies: tuple[float, ...], positions_T: jax.Array) -> jax.Array:
    """Return cosines and sines of all angles, float32[T, K]: first the cosines, then the sines."""
    angles = jnp.outer(positions_T.astype(jnp.float32), jnp.array(frequencies, jnp.float32))
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def rotate(x_BxTxHxK: jax.Array, rotation_TxK: jax.Array) -> jax.Array:
    """Turn each pair of elements i and i + K/2 by its angle, in float32."""
    cos, sin = jnp.split(rotation_TxK[None, :, None], 2, axis=-1)
    first, second = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxTxHxK.dtype)


def linear(x: jax.Array, p: Params, config: Config, options: Options) -> jax.Array:
    """x @ w + b over the last axis, and the adapter's share, in the dtype of x."""
    # On a CPU, XLA transposes a batch of matrices for w's gradient.
    inputs = x.reshape(-1, x.shape[-1]) if options.platform == "cpu" else x
    # A base's w is read again for the gradient; saved, it would take its memory twice.
    multiply = jax.checkpoint(product, prevent_cse=False) if config.lora else product
    outputs = multiply(inputs, p["w"], p.get(SCALE))
    if config.lora and "lora_a" in p:
        a, b = (gathered(p[name].astype(x.dtype)) for name in LORA_LEAVES)
        inputs = dropout(inputs, config.lora.dropout, p.get(DROPOUT_KEY))
        outputs += (inputs @ a * jnp.asarray(config.lora.factor, x.dtype)) @ b
    outputs = outputs.reshape(*x.shape[:-1], -1)
    return outputs + broadcast_then_round(p["b"], outputs) if "b" in p else outputs


def product(inputs: jax.Array, w: jax.Array, scale: jax.Array | None) -> jax.Array:
    """inputs @ w over the last axis, in the dtype of the inputs; scale: float32, of the columns of an int8 w."""
    if scale is None:
        return inputs @ gathered(w.astype(inputs.dtype))
    outputs = inputs @ gathered(w).astype(inputs.dtype)
    return (outputs.astype(jnp.float32) * jnp.broadcast_to(scale, outputs.shape)).astype(inputs.dtype)


def rms_norm(x: jax.Array, p: Params, config: Config) -> jax.Array:
    """RMSNorm over the last axis (Zhang and Sennrich 2019), computed in float32 and returned in the dtype of x."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + config.norm_epsilon)
    scale = jnp.broadcast_to(p["scale"].astype(jnp.float32), normed.shape)
    return (normed * (1 + scale if config.norm_offset else scale)).astype(x.dtype)
