"""Text to token numbers and back: characters, bytes, or GPT-2's byte-pair encoding (Radford et al. 2019, section 2.2).

The tokenizers library does byte-pair encoding. Added here: one fingerprint for the same tokenizer in different files,
and encoding in pieces that gives the tokens of the whole text.
"""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from tpuswarm.errors import InputError
from tpuswarm.recipes.language.config import Kind
from tpuswarm.train.data.contents import report_open

CODE_POINT_COUNT = 0x110000
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
MIN_BPE_VOCAB = 257
"""The bytes and `<|endoftext|>`."""
CHUNK_CHARS = 2**16
"""Length of the pieces that the library encodes in parallel."""
UNTIL_BORDER = re.compile(r".*\S(?=[ \n])", re.DOTALL)
LINE_BORDER = re.compile(r".*\S\n(?=\S)", re.DOTALL)
"""One line break between visible characters: patterns look ahead in longer white space."""
GUARD = "a\n"
CHUNKS_AT_ONCE = 64
PREPENDS = re.compile(r'"type": "Prepend"|"prepend_scheme": "(first|always)"|"add_prefix_space": true')
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")
"""Of GPT-2, Qwen, OLMo and SmolLM; Llama 3; Gemma; Llama 2 and Mistral."""


class Tokenizer(Protocol):
    """A tokenizer as the data and the sampler use it.

    key: distinguishes tokenizers of one kind: the alphabet, the fingerprint of a BPE, or empty for bytes.
    """

    vocab: int
    kind: Kind
    key: str

    def encode(self, text: str) -> np.ndarray:
        """Return token numbers. Raises InputError for text outside the vocabulary."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token numbers."""
        ...


