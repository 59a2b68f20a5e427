"""The terminal that a command writes to: how sentences stand there, the first line, and what to do when it is gone."""

import errno
import io
import os
import sys
from typing import Any

from tpuswarm.config.formatting import wrap_text
from tpuswarm.train.process.stop import CLEAR_LINE, defer_interrupts

RED, YELLOW, PLAIN = "\x1b[1;31m", "\x1b[33m", "\x1b[0m"
LABELS = {"error": RED, "problem": RED, "warning": YELLOW, "not now": YELLOW, "note": YELLOW, "mend": YELLOW}
"""Colours of the word before the first colon of a sentence."""
COLUMNS = 80
"""Of a terminal that does not know its own."""


class _Terminal(io.FileIO):
    """A terminal. Once it has hung up, what is written is lost, and nobody fails by it: SIGHUP says what to do."""

    waits = False
    """Whether a line stands there that whatever comes next takes the place of."""

    def write(self, data: Any) -> int:
        """As FileIO does."""
        try:
            if _Terminal.waits:
                _Terminal.waits = False
                os.write(self.fileno(), CLEAR_LINE.encode())
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def wrap_standard_streams() -> None:
    """Have standard output and error, where they are terminals, behave as here."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            stream.flush()
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


def clear_temporary_line() -> None:
    """Take away what `at_once` has said, where nothing took its place."""
    if _Terminal.waits:
        with defer_interrupts():
            _Terminal.waits = False
            os.write(sys.stderr.fileno(), CLEAR_LINE.encode())


def echo(text: str, err: bool = False, hang: int = 0) -> None:
    """Print sentences, at once: on a terminal wrapped to its width as `wrapped` does, elsewhere as they are.

    What a person does not read (JSON, what a model wrote, lines to be pasted) is for `print`.
    """
    stream = sys.stderr if err else sys.stdout
    if stream is None:  # a process without one
        return
    if stream.isatty():
        text = _coloured(wrap_text(text, os.get_terminal_size(stream.fileno()).columns or COLUMNS, hang))
    stream.write(f"{text}\n")
    stream.flush()


def echo_on_console(console: Any, text: str, hang: int = 0) -> None:
    """The same on a console of rich's, above the view where it has one."""
    shown = wrap_text(text, console.width, hang) if console.is_terminal else text
    console.print(shown, soft_wrap=True, markup=False, highlight=False)


def _coloured(text: str) -> str:
    label, colon, rest = text.partition(":")
    colour = LABELS.get(label.strip())
    plain = not colour or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"{colour}{label}{colon}{PLAIN}{rest}"


def print_temporary_line(what: str) -> None:
    """On a terminal, say what is waited for, until there is something else to say."""
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    if isinstance(raw, _Terminal):
        with defer_interrupts():  # what is cut short would be written once more
            sys.stderr.write(f"{what} …")
            sys.stderr.flush()
            _Terminal.waits = True
