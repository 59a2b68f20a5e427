"""A memory map of a text's token numbers, made once, and its rows in a seeded infinite order."""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tpuswarm.errors import InputError
from tpuswarm.recipes.language.config import Kind
from tpuswarm.recipes.language.nanogpt import TRAIN_FILE, VALIDATION_FILE, TokenFiles, find_token_files
from tpuswarm.recipes.language.text import Advance, Text, open_text
from tpuswarm.recipes.language.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    AlphabetCount,
    Bpe,
    Bytes,
    Characters,
    Tokenizer,
    read_bpe,
    train_bpe,
)
from tpuswarm.recipes.prepared import (
    DESCRIPTION,
    cached_folder,
    copy_files,
    is_complete,
    read_description,
    write_once,
)
from tpuswarm.train.data.contents import contents_digest
from tpuswarm.train.data.remote_files import READ_AHEAD_ROWS, RemoteArray, find_remote
from tpuswarm.train.data.source import shuffled_epochs
from tpuswarm.train.process.atomic import write_atomically

if TYPE_CHECKING:
    from tpuswarm.recipes.language.chat.template import ChatTemplate

TOKENS_FILE = "tokens.bin"
CACHE = "tokens"
"""Name of the folder in the user's cache."""


@dataclass(frozen=True)
class Tokens:
    """A tokenised text: `array` is memory-mapped, `digest` is the SHA-256 of its numbers.

    held_out: the last tokens that the data itself holds out; None if it does not.
    """

    array: np.ndarray
    digest: str
    tokenizer: Tokenizer
    folder: Path
    held_out: int | None = None


class Reading(NamedTuple):
    """How documents become one text.

    field: the field with the text in JSON lines; None reads them as plain text. ends: whether `<|endoftext|>` separates
    documents; None: if the tokenizer has it. template: for lines that hold conversations, reads the chat template.
    """

    field: str | None = "text"
    ends: bool | None = None
    template: "Callable[[], ChatTemplate | None] | None" = None


def prepare_tokens(
    place: str | None,
    kind: Kind,
    *,
    given: Tokenizer | None = None,
    key: str | None = None,
    vocab: int = 0,
    reading: Reading = Reading(),  # noqa: B008  # a tuple
) -> Tokens:
    """Return the memory map of the text at `place`; it is made in the user's cache if it is not there yet.

    Two processes may make it at once; the first one's stays. Without `given`, the tokenizer is made from the text: its
    characters, or a BPE of at most `vocab` tokens. Raises InputError if its key is not the given `key`. place may also
    be a folder that `share_tokens` filled.
    """
    key = given.key if given else key
    if place is not None and "://" not in place and _has_tokens(Path(place)):
        folder = Path(place)
    else:
        text = open_text(place, reading.field)
        if token_files := find_token_files(text):
            given = token_files.tokenizer(kind, given)
        if reading.template and not isinstance(given, Bpe):
            raise InputError(
                f"{place} holds conversations, which need a published tokenizer: use --tokenizer hf:ORG/NAME or hf:DIR"
            )
        template = reading.template() if reading.template else None
        cached = _folder(text, kind, vocab, None, reading, template)
        if given and not (cached and is_complete(cached) and read_description(cached)["key"] == given.key):
            cached = _folder(text, kind, vocab, given.key, reading, template)
        if cached and is_complete(cached):
            folder = cached
        else:
            folder = write_once(
                cached, CACHE, lambda partial: _write(partial, text, token_files, kind, given, vocab, reading, template)
            )
    tokens = _open(folder)
    if key is not None and tokens.tokenizer.key != key:
        raise InputError(
            f"a BPE trained on {place} ({tokens.tokenizer.key[:12]}…) is not the tokenizer asked for ({key[:12]}…), "
            f"which is {TOKENIZER_FILE} in the folder of the run trained with it"
        )
    return tokens


