"""Attention kernels, cuDNN's on GPU and Pallas's splash on TPU, and layers that recompute all but attention.

`request.py` chooses the form by the platform. A recipe computes attention that no kernel supports itself (form `xla`).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpuswarm.train.recipe import Remat

ATTENTION = "attention"
"""Name (`jax.ad_checkpoint.checkpoint_name`) of attention's output, which is the most expensive to recompute."""
BLOCK_TOKENS = 128
"""Splash works on whole blocks."""

Form = Literal["xla", "cudnn", "splash"]


def usable_form(wanted: Form, *, bf16: bool, head_width: int, queries: int, keys: int) -> Form:
    """Return the wanted form if its kernel supports these sizes, else `xla`.

    cuDNN's supports bf16 and head widths up to 128 in steps of 8; splash supports whole blocks of 128 tokens. Neither
    supports dropout of attention weights.
    """
    cudnn = bf16 and head_width % 8 == 0 and head_width <= 128
    splash = queries % BLOCK_TOKENS == 0 and keys % BLOCK_TOKENS == 0
    return wanted if {"xla": True, "cudnn": cudnn, "splash": splash}[wanted] else "xla"


def kernel(
    q_BxTxHxK: jax.Array, k_BxSxGxK: jax.Array, v_BxSxGxK: jax.Array, form: Form, *, causal: bool, scale: float,
    segments_BxT: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Return softmax attention in the form `cudnn` or `splash`; G divides H: H / G heads share each key.

    segments_BxT: for splash; a token attends only to those with its number.
    """
    if form == "cudnn":
        return jax.nn.dot_product_attention(
            q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, scale=scale, is_causal=causal, implementation="cudnn"
        )
    return _splash(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, causal, scale, segments_BxT)


def _splash(
    q_BxTxHxK: jax.Array, k_BxSxGxK: jax.Array, v_BxSxGxK: jax.Array, causal: bool, scale: float,
    segments_BxT: jax.Array | None,
) -> jax.Array:  # fmt: skip
    """Return Pallas's splash attention: one kernel per device, mapped over the batch axis."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    _, T, H, _ = q_BxTxHxK.shape
    S = k_BxSxGxK.shape[1]
    mask = masks.MultiHeadMask([(masks.CausalMask if causal else masks.FullMask)((T, S))] * H)
    q, kv = (next(size for size in (512, 256, 128) if tokens % size == 0) for tokens in (T, S))
    sizes = kernels.BlockSizes(
        block_q=q, block_kv=kv, block_kv_compute=kv, block_q_dkv=q, block_kv_dkv=kv, block_kv_dkv_compute=kv,
        block_q_dq=q, block_kv_dq=kv,
    )  # fmt: skip

    def one_device(
        q_BxTxHxK: jax.Array, k_BxSxGxK: jax.Array, v_BxSxGxK: jax.Array, segments_BxT: jax.Array | None
    ) -> jax.Array:
        run = kernels.make_splash_mha(
            mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, residual_checkpoint_name=ATTENTION
        )
        scaled = q_BxTxHxK * jnp.asarray(scale, q_BxTxHxK.dtype)
        heads_first = [x.swapaxes(1, 2) for x in (scaled, k_BxSxGxK, v_BxSxGxK)]
        segments = None if segments_BxT is None else kernels.SegmentIds(segments_BxT, segments_BxT)
        return jax.vmap(run)(*heads_first, segments).swapaxes(1, 2)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return one_device(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, segments_BxT)
    rows = PartitionSpec(mesh.axis_names[0])
    mapped = jax.shard_map(one_device, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, check_vma=False)
    return mapped(q_BxTxHxK, k_BxSxGxK, v_BxSxGxK, segments_BxT)


def recomputed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Return `layer` with a backward pass that recomputes nothing, all but products and attention, or everything.

    `dots` keeps products with weights, which have no batch dimensions, and attention's output. It recomputes norms,
    activations and attention's scores, for few FLOPs. The output of cuDNN's kernel has no name, so it is recomputed.
    """
    if remat == "none":
        return layer
    policies = jax.checkpoint_policies
    kept = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(ATTENTION)
    )
    return jax.checkpoint(layer, policy=kept if remat == "dots" else None)
