"""Read GPT-2 weights that Hugging Face's transformers stored."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.config import SIZES, Config
from tpuswarm.recipes.language.hub import Published
from tpuswarm.recipes.language.weight_files import Tensors, open_tensors
from tpuswarm.train.paths import leaf_paths

MODEL_TENSORS = {"wte": "wte.weight", "wpe": "wpe.weight", "ln_f/scale": "ln_f.weight", "ln_f/bias": "ln_f.bias"}
LAYER_TENSORS = {
    "blocks/ln_1/scale": "ln_1.weight",
    "blocks/ln_1/bias": "ln_1.bias",
    "blocks/attn/qkv/w": "attn.c_attn.weight",
    "blocks/attn/qkv/b": "attn.c_attn.bias",
    "blocks/attn/proj/w": "attn.c_proj.weight",
    "blocks/attn/proj/b": "attn.c_proj.bias",
    "blocks/ln_2/scale": "ln_2.weight",
    "blocks/ln_2/bias": "ln_2.bias",
    "blocks/mlp/fc/w": "mlp.c_fc.weight",
    "blocks/mlp/fc/b": "mlp.c_fc.bias",
    "blocks/mlp/proj/w": "mlp.c_proj.weight",
    "blocks/mlp/proj/b": "mlp.c_proj.bias",
}
"""Our parameters → their tensors. Matrices are [inputs, outputs] in both; ours stack the layers on a first axis."""
HEAD_TENSOR = "lm_head.weight"
PREFIX = "transformer."
MASK_ENDINGS = (".attn.bias", ".attn.masked_bias")
"""Causal masks that older files store among the weights."""
SIZE_KEYS = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "context": "n_positions", "vocab": "vocab_size"}
DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
"""Defaults of transformers' GPT2Config."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
"""Settings of a config.json that change the computation → the values that our model supports, the default first."""


def read_config(place: Published) -> Config:
    """Read the shape in a model's config.json. Raises InputError naming an unsupported setting."""
    path = place.get("config.json", "model that can be read")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        shape = {ours: int(facts.get(theirs, DEFAULTS[theirs])) for ours, theirs in SIZE_KEYS.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the config.json of {place.name} cannot be read: {error}") from error
    kind = facts.get("model_type")
    if kind != "gpt2":
        raise InputError(f"{place.name} has the architecture {kind}, not gpt2, so its weights cannot be used")
    for name, values in SUPPORTED.items():
        if facts.get(name, values[0]) not in values:
            raise InputError(
                f"{place.name} has {name} {facts[name]}, which this GPT-2 does not support (it uses {values[0]})"
            )
    if facts.get("n_inner") not in (None, 4 * shape["width"]):
        raise InputError(
            f"{place.name} has n_inner {facts['n_inner']}; this GPT-2 uses 4 x width, {4 * shape['width']}"
        )
    return Config(**shape)


def check_shape(place: Published, config: Config) -> None:
    """Raise InputError with the options to use, unless the model at `place` fits `config`.

    A shorter context fits: it takes the first of the learned positions.
    """
    published = read_config(place)
    theirs = {name: getattr(published, name) for name in SIZE_KEYS}
    ours = {name: getattr(config, name) for name in SIZE_KEYS}
    wrong = [
        name for name in SIZE_KEYS if theirs[name] != ours[name] and (name != "context" or theirs[name] < ours[name])
    ]
    if not wrong:
        return
    size = next((size for size, shape in SIZES.items() if shape == tuple(theirs.values())[:4]), None)
    options = " ".join(f"--{name} {theirs[name]}" for name in wrong)
    raise InputError(
        f"{place.name} is a different GPT-2: it has {_describe(theirs, wrong)}, this one has {_describe(ours, wrong)}; "
        + (f"train gpt2-{size} with its own {', '.join(wrong)}" if size and wrong != ["vocab"] else f"use {options}")
    )


def _describe(shape: Mapping[str, int], names: list[str]) -> str:
    return ", ".join(f"{name} {shape[name]}" for name in names)


def load(place: Published, config: Config, like: Any) -> Any:
    """Read the weights at `place` as parameters in the shapes, dtypes and shardings of `like`.

    Leaves are read one after the other, so that the host holds at most one. Raises InputError naming the first tensor
    that is missing, extra, of another shape or no float.
    """
    with ExitStack() as files:
        tensors = open_tensors(place, files, PREFIX)
        tensors.drop(*MASK_ENDINGS)
        tensors.drop_copy(HEAD_TENSOR, MODEL_TENSORS["wte"])
        tensors.check(_expected(config, read_config(place).context))
        leaves = []
        for path, leaf in zip(leaf_paths(like), jax.tree.leaves(like), strict=True):
            read = partial(_read, tensors, path, leaf, config)
            made = jax.make_array_from_callback(leaf.shape, leaf.sharding, read)
            leaves.append(jax.block_until_ready(made))  # otherwise the host holds copies of several leaves
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def tensor_names(config: Config) -> Iterator[tuple[str, int | None, str]]:
    """Yield our path, the layer or None, and their name of every tensor."""
    for path, name in MODEL_TENSORS.items():
        yield path, None, name
    for layer in range(config.layers):
        for path, name in LAYER_TENSORS.items():
            yield path, layer, f"h.{layer}.{name}"


def _expected(config: Config, context: int) -> dict[str, tuple[int, ...]]:
    D = config.width
    sizes = {
        "wte": (config.vocab, D), "wpe": (context, D),
        "qkv/w": (D, 3 * D), "qkv/b": (3 * D,), "attn/proj/w": (D, D), "attn/proj/b": (D,),
        "fc/w": (D, 4 * D), "fc/b": (4 * D,), "mlp/proj/w": (4 * D, D), "mlp/proj/b": (D,),
        "scale": (D,), "bias": (D,),
    }  # fmt: skip
    return {
        name: next(size for end, size in sizes.items() if path.endswith(end)) for path, _, name in tensor_names(config)
    }


def _read(tensors: Tensors, path: str, leaf: Any, config: Config, index: tuple[slice, ...]) -> np.ndarray:
    """Read the part `index` of one of our leaves; padding of the vocabulary is 0."""
    first = range(leaf.shape[0])[index[0]]
    part = np.zeros([len(range(size)[part]) for size, part in zip(leaf.shape, index, strict=True)], leaf.dtype)
    if path in LAYER_TENSORS:
        for row, layer in enumerate(first):
            part[row] = tensors[f"h.{layer}.{LAYER_TENSORS[path]}"][index[1:]]
    else:
        stop = min(first.stop, config.vocab) if path == "wte" else first.stop
        if stop > first.start:
            part[: stop - first.start] = tensors[MODEL_TENSORS[path]][(slice(first.start, stop), *index[1:])]
    return part
