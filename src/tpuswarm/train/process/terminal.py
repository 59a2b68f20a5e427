"""Print sentences on a terminal, wrapped to its width and with coloured labels; temporary lines; a closed terminal."""

import errno
import io
import os
import sys
from typing import Any

from tpuswarm.config.formatting import printable, wrap_text
from tpuswarm.train.process.stop import CLEAR_LINE, clears_lines, defer_interrupts

RED, YELLOW, PLAIN = "\x1b[1;31m", "\x1b[33m", "\x1b[0m"
LABEL_COLOURS = {"error": RED, "problem": RED, "warning": YELLOW, "not now": YELLOW, "note": YELLOW, "fix": YELLOW}
"""Colour of the text before the first colon."""
DEFAULT_COLUMNS = 80
"""For terminals that report 0 columns."""


class _Terminal(io.FileIO):
    """Discard output after the terminal has closed; SIGHUP ends the process."""

    has_temporary_line = False

    def write(self, data: Any) -> int:
        try:
            if _Terminal.has_temporary_line:
                _Terminal.has_temporary_line = False
                os.write(self.fileno(), CLEAR_LINE.encode())
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def wrap_standard_streams() -> None:
    """Let output on a terminal replace temporary lines, and survive a closed terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            stream.flush()
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


def print_temporary_line(text: str) -> None:
    """On a terminal, print a text that the next output replaces."""
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    if isinstance(raw, _Terminal) and clears_lines(raw):
        with defer_interrupts():  # the stream would write an interrupted text again
            sys.stderr.write(f"{text} …")
            sys.stderr.flush()
            _Terminal.has_temporary_line = True


def clear_temporary_line() -> None:
    if _Terminal.has_temporary_line:
        with defer_interrupts():
            _Terminal.has_temporary_line = False
            os.write(sys.stderr.fileno(), CLEAR_LINE.encode())


def echo(text: str, err: bool = False, hang: int = 0) -> None:
    """Print sentences for a person and flush; wrap them on a terminal (see `wrap_text` for `hang`)."""
    stream, text = sys.stderr if err else sys.stdout, printable(text)
    if stream is None:  # the process has no such stream
        return
    if stream.isatty():
        columns = os.get_terminal_size(stream.fileno()).columns or DEFAULT_COLUMNS
        text = _colour_label(wrap_text(text, columns, hang))
    stream.write(f"{text}\n")
    stream.flush()


def echo_on_console(console: Any, text: str, hang: int = 0) -> None:
    """Print sentences on a rich console, above its live region."""
    text = printable(text)
    shown = wrap_text(text, console.width, hang) if console.is_terminal else text
    console.print(shown, soft_wrap=True, markup=False, highlight=False)


def _colour_label(text: str) -> str:
    label, colon, rest = text.partition(":")
    colour = LABEL_COLOURS.get(label.strip())
    is_plain = not colour or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else f"{colour}{label}{colon}{PLAIN}{rest}"
