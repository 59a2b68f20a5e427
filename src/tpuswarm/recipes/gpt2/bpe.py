"""Byte-level byte-pair encoding, GPT-2's kind (Radford et al. 2019, section 2.2), trained here or read from files.

The tokenizers library does the work. What is added: one fingerprint for the same tokenizer in different files, and
text in pieces that gives the tokens of the whole.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.config import Kind

FILE = "tokenizer.json"
END = "<|endoftext|>"
SMALLEST = 257
"""The bytes and `<|endoftext|>`."""
CHUNK = 2**16
"""Characters that the library is given at a time; it works on many chunks at once."""
UNTIL_BORDER = re.compile(r".*\S(?=[ \n])", re.DOTALL)


class Bpe:
    """A tokenizer.json of GPT-2's kind; writes any text."""

    kind: Kind = "bpe"

    def __init__(self, text: str, name: str):
        """`text` is that of a tokenizer.json, `name` what errors call it; InputError for one of another kind."""
        try:
            self._library = Library.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"{name} is not a tokenizer: {error}") from error
        facts = json.loads(self._library.to_str())  # with what older files leave out
        if reason := _unlike(facts):
            raise InputError(f"{name} is not a byte-level BPE like GPT-2's: {reason}")
        self._library.no_truncation()
        self._library.no_padding()
        self.text = text
        self.key = _fingerprint(facts)
        self.vocab = max(self._library.get_vocab().values()) + 1
        self.end = self._library.token_to_id(END)

    def encode(self, text: str) -> np.ndarray:
        """uint32 token numbers; `<|endoftext|>` in the text is one token."""
        chunks = whole_words(text[start : start + CHUNK] for start in range(0, len(text), CHUNK))
        found = self._library.encode_batch_fast(list(chunks), add_special_tokens=False)
        return np.concatenate([np.zeros(0, np.uint32), *(np.array(each.ids, np.uint32) for each in found)])

    def decode(self, tokens: list[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, numbers beyond the vocabulary nothing."""
        return self._library.decode([token for token in tokens if token < self.vocab], skip_special_tokens=False)


def whole_words(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in pieces whose tokens, one piece after the other, are those of the whole.

    They end before a space or line's end that follows a visible character: GPT-2's pattern never matches across that
    place, and no match depends on what is behind it.
    """
    rest = ""
    for piece in pieces:
        searched = max(len(rest) - 1, 0)
        rest += piece
        if border := UNTIL_BORDER.match(rest, searched):
            yield rest[: border.end()]
            rest = rest[border.end() :]
    if rest:
        yield rest


def train_bpe(pieces: Iterable[str], vocab: int) -> Bpe:
    """A tokenizer of at most `vocab` tokens for a text; the same text gives the same one, however it is cut.

    Raises InputError for a vocabulary that does not hold the bytes.
    """
    if vocab < SMALLEST:
        raise InputError(f"a BPE needs a vocabulary of at least {SMALLEST}, not {vocab}: the bytes and {END}")
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    library.train_from_iterator(whole_words(pieces), trainer)
    return Bpe(library.to_str(), "the trained tokenizer")


def read_bpe(path: Path) -> Bpe:
    """The tokenizer in a file; InputError where there is none of GPT-2's kind."""
    try:
        return Bpe(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a tokenizer: {error}") from error


def read_gpt2_files(vocab: Path, merges: Path) -> Bpe:
    """The tokenizer in a vocab.json and a merges.txt, as GPT-2 was released."""
    try:
        library = Library(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises Exception itself
        raise InputError(f"{vocab} and {merges.name} are not a tokenizer: {error}") from error
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    if library.token_to_id(END) is not None:
        library.add_special_tokens([END])
    return Bpe(library.to_str(), str(vocab))


def _unlike(facts: dict[str, Any]) -> str | None:
    """What makes a tokenizer.json another kind than GPT-2's, of which `whole_words` would not be true."""
    model, cut = facts["model"], facts["pre_tokenizer"] or {}
    if model.get("type", "BPE") != "BPE":
        return f"its model is {model['type']}"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges"):
        if model.get(name):
            return f"it has {name} {model[name]}"
    if facts["normalizer"]:
        return f"it normalizes the text first, with {facts['normalizer'].get('type')}"
    if cut.get("type") != "ByteLevel" or cut.get("add_prefix_space") or not cut.get("use_regex", True):
        return f"it splits text with {json.dumps(cut)[:100]}"
    if missing := set(pre_tokenizers.ByteLevel.alphabet()) - model["vocab"].keys():
        return f"{len(missing)} of the 256 bytes have no token, so it would silently drop text"
    for token in facts["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"] or re.search(r"\s", token["content"]):
            return f"its token {token['content']!r} strips spaces or matches whole words only"
    return None


def _fingerprint(facts: dict[str, Any]) -> str:
    """SHA-256 of what decides the numbers, however a file writes it down."""
    model = facts["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    added = sorted((token["id"], token["content"]) for token in facts["added_tokens"])
    vocab = sorted(model["vocab"].items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps([vocab, merges, added]).encode()).hexdigest()
