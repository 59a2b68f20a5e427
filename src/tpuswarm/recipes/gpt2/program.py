"""What a GPT-2 computes at each step: the loss, the optimizer, the learning rate."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from tpuswarm.recipes.gpt2 import model
from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.gpt2.loss import GPU_CHUNK_BYTES, mean_loss
from tpuswarm.train.losses import in_precision
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.recipe import Batch, Options
from tpuswarm.train.supervised_program import SupervisedProgram


def make_program(
    config: Config,
    options: Options,
    schedule: Callable[[jax.Array], jax.Array],
    beta2: float,
    weight_decay: float,
    optimizer: str = "adamw",
    moments: str = "f32",
) -> SupervisedProgram:
    """The program of a GPT-2 of this shape; supports every option.

    optimizer and moments: of config.OPTIMIZERS and config.MOMENTS.
    """
    first = jnp.bfloat16 if moments == "bf16" else None
    chunk_bytes = GPU_CHUNK_BYTES if options.platform == "gpu" else None

    def loss(params: model.Params, batch: Batch, key: jax.Array | None) -> jax.Array:
        tokens_BxT1 = batch["tokens"]
        x_BxTxD = model.hidden(params, tokens_BxT1[:, :-1], config, options, key)
        return mean_loss(x_BxTxD, params["wte"], tokens_BxT1[:, 1:], config, chunk_bytes)

    def transformation(rate: Any, decay_mask: Any) -> optax.GradientTransformation:
        if optimizer == "muon":
            return muon(rate, beta2, weight_decay, decay_mask, first)
        if optimizer == "adafactor":  # a learning rate as AdamW's; the decay is not multiplied by it in there
            return optax.adafactor(
                rate, multiply_by_parameter_scale=False, weight_decay_rate=weight_decay * rate,
                weight_decay_mask=decay_mask,
            )  # fmt: skip
        return optax.adamw(rate, b2=beta2, weight_decay=weight_decay, mask=decay_mask, mu_dtype=first)

    def spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((size, config.context + 1), np.dtype(np.int32))}

    # The model casts for itself: norms, softmax and loss stay in float32 under bf16.
    full = in_precision(loss, "highest") if options.precision == "highest" else loss
    return SupervisedProgram(
        lambda key: model.init(key, config),
        full,
        transformation,
        schedule,
        spec,
        options,
        tokens_per_row=config.context,
        tied={"wte": "head"},
        micro_batches=True,
    )


def muon(rate: Any, beta2: float, weight_decay: float, decay_mask: Any, first: Any) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, each of its own, Adam (with Nesterov's momentum too) for the rest.

    An update has the size of one of AdamW's, 0.2 in the mean square, so that the learning rate is the same (Liu et al.
    2025, "Muon is scalable for LLM training", section 2.2).
    """

    def matrices(params: Any) -> Any:
        def numbers(path: str, leaf: Any) -> contrib.MuonDimensionNumbers | None:
            stacked = path.startswith("blocks/") and leaf.ndim == 3  # layers, inputs, outputs
            return contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2) if stacked else None

        leaves = jax.tree.leaves(params)
        found = [numbers(path, leaf) for path, leaf in zip(leaf_paths(params), leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), found)

    return contrib.muon(
        rate, weight_decay=weight_decay, weight_decay_mask=decay_mask, adam_b2=beta2, adam_weight_decay=weight_decay,
        muon_weight_dimension_numbers=matrices, consistent_rms=0.2, mu_dtype=first,
    )  # fmt: skip


def warmup_then_cosine(progress: jax.Array, lr: float, lr_end: float, warmup: float) -> jax.Array:
    """Learning rate at a share of the run: linear from a hundredth of `lr` over `warmup`, then a cosine to `lr_end`."""
    warm = jnp.clip(progress / max(warmup, 1e-9), 0.01, 1.0)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((progress - warmup) / (1 - warmup), 0.0, 1.0)))
    return jnp.where(progress < warmup, lr * warm, lr_end + (lr - lr_end) * cosine)
