"""Causal attention in three forms of one function; all take and give BxTxHxK."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tpuswarm.recipes.gpt2.config import LANES, Config
from tpuswarm.train.recipe import Options


def usable_form(wanted: str, config: Config, options: Options) -> str:
    """The wanted form where its kernel can do this model, else `xla`.

    No kernel drops attention weights; cuDNN's works in bf16 on heads up to 128 wide in steps of 8; splash works on
    whole blocks of 128 tokens.
    """
    cudnn = options.precision == "bf16" and config.head_width % 8 == 0 and config.head_width <= 128
    splash = config.context % LANES == 0
    fits = {"xla": True, "cudnn": cudnn, "splash": splash}[wanted] and config.dropout == 0
    return wanted if fits else "xla"


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity without a key."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / jnp.asarray(1 - rate, x.dtype), jnp.zeros_like(x))


def attend(
    q_BxTxHxK: jax.Array, k_BxSxHxK: jax.Array, v_BxSxHxK: jax.Array, allowed_TxS: jax.Array,
    rate: float = 0.0, key: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Softmax attention where `allowed_TxS`; scores and softmax in float32."""
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
    q_BxTxHxK: jax.Array, k_BxTxHxK: jax.Array, v_BxTxHxK: jax.Array, form: str,
    rate: float = 0.0, key: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Causal self-attention in one of the forms `xla`, `cudnn`, `splash`."""
    if form == "cudnn":
        return jax.nn.dot_product_attention(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, is_causal=True, implementation="cudnn")
    if form == "splash":
        return _splash(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK)
    T = q_BxTxHxK.shape[1]
    allowed_TxT = jnp.tril(jnp.ones((T, T), bool))
    return attend(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK, allowed_TxT, rate, key)


def _splash(q_BxTxHxK: jax.Array, k_BxTxHxK: jax.Array, v_BxTxHxK: jax.Array) -> jax.Array:
    """Pallas splash attention, one kernel a device: it cannot be partitioned, so it is mapped over the batch axis."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    _, T, H, K = q_BxTxHxK.shape
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * H)
    block = next(size for size in (512, 256, 128) if T % size == 0)
    sizes = kernels.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip

    def one_device(q_BxTxHxK: jax.Array, k_BxTxHxK: jax.Array, v_BxTxHxK: jax.Array) -> jax.Array:
        kernel = kernels.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
        heads_first = [
            x.swapaxes(1, 2) for x in (q_BxTxHxK / jnp.asarray(K**0.5, q_BxTxHxK.dtype), k_BxTxHxK, v_BxTxHxK)
        ]
        return jax.vmap(kernel)(*heads_first).swapaxes(1, 2)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return one_device(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK)
    rows = PartitionSpec(mesh.axis_names[0])
    mapped = jax.shard_map(one_device, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows, check_vma=False)
    return mapped(q_BxTxHxK, k_BxTxHxK, v_BxTxHxK)
