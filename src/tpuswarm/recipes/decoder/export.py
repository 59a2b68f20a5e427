"""Export a decoder in the form of Hugging Face's transformers."""

import json
from pathlib import Path
from typing import Any

from tpuswarm.recipes.decoder import weights
from tpuswarm.recipes.decoder.config import Config
from tpuswarm.recipes.language.chat.template import ChatTemplate
from tpuswarm.recipes.language.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Bpe, Tokenizer, export_tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "smollm3": "SmolLM3ForCausalLM",
}  # fmt: skip


def write(
    params: Any, config: Config, facts: dict[str, Any], tokenizer: Tokenizer | None, folder: Path,
    template: ChatTemplate | None = None,
) -> None:  # fmt: skip
    """Write the weights, config.json and the tokenizer. facts: the config.json that gave the shape.

    Raises OSError if the disk is full.
    """
    weights.save(params, config, folder)
    end = tokenizer.end if isinstance(tokenizer, Bpe) else None
    ours = {"architectures": [ARCHITECTURES[facts["model_type"]]], "dtype": "float32", "vocab_size": config.vocab}
    _write_json(folder / "config.json", {"bos_token_id": None, "eos_token_id": end, **facts, **ours})
    write_tokenizer(tokenizer, config, folder, template)


def write_tokenizer(
    tokenizer: Tokenizer | None, config: Config, folder: Path, template: ChatTemplate | None = None
) -> None:
    """Write a tokenizer and its chat template, if there are any, for transformers."""
    if tokenizer is not None:
        (folder / TOKENIZER_FILE).write_text(export_tokenizer(tokenizer), encoding="utf-8")
        names = {"eos_token": tokenizer.end_text} if isinstance(tokenizer, Bpe) and tokenizer.end_text else {}
        if isinstance(tokenizer, Bpe) and tokenizer.begin_text:
            names["bos_token"] = tokenizer.begin_text
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context, **names}
        _write_json(folder / TOKENIZER_CONFIG_FILE, about | (template.facts if template else {}))


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
