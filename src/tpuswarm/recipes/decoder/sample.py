"""Sample text with a cache of keys and values."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.recipes.decoder import model
from tpuswarm.recipes.decoder.config import Config
from tpuswarm.recipes.language.sampling import Sampling, draw
from tpuswarm.train.recipe import Options

Cache = Any
"""(k_LxBxTxGxK, v_LxBxTxGxK): keys and values of all positions so far."""

MIN_BUCKET = 64
CHUNK = 8
"""Tokens between two looks of the host."""


def generate(
    params: model.Params, prompt: list[int], count: int, sampling: Sampling, seed: int, config: Config, options: Options
) -> Iterator[list[int]]:
    """Yield `count` tokens after `prompt`, which has at least one token, in chunks; fewer if the context ends.

    Raises no error for a longer prompt: its last tokens are used. Two programs serve all lengths of a bucket, a power
    of two.
    """
    window = prompt[-(config.context - 1) :]
    stop = min(config.context, len(window) + count)
    size = min(config.context, max(MIN_BUCKET, 1 << (stop - 1).bit_length()))
    padded_1xT = np.zeros((1, size), np.int32)
    padded_1xT[0, : len(window)] = window
    carry, key = _prefill(params, padded_1xT, np.int32(len(window)), config, options), jax.random.key(seed)
    for start in range(len(window), stop, CHUNK):
        end = min(start + CHUNK, stop)
        carry = _fill(params, carry, np.int32(start), np.int32(end), sampling, key, config, options)
        yield np.asarray(carry[2])[0, start:end].tolist()


@partial(jax.jit, static_argnames=("config", "options"))
def _prefill(
    params: model.Params, tokens_BxT: jax.Array, start: jax.Array, config: Config, options: Options
) -> tuple[Cache, jax.Array, jax.Array]:
    """Return the cache of tokens padded behind `start`, the hidden state Bx1xD of the last one, and the tokens."""
    B, T = tokens_BxT.shape
    shape = len(config.layers), B, T, config.kv_heads, config.head_width
    cache = (jnp.zeros(shape, model.compute_dtype(options)),) * 2
    cache, x_BxTxD = _step(params, cache, tokens_BxT, jnp.int32(0), config, options)
    return cache, jax.lax.dynamic_slice_in_dim(x_BxTxD, start - 1, 1, axis=1), tokens_BxT


@partial(jax.jit, static_argnames=("config", "options"), donate_argnames="carry")
def _fill(
    params: model.Params, carry: tuple[Cache, jax.Array, jax.Array], start: jax.Array, stop: jax.Array,
    sampling: Sampling, key: jax.Array, config: Config, options: Options,
) -> Any:  # fmt: skip
    """Draw tokens from `start` to `stop`; return what `_prefill` returns, for them too."""

    def body(position: jax.Array, carry: Any) -> Any:
        cache, x_Bx1xD, tokens_BxT = carry
        logits_BxV = model.logits(x_Bx1xD, params, config)[:, 0]
        token_B = draw(logits_BxV, sampling, tokens_BxT, position, jax.random.fold_in(key, position))
        token_B = token_B.astype(tokens_BxT.dtype)
        tokens_BxT = jax.lax.dynamic_update_slice_in_dim(tokens_BxT, token_B[:, None], position, axis=1)
        cache, x_Bx1xD = _step(params, cache, token_B[:, None], position, config, options)
        return cache, x_Bx1xD, tokens_BxT

    return jax.lax.fori_loop(start, stop, body, carry)


def _step(
    params: model.Params, cache: Cache, tokens_BxN: jax.Array, first: jax.Array, config: Config, options: Options
) -> tuple[Cache, jax.Array]:
    """Put N tokens at positions from `first` on; return the new cache and hidden states BxNxD."""
    positions_N = first + jnp.arange(tokens_BxN.shape[1])
    positions_T = jnp.arange(cache[0].shape[2])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array, cached: Cache) -> tuple[jax.Array, Cache]:
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=1)
            for old, new in zip(cached, (k, v), strict=True)
        )
        seen_NxT = model.is_seen(positions_N, positions_T, window)
        return model.attention(q, keys, values, seen_NxT, config), (keys, values)

    x_BxNxD, cache = model.run_blocks(params, tokens_BxN, positions_N, config, options, attend, cache)
    return cache, x_BxNxD
