"""Weights and tokenizers of GPT-2 as Hugging Face stores them, read into our parameters."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.bpe import FILE, Bpe, read_bpe, read_gpt2_files
from tpuswarm.recipes.gpt2.config import SIZES, Config
from tpuswarm.recipes.gpt2.hub import Published
from tpuswarm.recipes.gpt2.tokenizer import Characters
from tpuswarm.train.paths import leaf_paths

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ONCE = {"wte": "wte.weight", "wpe": "wpe.weight", "ln_f/scale": "ln_f.weight", "ln_f/bias": "ln_f.bias"}
LAYER = {
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
"""Our parameters → their tensors. Both keep matrices as [inputs, outputs]; ours stack the layers on a first axis."""
HEAD = "lm_head.weight"
PREFIX = "transformer."
MASKS = (".attn.bias", ".attn.masked_bias")
"""Causal masks that older files store as if they were weights."""
FLOATS = ("F64", "F32", "F16", "BF16")
WITHOUT = "weights (pickles are not read: save them as safetensors)"
"""What a model has none of that lacks a file of its weights."""
ROWS = 4096
"""Rows of a head that are compared with the embedding at a time."""
SHAPE = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "context": "n_positions", "vocab": "vocab_size"}
USUAL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
"""What a config.json means that does not say: transformers' GPT2Config."""
ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
"""Settings of a config.json that change what is computed → the values that our model computes; first, the usual one."""


