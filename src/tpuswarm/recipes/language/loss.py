"""Next-token cross-entropy in chunks, so that the float32 logits never exist at once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal

from tpuswarm.train.program.mesh import gathered_as
from tpuswarm.train.recipe import Weighted

CHUNK_BYTES = 2**27
"""Float32 logits on one device at a time."""
GPU_CHUNK_BYTES = 2**31
"""On a GPU, whose kernels for a few hundred tokens end before the next is launched. 2 GiB are 8,192 tokens
of GPT-2's vocabulary, the tile of marin-community/marin, pull request 6572, on an H100. Not measured here."""
GPU_CHUNK_SHARE = 1 / 24
"""At most this share of a GPU's memory; the gradient takes the same again. All 2 GiB from 48 GiB on."""


def logits(x_BxTxD: jax.Array, wte_VxD: jax.Array, vocab: int, cap: float | None = None) -> jax.Array:
    """Return float32 logits over the padded vocabulary; padding gets -1e30. A cap makes cap tanh(s / cap) of each s."""
    logits_BxTxV = jnp.einsum("btd,vd->btv", x_BxTxD, wte_VxD.astype(x_BxTxD.dtype), preferred_element_type=jnp.float32)
    if cap is not None:
        logits_BxTxV = cap * jnp.tanh(logits_BxTxV / cap)
    if wte_VxD.shape[0] == vocab:
        return logits_BxTxV
    return jnp.where(_tokens_like(logits_BxTxV) < vocab, logits_BxTxV, jnp.float32(-1e30))


NOT_COUNTED = -1
"""Target whose loss does not count."""


class LossOptions(NamedTuple):
    """How the loss is computed."""

    chunk_bytes: int | None = None
    """Bytes of float32 logits on one device at a time; None: CHUNK_BYTES."""
    z_loss: float = 0.0
    """Factor of the squared logarithm of the softmax's denominator, which is added (Chowdhery et al. 2022: 1e-4)."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary (Szegedy et al. 2016)."""


PLAIN = LossOptions()


class _Form(NamedTuple):
    vocab: int
    cap: float | None
    ignored: int | None
    """Target whose loss does not count; None: all count."""
    z_loss: float
    label_smoothing: float


