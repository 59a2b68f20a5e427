"""Read and write a decoder's parameters in the form of Hugging Face's transformers."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tpuswarm.recipes.decoder.config import LORA_LEAVES, SCALE, TARGETS, Config, Lora
from tpuswarm.recipes.language.hub import Published
from tpuswarm.recipes.language.weight_files import Tensors, open_tensors, save_tensors
from tpuswarm.train.paths import leaf_paths

HEAD = "lm_head.weight"
TEXT_PREFIX, PICTURE_PREFIXES = "language_model.", ("vision_tower.", "multi_modal_projector.")
"""Of names in a model that also reads pictures."""
ADAPTER_FILE, PEFT_PREFIX = "adapter_model.safetensors", "base_model.model."
BUFFER_ENDINGS = (".rotary_emb.inv_freq",)
"""Frequencies of the positions, which older files store among the weights."""


class Tensor(NamedTuple):
    """One of their tensors."""

    path: str
    """Path of our parameter."""
    layer: int | None
    name: str
    shape: tuple[int, ...]
    transposed: bool
    """Whether it is [outputs, inputs] while ours is [inputs, outputs]."""


def tensors(config: Config) -> Iterator[Tensor]:
    """Yield all tensors of a model of this shape."""
    D, F, K = config.width, config.mlp_width, config.head_width
    Q, KV = config.heads * K, config.kv_heads * K
    yield Tensor("embed", None, "model.embed_tokens.weight", (config.vocab, D), False)
    yield Tensor("norm/scale", None, "model.norm.weight", (D,), False)
    if not config.tied:
        yield Tensor("head", None, HEAD, (config.vocab, D), False)
    linears = {
        "attention/q": ("self_attn.q_proj", D, Q, config.qkv_bias),
        "attention/k": ("self_attn.k_proj", D, KV, config.qkv_bias),
        "attention/v": ("self_attn.v_proj", D, KV, config.qkv_bias),
        "attention/out": ("self_attn.o_proj", Q, D, config.out_bias),
        "mlp/gate": ("mlp.gate_proj", D, F, config.mlp_bias),
        "mlp/up": ("mlp.up_proj", D, F, config.mlp_bias),
        "mlp/down": ("mlp.down_proj", F, D, config.mlp_bias),
    }
    norms: dict[str, tuple[str, int]] = {}
    if config.norm_inputs:
        before_mlp = "pre_feedforward_layernorm" if config.norm_outputs else "post_attention_layernorm"
        norms |= {"attention_in": ("input_layernorm", D), "mlp_in": (before_mlp, D)}
    if config.norm_outputs:
        norms |= {"attention_out": ("post_attention_layernorm", D), "mlp_out": ("post_feedforward_layernorm", D)}
    if config.norm_heads != "none":
        q, k = (K, K) if config.norm_heads == "each" else (Q, KV)
        norms |= {"attention/q_norm": ("self_attn.q_norm", q), "attention/k_norm": ("self_attn.k_norm", k)}
    for layer in range(len(config.layers)):
        prefix = f"model.layers.{layer}."
        for path, (name, inputs, outputs, bias) in linears.items():
            yield Tensor(f"blocks/{path}/w", layer, f"{prefix}{name}.weight", (outputs, inputs), True)
            if bias:
                yield Tensor(f"blocks/{path}/b", layer, f"{prefix}{name}.bias", (outputs,), False)
        for path, (name, size) in norms.items():
            yield Tensor(f"blocks/{path}/scale", layer, f"{prefix}{name}.weight", (size,), False)


def adapters(config: Config, lora: Lora) -> Iterator[Tensor]:
    """Yield peft's tensors of the adapters of such a model."""
    adapted = {"/".join(("blocks", *TARGETS[name])) for name in lora.targets}
    for tensor in tensors(config):
        layer, _, kind = tensor.path.rpartition("/")
        if kind == "w" and layer in adapted:
            outputs, inputs = tensor.shape
            module = PEFT_PREFIX + tensor.name.removesuffix("weight")
            yield Tensor(f"{layer}/lora_a", tensor.layer, f"{module}lora_A.weight", (lora.rank, inputs), True)
            yield Tensor(f"{layer}/lora_b", tensor.layer, f"{module}lora_B.weight", (outputs, lora.rank), True)


def load(place: Published, config: Config, like: Any) -> Any:
    """Read the weights at `place` as parameters in the shapes, dtypes and shardings of `like`.

    Leaves are read one after the other, so that the host holds at most one. Raises InputError naming the first tensor
    that is missing, extra, of another shape or no float.
    """
    with ExitStack() as files:
        found = open_tensors(place, files)
        found.drop(*BUFFER_ENDINGS)
        found.keep_part(TEXT_PREFIX, PICTURE_PREFIXES)
        expected = list(tensors(config))
        if config.tied:  # some files hold the embedding twice
            found.drop_copy(HEAD, "model.embed_tokens.weight")
        return _load(found, expected, like)