class Bytes:
    """The 256 bytes of UTF-8; encodes any text."""

    kind: Kind = "bytes"
    key = ""
    vocab = 256

    def encode(self, text: str) -> np.ndarray:
        """Return uint8 token numbers."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: list[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token & 0xFF for token in tokens).decode(errors="replace")


class Characters:
    """One token for each character of an alphabet, in its order."""

    kind: Kind = "characters"

    def __init__(self, alphabet: str):
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise InputError(f"an alphabet needs characters, each once; got {len(alphabet)}")
        self.key = self.alphabet = alphabet
        self.vocab = len(alphabet)
        self._number = np.full(CODE_POINT_COUNT, -1, np.int32)
        self._number[_code_points(alphabet)] = np.arange(len(alphabet))

    def encode(self, text: str) -> np.ndarray:
        """Return int32 token numbers. Raises InputError naming the characters outside the alphabet."""
        points = _code_points(text)
        numbers: np.ndarray = self._number[points]
        if numbers.size and numbers.min() < 0:
            unknown = Counter(chr(point) for point in points[numbers < 0])
            shown = " ".join(repr(character) for character, _ in unknown.most_common(5))
            raise InputError(
                f"the text has characters outside this model's alphabet of {self.vocab}: {shown} ({len(unknown)} in "
                "all); remove them, or train with --tokenizer bytes"
            )
        return numbers

    def decode(self, tokens: list[int]) -> str:
        """Return the text; numbers beyond the alphabet become U+FFFD."""
        return "".join(self.alphabet[token] if token < self.vocab else "\ufffd" for token in tokens)


class AlphabetCount:
    """Collects the characters of a text given in pieces."""

    def __init__(self) -> None:
        self._seen = np.zeros(CODE_POINT_COUNT, bool)

    def add(self, text: str) -> None:
        self._seen[_code_points(text)] = True

    def alphabet(self) -> str:
        """Return all characters seen, sorted."""
        return "".join(chr(point) for point in np.flatnonzero(self._seen))


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


class Bpe:
    """The BPE of a tokenizer.json; encodes any text."""

    kind: Kind = "bpe"

    def __init__(self, text: str, name: str):
        """Read `text`, the content of a tokenizer.json; `name` stands for it in errors.

        Raises InputError for another kind of tokenizer.
        """
        try:
            self._library = Library.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise InputError(f"{name} is not a tokenizer: {error}") from error
        facts = json.loads(self._library.to_str())  # adds settings that older files leave out
        if reason := _problem(facts):
            raise InputError(f"{name} cannot be used: {reason}")
        self._is_gpt2s = _splits_like_gpt2(facts)
        self._split: Callable[[Iterable[str]], Iterator[str]] = split_at_words
        if not self._is_gpt2s:
            self._split = split_at_lines if _has_borders_at_lines(facts) else join_pieces
        # What is put before a text would be put before each piece: a line before it takes that, and is dropped.
        self._guard = GUARD if PREPENDS.search(json.dumps([facts["normalizer"], facts["pre_tokenizer"]])) else ""
        self._guard_tokens = len(self._library.encode(self._guard, add_special_tokens=False).ids) if self._guard else 0
        self._library.no_truncation()
        self._library.no_padding()
        self.text = text
        self.key = _fingerprint(facts) if self._is_gpt2s else _digest(json.loads(text))
        self.vocab = max(self._library.get_vocab().values()) + 1
        special = {token["content"] for token in facts["added_tokens"]}
        self.end_text = next((each for each in ENDS_OF_TEXT if each in special), "")
        """Stands between documents; empty if there is none."""
        names = [re.escape(token["content"]) for token in facts["added_tokens"] if token["special"]]
        self.special_tokens = re.compile(f"(?:{'|'.join(names)})" if names else "(?!)")
        self.begin_text = "" if self._is_gpt2s else self._begin_text()
        """Stands before each document; empty if there is none."""
        self.end = self._library.token_to_id(self.end_text) if self.end_text else None

    def _begin_text(self) -> str:
        encoding = self._library.encode("a")
        marks = zip(encoding.tokens, encoding.special_tokens_mask, strict=True)
        return "".join(token for token, _ in itertools.takewhile(lambda pair: pair[1], marks))

    def encode(self, text: str) -> np.ndarray:
        """Return uint32 token numbers; the end of text and other special tokens in the text are one token each."""
        return np.concatenate([np.zeros(0, np.uint32), *self.encode_pieces([text])])

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield uint32 token numbers that, joined, are those of the whole text, however it is cut into pieces."""
        small = (piece[at : at + CHUNK_CHARS] for piece in pieces for at in range(0, len(piece), CHUNK_CHARS))
        chunks, guard = self._split(small), ""
        while batch := list(itertools.islice(chunks, CHUNKS_AT_ONCE)):
            texts = [guard + batch[0], *(self._guard + chunk for chunk in batch[1:])]
            for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoding.ids[self._guard_tokens if guard else 0 :], np.uint32)
                guard = self._guard

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return of each text its uint32 token numbers, and the first character and the one behind each: int[N, 2]."""
        encodings = self._library.encode_batch(texts, add_special_tokens=False)
        return [(np.array(each.ids, np.uint32), np.array(each.offsets).reshape(-1, 2)) for each in encodings]

    def decode(self, tokens: list[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD, numbers beyond the vocabulary nothing."""
        return self._library.decode([token for token in tokens if token < self.vocab], skip_special_tokens=False)


def split_at_words(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text anew into pieces whose tokens, joined, are the tokens of the whole text.

    A piece ends before a space or line break that follows a visible character. GPT-2's pattern never matches across
    such a place, and no match depends on the text behind it.
    """
    return _cut_at(UNTIL_BORDER, pieces)


def _cut_at(border: re.Pattern[str], pieces: Iterable[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        searched = max(len(rest) - 2, 0)
        rest += piece
        if found := border.match(rest, searched):
            yield rest[: found.end()]
            rest = rest[found.end() :]
    if rest:
        yield rest


def split_at_lines(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text anew where one line break stands between visible characters."""
    return _cut_at(LINE_BORDER, pieces)


def join_pieces(pieces: Iterable[str]) -> Iterator[str]:
    yield "".join(pieces)


def train_bpe(pieces: Iterable[str], vocab: int) -> Bpe:
    """Train a tokenizer of at most `vocab` tokens; it depends on the text alone, however it is cut.

    Raises InputError if `vocab` is too small for the bytes.
    """
    if vocab < MIN_BPE_VOCAB:
        raise InputError(
            f"a BPE needs a vocabulary of at least {MIN_BPE_VOCAB}, not {vocab}: the bytes and {END_OF_TEXT}"
        )
    library = _byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=alphabet, special_tokens=[END_OF_TEXT], show_progress=False
    )
    library.train_from_iterator(split_at_words(pieces), trainer)
    return Bpe(library.to_str(), "the trained tokenizer")