def share_tokens(tokens: Tokens, folder: Path) -> None:
    """Copy tokens into a folder that `prepare_tokens` accepts."""
    copy_files(tokens.folder, folder, TOKENS_FILE, *([TOKENIZER_FILE] if isinstance(tokens.tokenizer, Bpe) else []))


def _has_tokens(folder: Path) -> bool:
    path = folder / TOKENS_FILE
    return (path.is_file() or find_remote(path) is not None) and is_complete(folder)


def _open(folder: Path) -> Tokens:
    facts, path = read_description(folder), folder / TOKENS_FILE
    remote = find_remote(path)
    if remote and facts["conversations"]:
        remote.whole()  # rows are found by reading all of it
        remote = None
    array: Any
    if remote:
        array = RemoteArray(remote, facts["dtype"], 0, facts["count"])
    else:
        digest = contents_digest(path)
        if digest != facts["digest"]:
            raise InputError(
                f"{path} has changed since it was written: its digest is {digest[:12]}…, not "
                f"{facts['digest'][:12]}…; delete {folder} and start again to rebuild it from the text"
            )
        array = np.memmap(path, dtype=facts["dtype"], mode="r", shape=(facts["count"],))
    tokenizer: Tokenizer
    if facts["kind"] == "bpe":
        tokenizer = read_bpe(folder / TOKENIZER_FILE)
    else:
        tokenizer = Bytes() if facts["kind"] == "bytes" else Characters(facts["key"])
    return Tokens(array, facts["digest"], tokenizer, folder, facts.get("held_out"))


def _folder(
    text: Text, kind: Kind, vocab: int, key: str | None, reading: Reading, template: "ChatTemplate | None"
) -> Path | None:
    if text.key is None:
        return None
    ends = [reading.ends] * (kind == "bpe" and text.has_documents)
    chat = [template.facts if template else None] if reading.template else []
    identity = [text.key, kind, vocab if kind == "bpe" and key is None else 0, key, *ends, *chat]
    return cached_folder(CACHE, json.dumps(identity))


def _write(
    folder: Path, text: Text, token_files: TokenFiles | None, kind: Kind, given: Tokenizer | None, vocab: int,
    reading: Reading, template: "ChatTemplate | None",
) -> None:  # fmt: skip
    passes = 1 + (kind != "bytes" and given is None)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        bar = bars.add_task(f"tokenising {text.name}", total=sum(text.sizes) * passes)

        def advance(count: int) -> None:
            bars.advance(bar, count)

        tokenizer = given or _tokenizer_of(text, kind, vocab, advance)
        dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
        if reading.template:
            from tpuswarm.recipes.language.chat.conversations import encode_conversations

            assert isinstance(tokenizer, Bpe)
            dtype, parts = np.dtype(np.uint32), [encode_conversations(text, template, tokenizer, advance)]
        elif token_files:
            parts = [token_files.numbers(name, tokenizer, advance) for name in (TRAIN_FILE, VALIDATION_FILE)]
        else:
            parts = [_numbers(text, tokenizer, _separator(text, tokenizer, reading), advance)]
        digest, counts = hashlib.sha256(), list[int]()
        with (folder / TOKENS_FILE).open("wb") as file:
            for part in parts:
                counts.append(0)
                for numbers in part:
                    data = numbers.astype(dtype).tobytes()
                    digest.update(data)
                    file.write(data)
                    counts[-1] += len(numbers)
            file.flush()
            os.fsync(file.fileno())
    if isinstance(tokenizer, Bpe):
        write_atomically(folder / TOKENIZER_FILE, tokenizer.text)
    facts = {
        "kind": kind, "key": tokenizer.key, "dtype": dtype.name, "count": sum(counts), "digest": digest.hexdigest(),
        "held_out": counts[-1] if token_files and all(counts) else None, "conversations": bool(reading.template),
    }  # fmt: skip
    write_atomically(folder / DESCRIPTION, json.dumps(facts))


