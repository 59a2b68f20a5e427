"""A GPT-2 of ours written as Hugging Face's transformers reads it."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from tpuswarm.recipes.gpt2.bpe import END, FILE, Bpe
from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.gpt2.pretrained import ONLY, PREFIX, SHAPE, WEIGHTS, names
from tpuswarm.recipes.gpt2.tokenizer import Characters, Tokenizer
from tpuswarm.train.paths import leaf_paths


def write(params: Any, config: Config, tokenizer: Tokenizer | None, folder: Path) -> None:
    """model.safetensors, config.json and, where there is a tokenizer, its two files; OSError where they do not fit."""
    try:
        save_file(tensors(params, config), folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # the library's word for a full disk
        raise OSError(str(error)) from error
    end = tokenizer.end if isinstance(tokenizer, Bpe) else None
    described: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for ours, theirs in SHAPE.items()},
        **{name: values[0] for name, values in ONLY.items()},
        **{name: config.dropout for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
    }
    _write_json(folder / "config.json", described)
    if tokenizer is not None:
        (folder / FILE).write_text(tokenizer_file(tokenizer), encoding="utf-8")
        ends = {} if end is None else {name: END for name in ("bos_token", "eos_token", "unk_token")}
        kind = "PreTrainedTokenizerFast" if end is None else "GPT2Tokenizer"
        _write_json(
            folder / "tokenizer_config.json", {"tokenizer_class": kind, "model_max_length": config.context, **ends}
        )


def tensors(params: Any, config: Config) -> dict[str, np.ndarray]:
    """Parameters under Hugging Face's names, float32 on the host; the vocabulary without its padding."""
    flat = dict(zip(leaf_paths(params), map(np.asarray, jax.tree.leaves(params)), strict=True))
    flat["wte"] = flat["wte"][: config.vocab]
    return {PREFIX + name: flat[path] if layer is None else flat[path][layer] for path, layer, name in names(config)}


def tokenizer_file(tokenizer: Tokenizer) -> str:
    """A tokenizer.json that gives the same numbers."""
    if isinstance(tokenizer, Bpe):
        return tokenizer.text
    if isinstance(tokenizer, Characters):
        library = Library(models.WordLevel({each: number for number, each in enumerate(tokenizer.alphabet)}))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
    else:
        library = Library(models.BPE({_byte(number): number for number in range(256)}, []))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    return library.to_str()


def _byte(number: int) -> str:
    """The visible character that stands for a byte in a byte-level vocabulary (GPT-2's encoder.py).

    Those that are visible in Latin-1 stand for themselves; the others are counted up from 256.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(number if number in visible else 256 + number - sum(each < number for each in visible))


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
