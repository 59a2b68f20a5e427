"""Show text as a model sees it, with the part whose loss counts."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tpuswarm.config.formatting import columns_of

MAX_LINES = 5
MAX_PIECE_CHARS = MAX_WIDTH = 120

Piece = tuple[str, bool]
"""A part of a text, and whether its loss counts."""


def print_preview(console: Console, rows: Sequence[Sequence[Piece]]) -> None:
    """Print each row in at most MAX_LINES lines below a title; counted text is green, without colours in [[ ]]."""
    if not rows:
        return
    has_colours = bool(console.color_system) and not console.no_color
    counted = "the loss counts what is green" if has_colours else "the loss counts what is in [[ ]]"
    of_what = "each data set" if len(rows) > 1 else "the data"
    console.print(f"the first row of {of_what} as the model sees it; {counted}:", markup=False, soft_wrap=True)
    for pieces in rows:
        text = Text()
        for piece, counts in pieces:
            shown = _shorten(_escape(piece))
            text.append(shown if has_colours or not counts else f"[[{shown}]]", "bold green" if counts else "")
        lines = text.divide(_line_ends(text.plain, min(console.width, MAX_WIDTH) - 3))
        for number, line in enumerate(lines[:MAX_LINES], 1):
            end = "…" if number == MAX_LINES < len(lines) else ""
            console.print(Text.assemble("  ", line, end), soft_wrap=True)


def _line_ends(text: str, width: int) -> list[int]:
    """Return where lines of a width end; they may break inside words, so that every space is seen."""
    ends, used = list[int](), 0
    for at, letter in enumerate(text):
        columns = columns_of(letter)
        if used + columns > width:
            ends.append(at)
            used = 0
        used += columns
    return ends


def _escape(text: str) -> str:
    """Write line ends, control and invisible characters as in Python."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _shorten(text: str) -> str:
    half = MAX_PIECE_CHARS // 2
    return text if len(text) <= MAX_PIECE_CHARS else f"{text[:half]} … {text[-half:]}"