def _tokenizer_of(text: Text, kind: Kind, vocab: int, advance: Advance) -> Tokenizer:
    if kind == "bytes":
        return Bytes()
    if kind == "bpe":
        return train_bpe(text.pieces(advance), vocab)
    characters = AlphabetCount()
    for piece in text.pieces(advance):
        characters.add(piece)
    return Characters(characters.alphabet())


def _separator(text: Text, tokenizer: Tokenizer, reading: Reading) -> str:
    end = tokenizer.end_text if isinstance(tokenizer, Bpe) else ""
    if reading.ends and not end and text.has_documents:
        raise InputError(
            f"this tokenizer ({tokenizer.kind}) has no {END_OF_TEXT}; use --separator none or another --tokenizer"
        )
    return end if reading.ends is not False else ""


def _numbers(text: Text, tokenizer: Tokenizer, end: str, advance: Advance) -> Iterator[np.ndarray]:
    if tokenizer.kind == "bytes":
        for raw in text.raw_pieces(advance):
            yield np.frombuffer(raw, np.uint8)
    elif isinstance(tokenizer, Bpe):
        begin = tokenizer.begin_text
        pieces = text.pieces(advance, end and end + begin)
        yield from tokenizer.encode_pieces(itertools.chain([begin] * bool(begin), pieces))
    else:
        yield from map(tokenizer.encode, text.pieces(advance, end))


class TokenSource:
    """Rows of context + 1 tokens: `{"tokens": int32 (count, context + 1)}`.

    An epoch cuts the text into windows from a random shift on and returns each once, shuffled. Every token, except near
    the ends of the text, is a target once an epoch.
    """

    def __init__(self, array: np.ndarray, context: int, seed: int, digest: str, name: str):
        length = len(array)
        if length < context + 1:
            raise InputError(
                f"{name} has {length} tokens, fewer than one row of context {context} + 1; "
                "use more text or a smaller --context"
            )
        self._array, self._seed, self.digest = array, seed, digest
        self._window, self._offsets = context, np.arange(context + 1)
        self.rows_per_epoch = max(1, (length - context - 1) // context)
        self._shifts = min(length - 1 - self.rows_per_epoch * context, context) + 1

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Return rows start to start + count of the order."""
        first = self._starts(start, count)
        if isinstance(self._array, RemoteArray):
            found = self._array.windows(first, len(self._offsets), self._starts(start + count, READ_AHEAD_ROWS))
        else:
            found = self._array[first[:, None] + self._offsets]
        return {"tokens": found.astype(np.int32)}

    def _starts(self, start: int, count: int) -> np.ndarray:
        """Return the first token of each row, int64[count]."""
        parts = [
            window * self._window + _shift(self._seed, epoch, self._shifts)
            for epoch, window in shuffled_epochs(start, count, self.rows_per_epoch, self._seed)
        ]
        return np.concatenate(parts)


@lru_cache(maxsize=4)
def _shift(seed: int, epoch: int, shifts: int) -> int:
    return int(np.random.default_rng([seed, epoch, 1]).integers(shifts))


class FakeTokens:
    """Random tokens, to try a machine without data."""

    def __init__(self, vocab: int, context: int, seed: int, is_held_out: bool):
        self._vocab, self._context, self._seed = vocab, context, seed + is_held_out
        # Few are held out, as their loss says nothing; most batches divide 192.
        self.rows_per_epoch = 192 if is_held_out else 10_000
        self.digest = f"fake-{vocab}-{context}-{self._seed}"

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Return rows start to start + count of the order."""
        rows = [
            np.random.default_rng([self._seed, row]).integers(self._vocab, size=self._context + 1, dtype=np.int32)
            for row in range(start, start + count)
        ]
        return {"tokens": np.stack(rows)}


def split_tokens(array: np.ndarray, split: str, held_out: int) -> np.ndarray:
    """Return the part `train`, `validation` (the last `held_out` tokens) or `all`."""
    cut = len(array) - held_out
    parts = {"train": array[:cut], "validation": array[cut:], "all": array}
    return parts[split]
