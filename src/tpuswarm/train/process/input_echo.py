"""What is typed while a terminal is drawn on is not shown there: the terminal would write it into the picture."""

import atexit
import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

LOCAL, ECHO = 3, termios.ECHO
"""Where a terminal's settings have its local modes, and the one that shows what is typed."""


class _Process:
    """What is true of the whole process."""

    hiding = 0
    """How many pictures are drawn."""
    hid: int | None = None
    """The terminal that does not show what is typed, as this process told it."""


def hide() -> None:
    """A picture begins. Nothing happens without a terminal, or where another process has it."""
    _Process.hiding += 1
    if _Process.hiding == 1:
        with suppress(OSError, termios.error):
            at = _terminal()
            if at is not None and _is_ours(at) and _shows(at):
                _Process.hid = at  # before it is so: what ends this process now makes good for it, too
                atexit.register(restore)
                _set(at, shown=False)


def show() -> None:
    """A picture is over."""
    _Process.hiding -= 1
    if not _Process.hiding:
        restore()


def restore() -> None:
    """Show again what is typed, however many pictures there are: the process ends."""
    at, _Process.hid = _Process.hid, None
    if at is not None:
        atexit.unregister(restore)
        with suppress(OSError, termios.error):  # it may have hung up
            if _is_ours(at):
                _set(at, shown=True)


@contextmanager
def hidden_input() -> Iterator[None]:
    """Hide what is typed for as long as a picture lasts."""
    hide()
    try:
        yield
    finally:
        show()


def _terminal() -> int | None:
    return next((each for each in (0, 1, 2) if os.isatty(each)), None)


def _is_ours(at: int) -> bool:
    """Whether this process is in the foreground: in the background it would be stopped for changing a terminal."""
    return os.tcgetpgrp(at) == os.getpgrp()


def _shows(at: int) -> bool:
    return bool(termios.tcgetattr(at)[LOCAL] & ECHO)


def _set(at: int, shown: bool) -> None:
    modes: list[Any] = termios.tcgetattr(at)
    modes[LOCAL] = modes[LOCAL] | ECHO if shown else modes[LOCAL] & ~ECHO
    termios.tcsetattr(at, termios.TCSANOW, modes)
