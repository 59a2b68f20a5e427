"""Next-token cross-entropy in chunks, so that the float32 logits never exist at once."""

import jax
import jax.numpy as jnp

from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.train.program.mesh import gathered_as

CHUNK_BYTES = 2**27
"""Float32 logits on one device at a time."""
GPU_CHUNK_BYTES = 2**31
"""On a GPU, whose kernels for a few hundred tokens end before the next is launched. 2 GiB are 8,192 tokens
of GPT-2's vocabulary, the tile of marin-community/marin, pull request 6572, on an H100. Not measured here."""


def logits(x_BxTxD: jax.Array, wte_VxD: jax.Array, vocab: int) -> jax.Array:
    """Return float32 logits over the padded vocabulary; padding gets -1e30."""
    logits_BxTxV = jnp.einsum("btd,vd->btv", x_BxTxD, wte_VxD.astype(x_BxTxD.dtype), preferred_element_type=jnp.float32)
    if wte_VxD.shape[0] == vocab:
        return logits_BxTxV
    real_V = jnp.arange(wte_VxD.shape[0]) < vocab
    return jnp.where(real_V[None, None], logits_BxTxV, jnp.float32(-1e30))


def mean_loss(
    x_BxTxD: jax.Array, wte_VxD: jax.Array, targets_BxT: jax.Array, config: Config, chunk_bytes: int | None = None
) -> jax.Array:
    """Return the mean cross-entropy in nats, over chunks of the token axis with the whole vocabulary.

    The backward pass computes a chunk's logits again. Chunks of tokens keep the products larger than chunks of the
    vocabulary would.
    """
    B, T, D = x_BxTxD.shape
    wte_VxD = gathered_as(wte_VxD, x_BxTxD.dtype)  # cast in each chunk, so that their gradients add up in float32
    devices = max(1, jax.sharding.get_abstract_mesh().size)
    count = chunk_count(-(-B // devices), T, wte_VxD.shape[0], chunk_bytes)

    def chunk_sum(x_BxCxD: jax.Array, targets_BxC: jax.Array) -> jax.Array:
        logits_BxCxV = logits(x_BxCxD, wte_VxD, config.vocab)
        gold_BxC = jnp.take_along_axis(logits_BxCxV, targets_BxC[..., None], axis=-1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits_BxCxV, axis=-1) - gold_BxC)

    if count == 1:
        total = chunk_sum(x_BxTxD, targets_BxT)
    else:
        x_NxBxCxD = x_BxTxD.reshape(B, count, T // count, D).swapaxes(0, 1)
        targets_NxBxC = targets_BxT.reshape(B, count, T // count).swapaxes(0, 1)
        recomputed = jax.checkpoint(chunk_sum)
        total, _ = jax.lax.scan(
            lambda total, chunk: (total + recomputed(*chunk), None), jnp.float32(0), (x_NxBxCxD, targets_NxBxC)
        )
    return total / jnp.float32(B * T)


def chunk_count(rows: int, T: int, V: int, max_bytes: int | None = None) -> int:
    """Return the fewest equal chunks of T tokens with at most `max_bytes` of float32 logits, or T."""
    max_bytes = max_bytes or CHUNK_BYTES
    return next(
        count
        for count in range(1, T + 1)
        if T % count == 0 and (rows * (T // count) * V * 4 <= max_bytes or count == T)
    )