def load_adapters(place: Published, config: Config, lora: Lora, like: Any) -> Any:
    """Read the adapters at `place` as `load` reads weights."""
    with ExitStack() as files:
        return _load(open_tensors(place, files, parts=[ADAPTER_FILE]), list(adapters(config, lora)), like)


def _load(found: Tensors, expected: list[Tensor], like: Any) -> Any:
    found.check({tensor.name: tensor.shape for tensor in expected})
    parts: dict[str, list[Tensor]] = {}
    for tensor in expected:
        parts.setdefault(tensor.path, []).append(tensor)

    @lru_cache(maxsize=1)  # w and its scale follow one another
    def quantized(path: str) -> list[np.ndarray]:
        layers = [quantize(np.asarray(found[tensor.name][:], np.float32).T, np) for tensor in parts[path]]
        return [np.stack(arrays) for arrays in zip(*layers, strict=True)]

    leaves = []
    for path, leaf in zip(leaf_paths(like), jax.tree.leaves(like), strict=True):
        read: Callable[..., np.ndarray]
        if path.endswith(SCALE):
            read = quantized(path.removesuffix(SCALE) + "w")[1].__getitem__
        elif leaf.dtype == np.int8:
            read = quantized(path)[0].__getitem__
        else:
            read = partial(_read, found, parts[path], leaf)
        made = jax.make_array_from_callback(leaf.shape, leaf.sharding, read)
        leaves.append(jax.block_until_ready(made))  # otherwise the host holds copies of several leaves
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def quantize(w: Any, numpy: Any) -> tuple[Any, Any]:
    """Return float32 matrices as int8 and the scale of each column; numpy: the module, NumPy or jax.numpy."""
    scale = numpy.maximum(numpy.abs(w).max(-2), np.finfo(np.float32).tiny * 127) / np.float32(127)
    return numpy.round(w / scale[..., None, :]).astype(numpy.int8), scale


def _read(found: Any, parts: list[Tensor], leaf: Any, index: tuple[slice, ...]) -> np.ndarray:
    """Read the part `index` of one of our leaves; padding of the vocabulary is 0."""
    part = np.zeros([len(range(size)[part]) for size, part in zip(leaf.shape, index, strict=True)], leaf.dtype)
    rows = range(leaf.shape[0])[index[0]]
    if parts[0].layer is None:
        stop = min(rows.stop, parts[0].shape[0])
        if stop > rows.start:
            part[: stop - rows.start] = found[parts[0].name][(slice(rows.start, stop), *index[1:])]
        return part
    for place, layer in enumerate(rows):
        tensor = parts[layer]
        part[place] = found[tensor.name][index[:0:-1]].T if tensor.transposed else found[tensor.name][index[1:]]
    return part


def save(params: Any, config: Config, folder: Path) -> None:
    """Write all parameters in float32, in shards, with adapters added. Raises OSError if the disk is full."""
    flat = by_path(params)
    named = {tensor.name: tensor for tensor in tensors(config)}
    sizes = {name: 4 * math.prod(tensor.shape) for name, tensor in named.items()}
    save_tensors(folder, sizes, lambda name: _merged(flat, named[name], config.lora))


def _merged(flat: Mapping[str, Any], tensor: Tensor, lora: Lora | None) -> np.ndarray:
    """Return one of their tensors in float32, with its adapter added if it has one."""
    found = on_host(flat, tensor).astype(np.float32, copy=False)
    prefix = tensor.path.removesuffix("/w")
    if (scale := flat.get(f"{prefix}/{SCALE}")) is not None:
        found = found * np.asarray(scale[tensor.layer])[:, None]
    if lora is None or f"{prefix}/lora_a" not in flat:
        return found
    a, b = (np.asarray(flat[f"{prefix}/{name}"][tensor.layer], np.float32) for name in LORA_LEAVES)
    return found + np.float32(lora.factor) * (a @ b).T


def by_path(params: Any) -> dict[str, Any]:
    return dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))


def on_host(flat: Mapping[str, Any], tensor: Tensor) -> np.ndarray:
    """Return one of their tensors from our parameters by path."""
    ours = flat[tensor.path] if tensor.layer is None else flat[tensor.path][tensor.layer]
    array = np.asarray(ours)[: tensor.shape[0]] if tensor.layer is None else np.asarray(ours)
    return np.ascontiguousarray(array.T) if tensor.transposed else array
