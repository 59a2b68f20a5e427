"""Text to token numbers and back: characters or bytes; byte-pair encoding is in bpe.py."""

from collections import Counter
from typing import Protocol

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.config import Kind

CODE_POINTS = 0x110000


class Tokenizer(Protocol):
    """What the data and the sampler need of a tokenizer."""

    vocab: int
    kind: Kind
    key: str
    """What tells it from others of its kind: the alphabet, the fingerprint of a BPE; empty for bytes."""

    def encode(self, text: str) -> np.ndarray:
        """Token numbers; InputError for text it cannot write."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """The text of token numbers."""
        ...


class Bytes:
    """The 256 bytes of UTF-8; writes any text."""

    kind: Kind = "bytes"
    key = ""
    vocab = 256

    def encode(self, text: str) -> np.ndarray:
        """uint8 token numbers."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: list[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(token & 0xFF for token in tokens).decode(errors="replace")


class Characters:
    """One token for each character of an alphabet, in its order."""

    kind: Kind = "characters"

    def __init__(self, alphabet: str):
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise InputError(f"an alphabet needs characters, each once; got {len(alphabet)}")
        self.key = self.alphabet = alphabet
        self.vocab = len(alphabet)
        self._number = np.full(CODE_POINTS, -1, np.int32)
        self._number[_code_points(alphabet)] = np.arange(len(alphabet))

    def encode(self, text: str) -> np.ndarray:
        """int32 token numbers; InputError naming the characters that are not in the alphabet."""
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
        """The text; a number beyond the alphabet becomes U+FFFD."""
        return "".join(self.alphabet[token] if token < self.vocab else "\ufffd" for token in tokens)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)


class AlphabetCount:
    """Collects the characters of a text given in pieces."""

    def __init__(self) -> None:
        self._seen = np.zeros(CODE_POINTS, bool)

    def add(self, text: str) -> None:
        """Take in one piece."""
        self._seen[_code_points(text)] = True

    def alphabet(self) -> str:
        """All characters seen, sorted."""
        return "".join(chr(point) for point in np.flatnonzero(self._seen))
