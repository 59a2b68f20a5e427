"""What a GPT-2 computes at each step: the loss, the optimizer, the learning rate."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpuswarm.recipes.gpt2 import model
from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.gpt2.loss import GPU_CHUNK_BYTES, mean_loss
from tpuswarm.train.recipe import Batch, Options
from tpuswarm.train.supervised import SupervisedProgram, in_precision


def make_program(
    config: Config,
    options: Options,
    schedule: Callable[[jax.Array], jax.Array],
    beta2: float,
    weight_decay: float,
) -> SupervisedProgram:
    """The program of a GPT-2 of this shape, with AdamW; supports every option."""
    chunk_bytes = GPU_CHUNK_BYTES if options.platform == "gpu" else None

    def loss(params: model.Params, batch: Batch, key: jax.Array | None) -> jax.Array:
        tokens_BxT1 = batch["tokens"]
        x_BxTxD = model.hidden(params, tokens_BxT1[:, :-1], config, options, key)
        return mean_loss(x_BxTxD, params["wte"], tokens_BxT1[:, 1:], config, chunk_bytes)

    def optimizer(rate: Any, decay_mask: Any) -> optax.GradientTransformation:
        return optax.adamw(rate, b2=beta2, weight_decay=weight_decay, mask=decay_mask)

    def spec(size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((size, config.context + 1), np.dtype(np.int32))}

    # The model casts for itself: norms, softmax and loss stay in float32 under bf16.
    full = in_precision(loss, "highest") if options.precision == "highest" else loss
    return SupervisedProgram(
        lambda key: model.init(key, config),
        full,
        optimizer,
        schedule,
        spec,
        options,
        tokens_per_row=config.context,
        tied={"wte": "head"},
    )


def warmup_then_cosine(progress: jax.Array, lr: float, lr_end: float, warmup: float) -> jax.Array:
    """Learning rate at a share of the run: linear from a hundredth of `lr` over `warmup`, then a cosine to `lr_end`."""
    warm = jnp.clip(progress / max(warmup, 1e-9), 0.01, 1.0)
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((progress - warmup) / (1 - warmup), 0.0, 1.0)))
    return jnp.where(progress < warmup, lr * warm, lr_end + (lr - lr_end) * cosine)
