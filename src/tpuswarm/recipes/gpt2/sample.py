"""Sample text with a cache of keys and values."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.recipes.gpt2 import attention, model
from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.language.loss import logits
from tpuswarm.recipes.language.sampling import Sampling, draw
from tpuswarm.train.recipe import Options

Cache = Any
"""(k_LxBxTxHxK, v_LxBxTxHxK): keys and values of all positions so far."""


@partial(jax.jit, static_argnames=("config", "options"))
def prefill(
    params: model.Params, tokens_BxT: jax.Array, length: jax.Array, config: Config, options: Options
) -> tuple[Cache, jax.Array]:
    """Return the cache of a context padded behind `length`, and the logits_BxV after its first `length` tokens."""
    form = attention.form_of(config, options)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Cache]:
        return attention.causal(q, k, v, form), (k, v)

    x_BxTxD, cache = model.run_blocks(params, tokens_BxT, config, options, None, attend)
    last_Bx1xD = jax.lax.dynamic_slice_in_dim(x_BxTxD, length - 1, 1, axis=1)
    return cache, logits(last_Bx1xD, params["wte"], config.vocab)[:, 0]


def decode(
    params: model.Params, cache: Cache, token_B: jax.Array, position: jax.Array, config: Config, options: Options
) -> tuple[Cache, jax.Array]:
    """Put one token at `position`; return the new cache and the next logits_BxV."""
    allowed_1xT = (jnp.arange(config.context) <= position)[None]

    def body(x_Bx1xD: jax.Array, layer: tuple[model.Params, Cache]) -> tuple[jax.Array, Cache]:
        params, (k_BxTxHxK, v_BxTxHxK) = layer

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Cache]:
            keys = jax.lax.dynamic_update_slice_in_dim(k_BxTxHxK, k, position, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(v_BxTxHxK, v, position, axis=1)
            return attention.attend(q, keys, values, allowed_1xT), (keys, values)

        return model.block(x_Bx1xD, params, None, config, options, attend)

    x_Bx1xD = model.embed(params, token_B[:, None], position[None], options)
    x_Bx1xD, cache = jax.lax.scan(body, x_Bx1xD, (params["blocks"], cache))
    x_Bx1xD = model.layer_norm(x_Bx1xD, params["ln_f"])
    return cache, logits(x_Bx1xD, params["wte"], config.vocab)[:, 0]


@partial(jax.jit, static_argnames=("config", "options"))
def _fill(
    params: model.Params, cache: Cache, logits_BxV: jax.Array, tokens_BxT: jax.Array, start: jax.Array, stop: jax.Array,
    sampling: Sampling, key: jax.Array, config: Config, options: Options,
) -> jax.Array:  # fmt: skip

    def body(position: jax.Array, carry: Any) -> Any:
        cache, logits_BxV, tokens_BxT = carry
        token_B = draw(logits_BxV, sampling, tokens_BxT, position, jax.random.fold_in(key, position))
        token_B = token_B.astype(tokens_BxT.dtype)
        tokens_BxT = jax.lax.dynamic_update_slice_in_dim(tokens_BxT, token_B[:, None], position, axis=1)
        cache, logits_BxV = decode(params, cache, token_B, position, config, options)
        return cache, logits_BxV, tokens_BxT

    return jax.lax.fori_loop(start, stop, body, (cache, logits_BxV, tokens_BxT))[2]


def generate(
    params: model.Params, prompt: list[int], count: int, sampling: Sampling, seed: int, config: Config, options: Options
) -> Iterator[list[int]]:
    """Yield `count` tokens after `prompt`, which has at least one token, in chunks.

    When the context is full, its last half starts a new one with a new cache: learned positions end there.
    """
    T = config.context
    key = jax.random.key(seed)
    tokens, count_drawn = list(prompt), 0
    while count_drawn < count:
        window = tokens[-T // 2 :] if len(tokens) >= T else tokens
        stop = min(T, len(window) + count - count_drawn)
        padded_1xT = np.zeros((1, T), np.int32)
        padded_1xT[0, : len(window)] = window
        cache, logits_BxV = prefill(params, padded_1xT, np.int32(len(window)), config, options)
        filled_1xT = _fill(
            params, cache, logits_BxV, padded_1xT, np.int32(len(window)), np.int32(stop),
            sampling, jax.random.fold_in(key, count_drawn), config, options,
        )  # fmt: skip
        new = np.asarray(filled_1xT)[0, len(window) : stop].tolist()
        tokens, count_drawn = tokens + new, count_drawn + len(new)
        yield new
