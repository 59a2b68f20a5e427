"""A file that grows, as immutable pieces in a bucket: named by the bytes that they hold."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tpuswarm.train.bucket.stored import Held

PIECES = "pieces/"
PIECE = re.compile(r"(\d{15})-(\d{15})")


class Piece(NamedTuple):
    """A part of a file that grows."""

    start: int
    end: int
    version: str
    """Empty where this machine has written it."""

    @property
    def name(self) -> str:
        """Of its object, in the folder of its file."""
        return f"{self.start:015d}-{self.end:015d}"


def grows(path: Path) -> bool:
    """Whether a file of a run only grows, and is sent in pieces."""
    return path.suffix in (".jsonl", ".log") or ".tfevents." in path.name


def by_file(listed: dict[str, Held]) -> dict[str, list[tuple[Piece, float]]]:
    """Of what a bucket lists under PIECES: of each file its pieces, each with the time when it was written."""
    found: dict[str, list[tuple[Piece, float]]] = {}
    for name, about in listed.items():
        file, _, last = name.removeprefix(PIECES).rpartition("/")
        if match := PIECE.fullmatch(last):
            piece = Piece(int(match[1]), int(match[2]), about.version)
            found.setdefault(file, []).append((piece, about.written))
    return found


def chain(pieces: Iterable[Piece]) -> list[Piece]:
    """Those that make up the file: from its beginning, of several that begin at one place the longest."""
    longest: dict[int, Piece] = {}
    for piece in pieces:
        if piece.start not in longest or piece.end > longest[piece.start].end:
            longest[piece.start] = piece
    chosen: list[Piece] = []
    while (at := chosen[-1].end if chosen else 0) in longest:
        chosen.append(longest[at])
    return chosen
