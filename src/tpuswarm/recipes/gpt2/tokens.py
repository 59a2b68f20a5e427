"""Text as a memory map of token numbers, made once, and rows of it in a seeded infinite order."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.bpe import END, FILE, Bpe, read_bpe, train_bpe, whole_words
from tpuswarm.recipes.gpt2.config import Kind
from tpuswarm.recipes.gpt2.text import Advance, Text, open_text
from tpuswarm.recipes.gpt2.tokenizer import AlphabetCount, Bytes, Characters, Tokenizer
from tpuswarm.recipes.prepared import ABOUT, about, is_made, make, share
from tpuswarm.train.data.contents import contents_digest
from tpuswarm.train.data.source import shuffled_epochs
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import cache_folder

HELD_OUT = 0.1
"""Share of the tokens that is held out where nobody says, as nanoGPT does."""


@dataclass(frozen=True)
class Tokens:
    """A tokenised text: `array` is memory-mapped, `digest` the SHA-256 of its numbers."""

    array: np.ndarray
    digest: str
    tokenizer: Tokenizer
    folder: Path
    """Where its files lie."""


class Reading(NamedTuple):
    """How documents become one text."""

    field: str | None = "text"
    """Where the text is in the objects of JSON lines; None: these are read as they are."""
    ends: bool | None = None
    """Whether `<|endoftext|>` is put between documents; None: where the tokenizer has it."""


def prepare_tokens(
    place: str | None,
    kind: Kind,
    *,
    given: Tokenizer | None = None,
    key: str | None = None,
    vocab: int = 0,
    reading: Reading = Reading(),  # noqa: B008  # a tuple
) -> Tokens:
    """The memory map of the text at `place`, made in the user's cache if it is not there yet.

    Two processes may do it at once: each writes a folder of its own and the first to finish gives it its name. Without
    a tokenizer `given`, that of the text is made: its characters, or a BPE of at most `vocab` tokens; InputError if
    `key` is given and it comes out as another. A folder that `share_tokens` filled is taken as it is.
    """
    key = given.key if given else key
    if place is not None and "://" not in place and (Path(place) / "tokens.bin").is_file() and is_made(Path(place)):
        folder = Path(place)
    else:
        text = open_text(place, reading.field)
        folder = _folder(text, kind, vocab, None, reading)
        if given and not (is_made(folder) and about(folder)["key"] == given.key):
            folder = _folder(text, kind, vocab, given.key, reading)
        if not is_made(folder):
            make(folder, lambda making: _write(making, text, kind, given, vocab, reading))
    tokens = _open(folder)
    if key is not None and tokens.tokenizer.key != key:
        raise InputError(
            f"a BPE trained on {place} ({tokens.tokenizer.key[:12]}…) is not the tokenizer asked for ({key[:12]}…), "
            f"which is {FILE} in the folder of the run trained with it"
        )
    return tokens


def share_tokens(tokens: Tokens, folder: Path) -> None:
    """Put tokens into a folder, as files that `prepare_tokens` takes."""
    share(tokens.folder, folder, "tokens.bin", *([FILE] if isinstance(tokens.tokenizer, Bpe) else []))


def _open(folder: Path) -> Tokens:
    said = about(folder)
    found = contents_digest(folder / "tokens.bin")
    if found != said["digest"]:
        raise InputError(
            f"{folder / 'tokens.bin'} is not what was written there: its digest is {found[:12]}…, not "
            f"{said['digest'][:12]}…; delete {folder} and start again: it is made anew from the text"
        )
    array = np.memmap(folder / "tokens.bin", dtype=said["dtype"], mode="r", shape=(said["count"],))
    tokenizer: Tokenizer
    if said["kind"] == "bpe":
        tokenizer = read_bpe(folder / FILE)
    else:
        tokenizer = Bytes() if said["kind"] == "bytes" else Characters(said["key"])
    return Tokens(array, said["digest"], tokenizer, folder)


def _folder(text: Text, kind: Kind, vocab: int, key: str | None, reading: Reading) -> Path:
    ends = [reading.ends] * (kind == "bpe" and text.parted)
    marks = [text.key, kind, vocab if kind == "bpe" and key is None else 0, key, *ends]
    return cache_folder("tokens") / hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:32]


def _write(folder: Path, text: Text, kind: Kind, given: Tokenizer | None, vocab: int, reading: Reading) -> None:
    passes = 1 + (kind != "bytes" and given is None)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        bar = bars.add_task(f"tokenising {text.name}", total=sum(text.sizes) * passes)

        def advance(count: int) -> None:
            bars.advance(bar, count)

        tokenizer = given or _tokenizer_of(text, kind, vocab, advance)
        dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
        digest, count = hashlib.sha256(), 0
        with (folder / "tokens.bin").open("wb") as file:
            for numbers in _numbers(text, tokenizer, _end(text, tokenizer, reading), advance):
                data = numbers.astype(dtype).tobytes()
                digest.update(data)
                file.write(data)
                count += len(numbers)
            file.flush()
            os.fsync(file.fileno())
    if isinstance(tokenizer, Bpe):
        write_atomically(folder / FILE, tokenizer.text)
    said = {
        "kind": kind, "key": tokenizer.key, "dtype": dtype.name, "count": count, "digest": digest.hexdigest()
    }  # fmt: skip
    write_atomically(folder / ABOUT, json.dumps(said))


def _tokenizer_of(text: Text, kind: Kind, vocab: int, advance: Advance) -> Tokenizer:
    if kind == "bytes":
        return Bytes()
    if kind == "bpe":
        return train_bpe(text.pieces(advance), vocab)
    seen = AlphabetCount()
    for piece in text.pieces(advance):
        seen.add(piece)
    return Characters(seen.alphabet())


def _end(text: Text, tokenizer: Tokenizer, reading: Reading) -> str:
    """What is put between two documents; its token is found in the text as any other."""
    has = isinstance(tokenizer, Bpe) and tokenizer.end is not None
    if reading.ends and not has and text.parted:
        raise InputError(f"this tokenizer ({tokenizer.kind}) has no {END}; use --separator none or another --tokenizer")
    return END if has and reading.ends is not False else ""


def _numbers(text: Text, tokenizer: Tokenizer, end: str, advance: Advance) -> Iterator[np.ndarray]:
    if tokenizer.kind == "bytes":
        for raw in text.raw_pieces(advance):
            yield np.frombuffer(raw, np.uint8)
    else:
        pieces = text.pieces(advance, end)
        for piece in whole_words(pieces) if tokenizer.kind == "bpe" else pieces:
            yield tokenizer.encode(piece)


class TokenSource:
    """Rows of context + 1 tokens: `{"tokens": int32 (count, context + 1)}`.

    An epoch cuts the text into windows from a random shift on and gives each once, in an order of its own; every
    token but those at the ends is a target once an epoch.
    """

    def __init__(self, array: np.ndarray, context: int, seed: int, digest: str, name: str):
        length = len(array)
        if length < context + 1:
            raise InputError(
                f"{name} has {length} tokens, fewer than one row of context {context} + 1; "
                "use more text or a smaller --context"
            )
        self._array, self._seed, self.digest = array, seed, digest
        self._window, self._places = context, np.arange(context + 1)
        self.rows_per_epoch = max(1, (length - context - 1) // context)
        self._shifts = min(length - 1 - self.rows_per_epoch * context, context) + 1

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Rows start to start + count of the order."""
        parts = [
            window * self._window + _shift(self._seed, epoch, self._shifts)
            for epoch, window in shuffled_epochs(start, count, self.rows_per_epoch, self._seed)
        ]
        first = np.concatenate(parts)
        return {"tokens": self._array[first[:, None] + self._places].astype(np.int32)}


@lru_cache(maxsize=4)
def _shift(seed: int, epoch: int, shifts: int) -> int:
    return int(np.random.default_rng([seed, epoch, 1]).integers(shifts))


class FakeTokens:
    """Random tokens of a vocabulary, for trying a machine without any data."""

    rows_per_epoch = 10_000

    def __init__(self, vocab: int, context: int, seed: int):
        self._vocab, self._context, self._seed = vocab, context, seed
        self.digest = f"fake-{vocab}-{context}-{seed}"

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Rows start to start + count of the order."""
        rows = [
            np.random.default_rng([self._seed, row]).integers(self._vocab, size=self._context + 1, dtype=np.int32)
            for row in range(start, start + count)
        ]
        return {"tokens": np.stack(rows)}


def split_tokens(array: np.ndarray, split: str, held_out: float = HELD_OUT) -> np.ndarray:
    """The part of a token array that is `train`, `validation` (the last `held_out` of it) or `all`."""
    cut = len(array) - int(len(array) * held_out)
    parts = {"train": array[:cut], "validation": array[cut:], "all": array}
    return parts[split]
