"""The training program of a language model: loss, optimizer, learning rate."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from tpuswarm.recipes.language.config import DECAY_SHARE
from tpuswarm.recipes.language.loss import CHUNK_BYTES, GPU_CHUNK_BYTES, GPU_CHUNK_SHARE, LossOptions
from tpuswarm.train.losses import in_precision
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.recipe import Batch, Options, Weighted
from tpuswarm.train.supervised_program import SupervisedProgram

Loss = Callable[[Any, Batch, jax.Array | None, LossOptions], jax.Array | Weighted]
"""(params, batch, key, options) → mean loss of the next tokens."""


class Optimizer(NamedTuple):
    """How parameters are updated: names from config.OPTIMIZERS and config.MOMENTS; progress → learning rate.

    z_loss, label_smoothing: as in LossOptions; evaluations are without.
    """

    name: str
    moments: str
    schedule: Callable[[jax.Array], jax.Array]
    beta2: float
    weight_decay: float
    z_loss: float
    label_smoothing: float


def language_program(
    init: Callable[[jax.Array], Any], loss: Loss, context: int, options: Options, optimizer: Optimizer,
    tied: Mapping[str, str], base: Collection[str] = (), is_chat: bool = False,
    set_names: Sequence[str] = (),
) -> SupervisedProgram:  # fmt: skip
    """Return the program of a model of text; it supports every option. tied, base: as in SupervisedProgram.

    is_chat: batches are those of ChatSource; set_names: of data sets, whose number each row has.
    """
    moment_dtype = jnp.bfloat16 if optimizer.moments == "bf16" else None
    chunk_bytes = _gpu_chunk_bytes(options.memory) if options.platform == "gpu" else None
    training_options = LossOptions(chunk_bytes, optimizer.z_loss, optimizer.label_smoothing)

    def batch_loss(params: Any, batch: Batch, key: jax.Array | None) -> jax.Array | Weighted:
        return loss(params, batch, key, LossOptions(chunk_bytes) if key is None else training_options)

    def transformation(rate: Any, decay_mask: Any) -> optax.GradientTransformation:
        beta2, weight_decay = optimizer.beta2, optimizer.weight_decay
        if optimizer.name == "muon":
            return muon(rate, beta2, weight_decay, decay_mask, moment_dtype)
        if optimizer.name == "adafactor":  # unlike AdamW it does not multiply the decay by the rate
            return optax.adafactor(
                rate, multiply_by_parameter_scale=False, weight_decay_rate=weight_decay * rate,
                weight_decay_mask=decay_mask,
            )  # fmt: skip
        return optax.adamw(rate, b2=beta2, weight_decay=weight_decay, mask=decay_mask, mu_dtype=moment_dtype)

    def spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
        arrays: dict[str, Any] = {"tokens": ((size, context + 1), np.int32)}
        if is_chat:
            arrays |= {"segments": ((size, context), np.int32), "counted": ((size, context), np.bool_)}
        if set_names:
            arrays["set"] = ((size,), np.int32)
        return {name: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for name, (shape, dtype) in arrays.items()}

    # The model casts itself: norms, softmax and loss stay in float32 under bf16.
    full = in_precision(batch_loss, "highest") if options.precision == "highest" else batch_loss
    return SupervisedProgram(
        init,
        full,
        transformation,
        optimizer.schedule,
        spec,
        options,
        tokens_per_row=context,
        tied=tied,
        micro_batches=True,
        base=base,
    )


def _gpu_chunk_bytes(memory: int | None) -> int:
    """Return how many bytes of logits to compute at a time on a GPU with this memory."""
    if memory is None:
        return GPU_CHUNK_BYTES
    return max(CHUNK_BYTES, min(GPU_CHUNK_BYTES, int(memory * GPU_CHUNK_SHARE)))


def muon(
    rate: Any, beta2: float, weight_decay: float, decay_mask: Any, moment_dtype: Any
) -> optax.GradientTransformation:
    """Return Muon for each matrix of the layers, and Adam with Nesterov momentum for the other parameters.

    Updates are as large as AdamW's, 0.2 in the mean square, so that both take the same learning rate (Liu et al. 2025,
    "Muon is scalable for LLM training", section 2.2).
    """

    def matrices(params: Any) -> Any:
        def numbers(path: str, leaf: Any) -> contrib.MuonDimensionNumbers | None:
            stacked = path.startswith("blocks/") and leaf.ndim == 3  # layers, inputs, outputs
            return contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2) if stacked else None

        leaves = jax.tree.leaves(params)
        dimensions = [numbers(path, leaf) for path, leaf in zip(leaf_paths(params), leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), dimensions)

    return contrib.muon(
        rate, weight_decay=weight_decay, weight_decay_mask=decay_mask, adam_b2=beta2, adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=matrices, consistent_rms=0.2, mu_dtype=moment_dtype,
    )  # fmt: skip


def learning_rate(progress: jax.Array, schedule: str, lr: float, lr_end: float, warmup: float) -> jax.Array:
    """Return the rate at a share of the run: linear from `lr` / 100 during `warmup`, then by `schedule` to `lr_end`.

    schedule: one of config.SCHEDULES.
    """
    warm = jnp.clip(progress / max(warmup, 1e-9), 0.01, 1.0)
    if schedule == "cosine":
        height = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((progress - warmup) / (1 - warmup), 0.0, 1.0)))
    else:
        fall = 1 - warmup if schedule == "linear" else min(DECAY_SHARE, 1 - warmup)
        height = jnp.clip((1 - progress) / fall, 0.0, 1.0)
    return jnp.where(progress < warmup, lr * warm, lr_end + (lr - lr_end) * height)