def mean_loss(
    x_BxTxD: jax.Array, wte_VxD: jax.Array, targets_BxT: jax.Array, vocab: int, options: LossOptions = PLAIN,
    cap: float | None = None, counted_BxT: jax.Array | None = None,
) -> Any:  # fmt: skip
    """Return the mean cross-entropy in nats, over chunks of the token axis with the whole vocabulary.

    Chunks of tokens keep the products larger than chunks of the vocabulary would. counted_BxT: the targets that count;
    with it the mean is Weighted.
    """
    ignored = None if counted_BxT is None else NOT_COUNTED
    if counted_BxT is not None:
        targets_BxT = jnp.where(counted_BxT, targets_BxT, NOT_COUNTED)
    B, T, D = x_BxTxD.shape
    wte_VxD = gathered_as(wte_VxD, x_BxTxD.dtype)
    devices = max(1, jax.sharding.get_abstract_mesh().size)
    count = chunk_count(-(-B // devices), T, wte_VxD.shape[0], options.chunk_bytes)
    x_NxBxCxD = x_BxTxD.reshape(B, count, T // count, D).swapaxes(0, 1)
    targets_NxBxC = targets_BxT.reshape(B, count, T // count).swapaxes(0, 1)
    form = _Form(vocab, cap, ignored, options.z_loss, options.label_smoothing)
    loss = _loss(x_NxBxCxD, wte_VxD, targets_NxBxC, form)
    return loss if counted_BxT is None else Weighted(loss, counted_BxT.sum(dtype=jnp.float32))


def mean_by_set(
    mean: Callable[[jax.Array], Weighted], counted_BxT: jax.Array, set_B: jax.Array, names: Sequence[str]
) -> tuple[Weighted, dict[str, Weighted]]:
    """Return the mean loss of all rows, and of those of each data set. mean: returns that of the counted targets."""
    found = {f"loss_{name}": mean(counted_BxT & (set_B == number)[:, None]) for number, name in enumerate(names)}
    return Weighted(sum(one.sum for one in found.values()), sum(one.weight for one in found.values())), found


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(x_NxBxCxD: jax.Array, wte_VxD: jax.Array, targets_NxBxC: jax.Array, form: _Form) -> jax.Array:
    """Return the mean of the losses, or the sum of those whose target is not ignored.

    Its gradient is computed together with it, from the same logits.
    """

    def add_chunk(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        loss, _ = _chunk_loss(chunk[0], wte_VxD, chunk[1], form)
        return total + loss, None

    total, _ = jax.lax.scan(add_chunk, jnp.float32(0), (x_NxBxCxD, targets_NxBxC))
    return total / jnp.float32(targets_NxBxC.size if form.ignored is None else 1)


def _loss_forward(
    x: CustomVJPPrimal, wte: CustomVJPPrimal, targets: CustomVJPPrimal, form: _Form
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    x_NxBxCxD, wte_VxD, targets_NxBxC = x.value, wte.value, targets.value
    dtype, count = x_NxBxCxD.dtype, jnp.float32(targets_NxBxC.size if form.ignored is None else 1)

    def add_chunk(
        sums: tuple[jax.Array, jax.Array | None], chunk: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array | None], jax.Array]:
        (total, dwte_VxD), (x_BxCxD, targets_BxC) = sums, chunk
        loss, dlogits_BxCxV = _chunk_loss(x_BxCxD, wte_VxD, targets_BxC, form)
        # Divided here: a factor after the loop would keep XLA from adding the embedding's gradient before it reduces
        # both over the devices.
        dlogits_BxCxV = (dlogits_BxCxV / count).astype(dtype)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        dx_BxCxD = product("bcv,vd->bcd", dlogits_BxCxV, wte_VxD.astype(dtype)).astype(dtype)
        if dwte_VxD is not None:
            dwte_VxD += product("bcv,bcd->vd", dlogits_BxCxV, x_BxCxD)
        return (total + loss, dwte_VxD), dx_BxCxD

    start = jnp.float32(0), jnp.zeros(wte_VxD.shape, jnp.float32) if wte.perturbed else None  # None: frozen
    (total, dwte_VxD), dx_NxBxCxD = jax.lax.scan(add_chunk, start, (x_NxBxCxD, targets_NxBxC))
    return total / count, (dx_NxBxCxD, dwte_VxD)


def _loss_backward(
    form: _Form, gradients: tuple[jax.Array, jax.Array | None], dloss: jax.Array
) -> tuple[jax.Array, jax.Array | None, None]:
    dx_NxBxCxD, dwte_VxD = gradients
    dx_NxBxCxD = (dx_NxBxCxD.astype(jnp.float32) * dloss).astype(dx_NxBxCxD.dtype)
    return dx_NxBxCxD, None if dwte_VxD is None else dwte_VxD * dloss, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _chunk_loss(
    x_BxCxD: jax.Array, wte_VxD: jax.Array, targets_BxC: jax.Array, form: _Form
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of a chunk's losses, and its gradient by the logits before the cap."""
    vocab, cap, ignored, z_loss, smoothing = form
    logits_BxCxV = logits(x_BxCxD, wte_VxD, vocab, cap)
    is_target_BxCxV = _tokens_like(logits_BxCxV) == targets_BxC[..., None]
    normalizer_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    target_BxC = jnp.sum(jnp.where(is_target_BxCxV, logits_BxCxV, 0), axis=-1)
    probabilities_BxCxV = jnp.exp(logits_BxCxV - normalizer_BxC[..., None])
    wanted_BxCxV = is_target_BxCxV.astype(jnp.float32)
    if smoothing:
        is_token_BxCxV = _tokens_like(logits_BxCxV) < vocab
        mean_BxC = jnp.sum(jnp.where(is_token_BxCxV, logits_BxCxV, 0), axis=-1) / vocab
        target_BxC = (1 - smoothing) * target_BxC + smoothing * mean_BxC
        wanted_BxCxV = (1 - smoothing) * wanted_BxCxV + smoothing / vocab * is_token_BxCxV
    losses_BxC = normalizer_BxC - target_BxC
    if z_loss:
        losses_BxC += z_loss * jnp.square(normalizer_BxC)
        probabilities_BxCxV *= 1 + 2 * z_loss * normalizer_BxC[..., None]
    dlogits_BxCxV = probabilities_BxCxV - wanted_BxCxV
    if cap is not None:  # the logits of padding are far beyond the cap, but their gradient is 0
        dlogits_BxCxV *= 1 - jnp.square(jnp.clip(logits_BxCxV / cap, -1, 1))
    if ignored is not None:
        counts_BxC = targets_BxC != ignored
        losses_BxC, dlogits_BxCxV = losses_BxC * counts_BxC, dlogits_BxCxV * counts_BxC[..., None]
    return jnp.sum(losses_BxC), dlogits_BxCxV


def _tokens_like(logits_BxTxV: jax.Array) -> jax.Array:
    """Return the token of each logit; a kernel that reads logits computes it."""
    return jax.lax.broadcasted_iota(jnp.int32, logits_BxTxV.shape, 2)


def chunk_count(rows: int, T: int, V: int, max_bytes: int | None = None) -> int:
    """Return the fewest equal chunks of T tokens with at most `max_bytes` of float32 logits, or T."""
    max_bytes = max_bytes or CHUNK_BYTES
    return next(
        count
        for count in range(1, T + 1)
        if T % count == 0 and (rows * (T // count) * V * 4 <= max_bytes or count == T)
    )