def read_config(place: Published) -> Config:
    """The shape in a model's config.json; InputError, naming it, for a setting that our model does not compute."""
    path = place.get("config.json", "model that can be read")
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        shape = {ours: int(facts.get(theirs, USUAL[theirs])) for ours, theirs in SHAPE.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the config.json of {place.name} cannot be read: {error}") from error
    kind = facts.get("model_type")
    if kind != "gpt2":
        raise InputError(f"{place.name} has the architecture {kind}, not gpt2, so its weights cannot be used")
    for name, values in ONLY.items():
        if facts.get(name, values[0]) not in values:
            raise InputError(
                f"{place.name} has {name} {facts[name]}, which this GPT-2 does not support (it uses {values[0]})"
            )
    if facts.get("n_inner") not in (None, 4 * shape["width"]):
        raise InputError(
            f"{place.name} has n_inner {facts['n_inner']}; this GPT-2 uses 4 x width, {4 * shape['width']}"
        )
    return Config(**shape)


def read_tokenizer(place: Published) -> Bpe | Characters | None:
    """A model's tokenizer: GPT-2's kind, or the characters of an export of ours; None where it brings none."""
    path = place.find(FILE)
    if path is not None:
        return _read_characters(path) or read_bpe(path)
    vocab, merges = place.find("vocab.json"), place.find("merges.txt")
    return read_gpt2_files(vocab, merges) if vocab and merges else None


def _read_characters(path: Path) -> Characters | None:
    try:
        words = json.loads(path.read_text(encoding="utf-8"))["model"]
        if words["type"] != "WordLevel" or any(len(word) != 1 for word in words["vocab"]):
            return None
        return Characters("".join(sorted(words["vocab"], key=words["vocab"].__getitem__)))
    except (OSError, ValueError, KeyError, TypeError):  # read_bpe says what is wrong with it
        return None


def check_shape(place: Published, config: Config) -> None:
    """Raise InputError, with the way out, unless a model at `place` can be taken over into one of `config`.

    A shorter context is fine: it takes the first of the learned positions.
    """
    theirs = read_config(place)
    found = {name: getattr(theirs, name) for name in SHAPE}
    wanted = {name: getattr(config, name) for name in SHAPE}
    wrong = [
        name for name in SHAPE if found[name] != wanted[name] and (name != "context" or found[name] < wanted[name])
    ]
    if not wrong:
        return
    size = next((size for size, shape in SIZES.items() if shape == tuple(found.values())[:4]), None)
    options = " ".join(f"--{name} {found[name]}" for name in wrong)
    raise InputError(
        f"{place.name} is a different GPT-2: it has {_shown(found, wrong)}, this one has {_shown(wanted, wrong)}; "
        + (f"train gpt2-{size} with its own {', '.join(wrong)}" if size and wrong != ["vocab"] else f"use {options}")
    )


def _shown(shape: Mapping[str, int], names: list[str]) -> str:
    return ", ".join(f"{name} {shape[name]}" for name in names)


def load(place: Published, config: Config, like: Any) -> Any:
    """The weights at `place` as parameters in the shapes, dtypes and shardings of `like`; config fits them.

    The devices' parts are read one leaf after the other, so no more than one leaf is held besides the parameters.
    Raises InputError for a tensor that is missing, extra, of another shape or no float, naming the first.
    """
    with ExitStack() as files:
        tensors = _Tensors(place, files)
        tensors.check(_expected(config, read_config(place).context))
        leaves = []
        for path, leaf in zip(leaf_paths(like), jax.tree.leaves(like), strict=True):
            read = partial(tensors.read, path, leaf, config)
            made = jax.make_array_from_callback(leaf.shape, leaf.sharding, read)
            leaves.append(jax.block_until_ready(made))  # else several wait beside their copies on the host
        return jax.tree.unflatten(jax.tree.structure(like), leaves)


def digest(place: Published) -> str:
    """SHA-256 of a model's weight files, and of their names."""
    found = hashlib.sha256()
    for part in _parts(place):
        path = place.get(part, WITHOUT)
        try:
            with path.open("rb") as file:
                found.update(f"{part} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error}") from error
    return found.hexdigest()


def names(config: Config) -> Iterator[tuple[str, int | None, str]]:
    """Path of ours, layer (None where there is one for all), their name; of every tensor."""
    for path, name in ONCE.items():
        yield path, None, name
    for layer in range(config.layers):
        for path, name in LAYER.items():
            yield path, layer, f"h.{layer}.{name}"


def _expected(config: Config, context: int) -> dict[str, tuple[int, ...]]:
    D = config.width
    sizes = {
        "wte": (config.vocab, D), "wpe": (context, D),
        "qkv/w": (D, 3 * D), "qkv/b": (3 * D,), "attn/proj/w": (D, D), "attn/proj/b": (D,),
        "fc/w": (D, 4 * D), "fc/b": (4 * D,), "mlp/proj/w": (4 * D, D), "mlp/proj/b": (D,),
        "scale": (D,), "bias": (D,),
    }  # fmt: skip
    return {name: next(size for end, size in sizes.items() if path.endswith(end)) for path, _, name in names(config)}


class _Tensors:
    """The tensors of a model, in one file or several; their names without the prefix."""

    def __init__(self, place: Published, files: ExitStack):
        self._place = place
        self._slices: dict[str, Any] = {}
        for part in _parts(place):
            path = place.get(part, WITHOUT)
            try:
                file = files.enter_context(safe_open(str(path), framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path} is damaged or not a safetensors file: {error}") from error
            for name in file.keys():  # noqa: SIM118  # no mapping
                self._slices[name.removeprefix(PREFIX)] = file.get_slice(name)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise InputError unless exactly the expected tensors are here."""
        found = {name: tuple(each.get_shape()) for name, each in self._slices.items() if not name.endswith(MASKS)}
        head = found.pop(HEAD, None)
        for what, wrong in (
            ("is missing", sorted(expected.keys() - found.keys())),
            ("has an unknown tensor,", sorted(found.keys() - expected.keys())),
        ):
            if wrong:
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                raise InputError(f"{self._place.name} {what} {wrong[0]}{more}; a GPT-2 has {len(expected)} tensors")
        for name, shape in expected.items():
            if found[name] != shape:
                raise InputError(f"{name} of {self._place.name} is {found[name]}, its config.json says {shape}")
            if (dtype := self._slices[name].get_dtype()) not in FLOATS:
                raise InputError(f"{name} of {self._place.name} is {dtype}, not one of {', '.join(FLOATS)}")
        if head is not None and not self._is_tied(head):
            raise InputError(
                f"{HEAD} of {self._place.name} differs from its {ONCE['wte']}: this GPT-2 has one leaf for both, so "
                "one of them would be lost"
            )

    def _is_tied(self, shape: tuple[int, ...]) -> bool:
        head, wte = self._slices[HEAD], self._slices[ONCE["wte"]]
        if shape != tuple(wte.get_shape()):
            return False
        parts = (slice(at, min(at + ROWS, shape[0])) for at in range(0, shape[0], ROWS))
        return all(np.array_equal(head[part], wte[part]) for part in parts)

    def read(self, path: str, leaf: Any, config: Config, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of one of our leaves; rows that only pad the vocabulary are 0."""
        first = range(leaf.shape[0])[index[0]]
        part = np.zeros([len(range(size)[each]) for size, each in zip(leaf.shape, index, strict=True)], leaf.dtype)
        if path in LAYER:
            for at, layer in enumerate(first):
                part[at] = self._slices[f"h.{layer}.{LAYER[path]}"][index[1:]]
        else:
            stop = min(first.stop, config.vocab) if path == "wte" else first.stop
            if stop > first.start:
                part[: stop - first.start] = self._slices[ONCE[path]][(slice(first.start, stop), *index[1:])]
        return part


def _parts(place: Published) -> list[str]:
    """The files of a model's weights."""
    index = None if place.find(WEIGHTS) else place.find(INDEX)
    if index is None:
        return [WEIGHTS]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} does not say which files hold the weights: {error!r}") from error
