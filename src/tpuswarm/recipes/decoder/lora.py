"""Adapters of low rank (LoRA, Hu et al. 2022): layers compute x W + factor (x A) B, and only A and B are trained."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tpuswarm.recipes.decoder import adapter_config, weights
from tpuswarm.recipes.decoder.config import DROPOUT_KEY, LORA_LEAVES, SCALE, TARGETS, Base, Config, Lora
from tpuswarm.recipes.language.weight_files import save_one
from tpuswarm.train.paths import leaf_paths, select


def as_base(params: Any, base: Base) -> Any:
    """Return a model's float32 parameters as those of a base."""
    if base == "f32":
        return params
    found = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    if base == "int8":
        for part, layer in TARGETS.values():
            w, scale = weights.quantize(params["blocks"][part][layer]["w"], jnp)
            found["blocks"][part][layer] |= {"w": w, SCALE: scale}
    return found


def init(key: jax.Array, params: Any, lora: Lora) -> Any:
    """Return parameters in the form of the model's, `params`, with adapters as peft initializes them.

    a: uniform within ±1 / sqrt(inputs); b: 0, so that training begins at the base.
    """
    blocks = dict(params["blocks"])
    for name, key_of_layer in zip(lora.targets, jax.random.split(key, len(lora.targets)), strict=True):
        part, layer = TARGETS[name]
        layers, inputs, outputs = blocks[part][layer]["w"].shape
        bound = inputs**-0.5
        a = jax.random.uniform(key_of_layer, (layers, inputs, lora.rank), jnp.float32, -bound, bound)
        b = jnp.zeros((layers, lora.rank, outputs), jnp.float32)
        blocks[part] = blocks[part] | {layer: blocks[part][layer] | {"lora_a": a, "lora_b": b}}
    return params | {"blocks": blocks}


def with_keys(params: Any, key: jax.Array, lora: Lora) -> Any:
    """Return parameters with a key for the dropout of each adapter."""
    blocks = dict(params["blocks"])
    for name, key_of_target in zip(lora.targets, jax.random.split(key, len(lora.targets)), strict=True):
        part, layer = TARGETS[name]
        keys_L = jax.random.split(key_of_target, len(blocks[part][layer]["w"]))
        blocks[part] = blocks[part] | {layer: blocks[part][layer] | {DROPOUT_KEY: keys_L}}
    return params | {"blocks": blocks}


def is_adapter(path: str) -> bool:
    """Whether a path of a parameter is an adapter's."""
    return path.endswith(LORA_LEAVES)


def base_paths(params: Any) -> list[str]:
    """Return the paths of the parameters that stay as they are."""
    return [path for path in leaf_paths(params) if not is_adapter(path)]


def split(params: Any) -> tuple[Any, Any]:
    """Return the base and the adapters; each has None in the place of the other."""
    names = jax.tree.unflatten(jax.tree.structure(params), leaf_paths(params))
    adapters = jax.tree.map(is_adapter, names)
    return select(params, jax.tree.map(lambda own: not own, adapters)), select(params, adapters)


def fresh(key: jax.Array, like: Any, lora: Lora) -> Any:
    """Return new adapters in the shardings of `like`, and None in the place of the base."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, split(like)[1])
    return jax.jit(lambda key: split(init(key, like, lora))[1], out_shardings=shardings)(key)


def write(params: Any, config: Config, lora: Lora, base: str, folder: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json for peft. Raises OSError if the disk is full.

    base: the published model that the adapters belong to.
    """
    flat = weights.by_path(params)
    tensors = {tensor.name: weights.on_host(flat, tensor) for tensor in weights.adapters(config, lora)}
    save_one(folder / weights.ADAPTER_FILE, tensors)
    adapter_config.write(lora, base, folder)
