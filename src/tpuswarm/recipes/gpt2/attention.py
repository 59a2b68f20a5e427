"""Causal attention in three equivalent forms, from and to BxTxHxK."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.language.dropout import dropout
from tpuswarm.train.program.attention import ATTENTION, Form, kernel, usable_form
from tpuswarm.train.recipe import Options


def form_of(config: Config, options: Options) -> Form:
    """Return the form that `compile_step` wants if its kernel fits this model, else `xla`."""
    if config.dropout:
        return "xla"
    bf16, tokens = options.precision == "bf16", config.context
    return usable_form(options.attention, bf16=bf16, head_width=config.head_width, queries=tokens, keys=tokens)


def attend(
    q_BxTxHxK: jax.Array, k_BxSxHxK: jax.Array, v_BxSxHxK: jax.Array, allowed_TxS: jax.Array,
    rate: float = 0.0, key: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Softmax attention over the keys in `allowed_TxS`; scores and softmax in float32."""
    scale = 1 / np.sqrt(q_BxTxHxK.shape[-1])
    scores_BxHxTxS = jnp.einsum(
        "bthk,bshk->bhts", q_BxTxHxK * jnp.asarray(scale, q_BxTxHxK.dtype), k_BxSxHxK,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    scores_BxHxTxS = jnp.where(allowed_TxS, scores_BxHxTxS, jnp.float32(-1e30))
    weights_BxHxTxS = jax.nn.softmax(scores_BxHxTxS).astype(v_BxSxHxK.dtype)
    weights_BxHxTxS = dropout(weights_BxHxTxS, rate, key)
    return jnp.einsum("bhts,bshk->bthk", weights_BxHxTxS, v_BxSxHxK)


def causal(
    q_BxTxHxK: jax.Array, k_BxTxHxK: jax.Array, v_BxTxHxK: jax.Array, form: Form,
    rate: float = 0.0, key: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Causal self-attention in one of the forms `xla`, `cudnn`, `splash`."""
    _, T, _, K = q_BxTxHxK.shape
    if form != "xla":
        return kernel(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, form, causal=True, scale=K**-0.5)
    allowed_TxT = jnp.tril(jnp.ones((T, T), bool))
    return checkpoint_name(attend(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, allowed_TxT, rate, key), ATTENTION)
