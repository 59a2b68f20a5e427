"""Draw tokens from a model's distribution, and turn them into text as they come."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Sampling(NamedTuple):
    """How tokens are drawn. A choice that is None is absent from the compiled program.

    - temperature: 0 takes the likeliest token.
    - top_k: draw from the k likeliest.
    - top_p: draw from the likeliest that together have this probability (Holtzman et al. 2020).
    - repetition_penalty: weakens tokens that the text has already (Keskar et al. 2019).
    """

    temperature: Any
    top_k: Any = None
    top_p: Any = None
    repetition_penalty: Any = None


def make_sampling(
    temperature: float, top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None
) -> Sampling:
    """Return a Sampling of arrays, so that other values need no other program."""
    return Sampling(
        np.float32(temperature),
        None if top_k is None else np.int32(top_k),
        None if top_p is None else np.float32(top_p),
        None if repetition_penalty is None else np.float32(repetition_penalty),
    )


def draw(
    logits_BxV: jax.Array, sampling: Sampling, tokens_BxT: jax.Array, length: jax.Array, key: jax.Array
) -> jax.Array:
    """Draw one token for each row, behind its first `length` tokens."""
    logits_BxV = penalize(logits_BxV, sampling, tokens_BxT, length)
    drawn_B = jax.random.categorical(key, keep_likely(logits_BxV, sampling))
    return jnp.where(sampling.temperature > 0, drawn_B, jnp.argmax(logits_BxV, axis=-1))


def penalize(logits_BxV: jax.Array, sampling: Sampling, tokens_BxT: jax.Array, length: jax.Array) -> jax.Array:
    """Weaken the first `length` tokens."""
    penalty = sampling.repetition_penalty
    if penalty is None:
        return logits_BxV
    B, T = tokens_BxT.shape
    is_there_BxT = jnp.broadcast_to((jnp.arange(T) < length)[None], (B, T))
    seen_BxV = jnp.zeros(logits_BxV.shape, bool).at[jnp.arange(B)[:, None], tokens_BxT].max(is_there_BxT)
    weaker_BxV = jnp.where(logits_BxV < 0, logits_BxV * penalty, logits_BxV / penalty)
    return jnp.where(seen_BxV, weaker_BxV, logits_BxV)


def keep_likely(logits_BxV: jax.Array, sampling: Sampling) -> jax.Array:
    """Divide by the temperature, and leave only the tokens of top_k and top_p."""
    logits_BxV = logits_BxV / jnp.maximum(sampling.temperature, jnp.float32(1e-6))
    if sampling.top_k is not None:
        rank = jnp.minimum(sampling.top_k, logits_BxV.shape[1]) - 1
        least_Bx1 = jnp.take(jnp.sort(logits_BxV, descending=True), rank[None], axis=1)
        logits_BxV = jnp.where(logits_BxV >= least_Bx1, logits_BxV, -jnp.inf)
    if sampling.top_p is not None:
        sorted_BxV = jnp.sort(logits_BxV, descending=True)
        share_BxV = jax.nn.softmax(sorted_BxV)
        is_kept_BxV = jnp.cumsum(share_BxV, axis=-1) - share_BxV < sampling.top_p
        least_Bx1 = jnp.min(jnp.where(is_kept_BxV, sorted_BxV, jnp.inf), axis=-1, keepdims=True)
        logits_BxV = jnp.where(logits_BxV >= least_Bx1, logits_BxV, -jnp.inf)
    return logits_BxV


def text_of(
    chunks: Iterable[list[int]],
    decode: Callable[[list[int]], str],
    ends: Collection[int | None],
    stops: Collection[str],
) -> Iterator[str]:
    """Yield the text of tokens as soon as it is certain, up to a token of `ends` or a text of `stops`."""
    tokens, shown = list[int](), 0
    for chunk in chunks:
        end = next((at for at, token in enumerate(chunk) if token in ends), None)
        tokens += chunk[:end]
        text = decode(tokens)
        found = [at for stop in stops if (at := text.find(stop)) >= 0]
        if found or end is not None:
            yield text[shown : min(found, default=len(text))]
            return
        begun = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        certain = max(shown, min(len(text.rstrip("\ufffd")), len(text) - begun))  # half a character may follow
        yield text[shown:certain]
        shown = certain
    yield decode(tokens)[shown:]
