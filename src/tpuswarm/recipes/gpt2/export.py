"""Export a GPT-2 in the form of Hugging Face's transformers."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpuswarm.recipes.gpt2.config import Config
from tpuswarm.recipes.gpt2.pretrained import PREFIX, SIZE_KEYS, SUPPORTED, tensor_names
from tpuswarm.recipes.language.tokenizer import END_OF_TEXT, TOKENIZER_FILE, Bpe, Tokenizer, export_tokenizer
from tpuswarm.recipes.language.weight_files import save_tensors
from tpuswarm.train.paths import leaf_paths


def write(params: Any, config: Config, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write model.safetensors, config.json and the tokenizer's files. Raises OSError if the disk is full."""
    found = tensors(params, config)
    save_tensors(folder, {name: tensor.nbytes for name, tensor in found.items()}, found.__getitem__)
    end = tokenizer.end if isinstance(tokenizer, Bpe) else None
    facts: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for ours, theirs in SIZE_KEYS.items()},
        **{name: values[0] for name, values in SUPPORTED.items()},
        **{name: config.dropout for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")},
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
    }
    _write_json(folder / "config.json", facts)
    if tokenizer is not None:
        (folder / TOKENIZER_FILE).write_text(export_tokenizer(tokenizer), encoding="utf-8")
        ends = {} if end is None else {name: END_OF_TEXT for name in ("bos_token", "eos_token", "unk_token")}
        kind = "PreTrainedTokenizerFast" if end is None else "GPT2Tokenizer"
        _write_json(
            folder / "tokenizer_config.json", {"tokenizer_class": kind, "model_max_length": config.context, **ends}
        )


def tensors(params: Any, config: Config) -> dict[str, np.ndarray]:
    """Return parameters under Hugging Face's names, float32 on the host; the vocabulary without padding."""
    flat = dict(zip(leaf_paths(params), map(np.asarray, jax.tree.leaves(params)), strict=True))
    flat["wte"] = flat["wte"][: config.vocab]
    return {
        PREFIX + name: flat[path] if layer is None else flat[path][layer] for path, layer, name in tensor_names(config)
    }


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
