"""The training step of nanodo (github.com/google-deepmind/nanodo) as it publishes it, at GPT-2 124M's sizes.

Written anew from its model.py, fsdp.py, loss.py and train.py of 2024: Flax Linen; biasless layers in a Python loop;
bfloat16 with a float32 head over all logits at once; AdamW within MultiSteps(1); parameters split along the model's
width by `nn.with_partitioning`; the batch divided by a sharding constraint. Its logging of internal activations is off.
The vocabulary is padded as ours is, for the head is the largest product.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LAYERS, HEADS, D, F, T, V = 12, 12, 768, 3072, 1024, 50304
LOWEST = -3.3895313892515355e38  # the least number of bfloat16
split = nn.with_partitioning
EMBED = split(nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0), (None, "data"))
KERNEL = nn.initializers.xavier_uniform()


class Block(nn.Module):
    """Attention and a multilayer perceptron, each after a norm."""

    @nn.compact
    def __call__(self, in_BxTxD: jax.Array) -> jax.Array:
        """One layer."""
        norm = partial(nn.LayerNorm, dtype=jnp.bfloat16, use_bias=False)
        x_BxTxD = norm()(in_BxTxD)
        heads = partial(
            nn.DenseGeneral, axis=-1, features=(HEADS, D // HEADS), use_bias=False, dtype=jnp.bfloat16,
            kernel_init=split(KERNEL, ("data", None, None)),
        )  # fmt: skip
        q, k, v = (heads(name=name)(x_BxTxD) for name in ("query", "key", "value"))
        q /= (D // HEADS) ** 0.5
        scores_BxHxTxT = jnp.einsum("...qhd,...khd->...hqk", q, k).astype(jnp.float32)
        below_1x1xTxT = jnp.tril(jnp.ones((1, 1, T, T), bool))
        scores_BxHxTxT = jnp.where(below_1x1xTxT, scores_BxHxTxT, LOWEST)
        weights_BxHxTxT = jax.nn.softmax(scores_BxHxTxT, axis=-1).astype(jnp.bfloat16)
        mixed_BxTxHxK = jnp.einsum("...hqk,...khd->...qhd", weights_BxHxTxT, v)
        x_BxTxD = in_BxTxD + nn.DenseGeneral(
            D, axis=(-2, -1), use_bias=False, dtype=jnp.bfloat16, kernel_init=split(KERNEL, (None, None, "data"))
        )(mixed_BxTxHxK)
        dense = partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, kernel_init=split(KERNEL, ("data", None)))
        return x_BxTxD + dense(D)(jax.nn.gelu(dense(F)(norm()(x_BxTxD))))


class Model(nn.Module):
    """The decoder; its head is the embedding."""

    remat: bool

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """Logits in float32."""
        embed = nn.Embed(V, D, embedding_init=EMBED)
        positions = nn.Embed(T, D, embedding_init=EMBED)
        x_BxTxD = embed(tokens_BxT) + positions(jnp.arange(T)[None])
        for _ in range(LAYERS):
            x_BxTxD = (nn.remat(Block) if self.remat else Block)()(x_BxTxD)
        x_BxTxD = nn.LayerNorm(dtype=jnp.bfloat16, use_bias=False)(x_BxTxD)
        return embed.attend(x_BxTxD.astype(jnp.float32))


def traced(devices: list[Any], batch: int, remat: bool) -> Any:
    """Its step for `devices`, traced (a `jax.stages.Traced`): replicated tokens in, divided inside, as it does."""
    mesh = Mesh(np.asarray(devices), ("data",))
    model = Model(remat)
    rate = optax.warmup_cosine_decay_schedule(1.6e-4, 1.6e-3, 1000, 100_000, 1.6e-4)
    optimizer = optax.MultiSteps(optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1), 1)

    def init() -> TrainState:
        made = model.init(jax.random.key(0), jnp.zeros((1, T), jnp.int32))
        create: Any = TrainState.create
        return create(apply_fn=model.apply, params=made["params"], tx=optimizer)

    def step(state: TrainState, tokens_BxT: jax.Array) -> tuple[TrainState, jax.Array]:
        tokens_BxT = jax.lax.with_sharding_constraint(tokens_BxT, NamedSharding(mesh, PartitionSpec("data")))

        def loss(params: Any) -> jax.Array:
            inputs_BxT = jnp.pad(tokens_BxT[:, :-1], ((0, 0), (1, 0)))
            logits_BxTxV = state.apply_fn({"params": params}, inputs_BxT)
            losses_BxT = optax.losses.softmax_cross_entropy_with_integer_labels(logits_BxTxV, tokens_BxT)
            counts_BxT = (tokens_BxT > 0).astype(jnp.float32)
            return jnp.sum(losses_BxT * counts_BxT) / counts_BxT.sum()

        found, grads = jax.value_and_grad(loss)(state.params)
        updates, opt = state.tx.update(grads, state.opt_state, state.params)
        return state.replace(
            step=opt.gradient_step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt
        ), found

    abstract = jax.eval_shape(init)
    shardings = nn.get_sharding(abstract, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(
        step, in_shardings=(shardings, everywhere), out_shardings=(shardings, everywhere), donate_argnums=(0, 1)
    )
    return compiled.trace(abstract, jax.ShapeDtypeStruct((batch, T), jnp.int32))