def read_bpe(path: Path) -> Bpe:
    """Read a tokenizer.json. Raises InputError if it cannot be used."""
    try:
        return Bpe(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a tokenizer: {error}") from error


def read_gpt2_files(vocab: Path, merges: Path) -> Bpe:
    """Read a vocab.json and a merges.txt, as GPT-2 was released."""
    report_open(vocab)
    report_open(merges)
    try:
        library = _byte_level(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises Exception itself
        raise InputError(f"{vocab} and {merges.name} are not a tokenizer: {error}") from error
    if library.token_to_id(END_OF_TEXT) is not None:
        library.add_special_tokens([END_OF_TEXT])
    return Bpe(library.to_str(), str(vocab))


def export_tokenizer(tokenizer: Tokenizer) -> str:
    """Return the content of a tokenizer.json that gives the same numbers."""
    if isinstance(tokenizer, Bpe):
        return tokenizer.text
    if isinstance(tokenizer, Characters):
        numbers = {character: number for number, character in enumerate(tokenizer.alphabet)}
        library = Library(models.WordLevel(numbers))
        library.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        library.decoder = decoders.Fuse()
    else:
        library = _byte_level(models.BPE({_byte_character(number): number for number in range(256)}, []))
    return library.to_str()


def _byte_level(model: models.Model) -> Library:
    library = Library(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _byte_character(number: int) -> str:
    # GPT-2's encoder.py: visible Latin-1 characters stand for themselves, the other bytes are counted up from 256.
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(number if number in visible else 256 + number - sum(other < number for other in visible))


def _problem(facts: dict[str, Any]) -> str | None:
    """Return why a tokenizer.json cannot be used; None if it always gives the same tokens and loses no text."""
    model = facts["model"]
    if (kind := model.get("type", "BPE")) != "BPE":
        return f"its model is {kind}, not BPE"
    if model.get("dropout"):
        return f"it has dropout {model['dropout']}"
    if model.get("byte_fallback"):
        needed = {f"<0x{byte:02X}>" for byte in range(256)}
    elif '"ByteLevel"' in json.dumps([facts["normalizer"], facts["pre_tokenizer"]]):
        needed = set(pre_tokenizers.ByteLevel.alphabet())
    else:
        return "it does not work on bytes, so it would lose the characters that it does not know"
    if missing := needed - model["vocab"].keys():
        return f"{len(missing)} of the 256 bytes have no token, so it would silently drop text"
    return None


def _splits_like_gpt2(facts: dict[str, Any]) -> bool:
    """Whether `split_at_words` cuts a text right for it."""
    model, cut = facts["model"], facts["pre_tokenizer"] or {}
    changes = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    if any(model.get(name) for name in changes) or facts["normalizer"]:
        return False
    if cut.get("type") != "ByteLevel" or cut.get("add_prefix_space") or not cut.get("use_regex", True):
        return False
    return not any(
        token["lstrip"] or token["rstrip"] or token["single_word"] or re.search(r"\s", token["content"])
        for token in facts["added_tokens"]
    )


def _has_borders_at_lines(facts: dict[str, Any]) -> bool:
    """Whether merges never cross from a line break to a visible character, as no token of the vocabulary does."""
    line_break, *spaces = (_byte_character(ord(space)) for space in "\n\r\t ")
    crossing = re.compile(rf"[\n{line_break}][^\s\u2581{line_break}{''.join(spaces)}]")
    words = itertools.chain(facts["model"]["vocab"], (token["content"] for token in facts["added_tokens"]))
    return not any(crossing.search(word) for word in words)


def _digest(facts: dict[str, Any]) -> str:
    """Return the SHA-256 of what decides the numbers in a tokenizer.json, as the file says it."""
    names = ("normalizer", "pre_tokenizer", "model", "added_tokens", "post_processor")
    return hashlib.sha256(json.dumps([facts.get(name) for name in names], sort_keys=True).encode()).hexdigest()


def _fingerprint(facts: dict[str, Any]) -> str:
    # SHA-256 of everything that decides the numbers, in one form for all file versions
    model = facts["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    added = sorted((token["id"], token["content"]) for token in facts["added_tokens"])
    vocab = sorted(model["vocab"].items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps([vocab, merges, added]).encode()).hexdigest()
