"""The terminal that a command writes to: a line that says what is waited for, and what to do when it is gone."""

import errno
import io
import os
import sys
from typing import Any

from tpuswarm.train.stop import held

WIPE = b"\r\x1b[2K"


class _Terminal(io.FileIO):
    """A terminal. Once it has hung up, what is written is lost, and nobody fails by it: SIGHUP says what to do."""

    waits = False
    """Whether a line stands there that whatever comes next takes the place of."""

    def write(self, data: Any) -> int:
        """As FileIO does."""
        try:
            if _Terminal.waits:
                _Terminal.waits = False
                os.write(self.fileno(), WIPE)
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def take_over() -> None:
    """Have standard output and error, where they are terminals, behave as here."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            stream.flush()
            raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


def at_once(what: str) -> None:
    """On a terminal, say what is waited for, until there is something else to say."""
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    if isinstance(raw, _Terminal):
        with held():  # what is cut short would be written once more
            sys.stderr.write(f"{what} …")
            sys.stderr.flush()
            _Terminal.waits = True
