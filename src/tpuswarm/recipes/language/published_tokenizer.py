"""Read the tokenizer of a published model."""

import json
from pathlib import Path

from tpuswarm.recipes.language.hub import Published
from tpuswarm.recipes.language.tokenizer import TOKENIZER_FILE, Bpe, Characters, read_bpe, read_gpt2_files


def read_tokenizer(place: Published) -> Bpe | Characters | None:
    """Read a model's tokenizer: like GPT-2's, or the characters of our export; None if it has none."""
    path = place.find(TOKENIZER_FILE)
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
    except (OSError, ValueError, KeyError, TypeError):  # read_bpe names the problem
        return None
