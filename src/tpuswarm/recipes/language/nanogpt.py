"""Read the tokens that nanoGPT's prepare.py writes: train.bin and val.bin, with the characters in meta.pkl."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from tpuswarm.errors import InputError, first_line
from tpuswarm.recipes.language.config import Kind
from tpuswarm.recipes.language.text import Advance, Text, input_errors
from tpuswarm.recipes.language.tokenizer import Characters, Tokenizer

TRAIN_FILE, VALIDATION_FILE, META_FILE = "train.bin", "val.bin", "meta.pkl"
DTYPE = np.dtype("<u2")
PIECE_BYTES = 2**22


@dataclass(frozen=True)
class TokenFiles:
    """The files of one prepared data set, by name; `text` has others too."""

    text: Text
    paths: dict[str, str]

    def tokenizer(self, kind: Kind, known: Tokenizer | None) -> Tokenizer:
        """Return the tokenizer of these tokens. Raise InputError if it is not the model's."""
        place = self.text.name
        if META_FILE not in self.paths:
            if known is None or kind != "bpe":
                raise InputError(
                    f"{place} has tokens without {META_FILE}, so not of {kind}; name their tokenizer, for example "
                    "--tokenizer gpt2, or give the folder that has all files"
                )
            return known
        found = self._read_characters()
        if kind != "characters":
            raise InputError(
                f"{place} has tokens of characters (by {META_FILE}), not of {kind}; use --tokenizer characters"
            )
        if known is not None and known.key != found.key:
            raise InputError(
                f"{place} has an alphabet of {found.vocab} characters, another one than this model's of {known.vocab}; "
                "give the text itself"
            )
        return found

    def numbers(self, name: str, tokenizer: Tokenizer, advance: Advance) -> Iterator[np.ndarray]:
        """Yield the tokens of a file. Raise InputError for tokens that the tokenizer does not have."""
        if name not in self.paths:
            return
        path = self.paths[name]
        with self.text.open(path, advance) as file:
            while raw := file.read(PIECE_BYTES):
                if len(raw) % DTYPE.itemsize:
                    raise InputError(f"{path} is cut off: it has an odd number of bytes, not tokens of 2 bytes each")
                tokens = np.frombuffer(raw, DTYPE)
                if tokens.max() >= tokenizer.vocab:
                    raise InputError(
                        f"{path} has the token {tokens.max()}, but this tokenizer ({tokenizer.kind}) has "
                        f"{tokenizer.vocab}; use the --tokenizer that made {name}"
                    )
                yield tokens

    def _read_characters(self) -> Characters:
        path = self.paths[META_FILE]
        with input_errors(path), self.text.system.open(path, "rb") as file:
            try:
                found = _PlainUnpickler(file).load()["itos"]
                characters = [found[number] for number in range(len(found))]
                if any(len(character) != 1 for character in characters):
                    raise ValueError("some have several letters")
            except Exception as error:  # a damaged pickle raises errors of any type
                raise InputError(
                    f"{path} has no list of characters ({first_line(error)}); make it again with nanoGPT's prepare.py"
                ) from error
        return Characters("".join(characters))


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, texts and numbers only: other pickles can run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def find_token_files(text: Text) -> TokenFiles | None:
    """Return nanoGPT's files among those of a text; None without tokens. Raise InputError for several data sets."""
    names = TRAIN_FILE, VALIDATION_FILE, META_FILE
    found = [path for path in text.files if PurePosixPath(path).name in names]
    paths = {PurePosixPath(path).name: path for path in found}
    if not {TRAIN_FILE, VALIDATION_FILE} & paths.keys():
        return None
    if len(paths) < len(found):
        raise InputError(f"{text.name} has several files {', '.join(paths)}; give a folder with one data set")
    return TokenFiles(text, paths)
