"""Draw a region of the terminal again and again, without showing typed keys, which would end up in the picture.

Ctrl-Z stops the process at once, and its shell shows typed keys again. The cursor is never hidden, so the shell has it
too. When the process continues, it hides typed keys and draws below the shell's lines.
"""

import atexit
import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from rich.console import ConsoleRenderable
from rich.live import Live

from tpuswarm.train.process import stop

LOCAL_MODES = 3
"""Index in the attributes of a terminal."""


class LiveRegion(Live):
    drawn: ClassVar[set["LiveRegion"]] = set()

    def start(self, refresh: bool = False) -> None:
        if not self.is_started:
            _hide_input()
            LiveRegion.drawn.add(self)
        super().start(refresh)
        self.console.show_cursor(True)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        if _hide_input_again():
            for region in [*LiveRegion.drawn]:
                region._live_render._shape = None  # its lines are no longer the last ones
        return super().process_renderables(renderables)

    def stop(self) -> None:
        was_started = self.is_started
        try:
            super().stop()
        finally:
            if was_started:
                LiveRegion.drawn.discard(self)
                _show_input()


@contextmanager
def hidden_input() -> Iterator[None]:
    _hide_input()
    try:
        yield
    finally:
        _show_input()


class _Echo:
    """The state of this process."""

    hidden_by = 0
    """Number of regions."""
    terminal: int | None = None
    """File descriptor of the terminal whose echo this process turned off."""


def _hide_input() -> None:
    _Echo.hidden_by += 1
    if _Echo.hidden_by == 1:
        with suppress(OSError, termios.error):
            terminal = next((fd for fd in (0, 1, 2) if os.isatty(fd)), None)
            if terminal is None or not _is_in_foreground(terminal):
                return
            if termios.tcgetattr(terminal)[LOCAL_MODES] & termios.ECHO:
                _Echo.terminal = terminal  # first, so that an interrupt from here on turns it on again
                atexit.register(_restore)
                _set_echo(terminal, False)


def _show_input() -> None:
    _Echo.hidden_by -= 1
    if not _Echo.hidden_by:
        _restore()


def _restore() -> None:
    terminal, _Echo.terminal = _Echo.terminal, None
    if terminal is not None:
        atexit.unregister(_restore)
        with suppress(OSError, termios.error):  # the terminal may have closed
            if _is_in_foreground(terminal):
                _set_echo(terminal, True)


def _end_drawings() -> None:
    for region in [*LiveRegion.drawn]:
        region.stop()


def _hide_input_again() -> bool:
    """Hide typed keys if a shell has shown them since Ctrl-Z; return whether it had."""
    with suppress(OSError, termios.error):
        terminal = _Echo.terminal
        if terminal is None or not _is_in_foreground(terminal):
            return False
        if termios.tcgetattr(terminal)[LOCAL_MODES] & termios.ECHO:
            _set_echo(terminal, False)
            return True
    return False


stop.run_before_exit.append(_restore)
stop.end_drawings.append(_end_drawings)


def _is_in_foreground(terminal: int) -> bool:
    """A background process would be stopped for changing its terminal."""
    return os.tcgetpgrp(terminal) == os.getpgrp()


def _set_echo(terminal: int, shown: bool) -> None:
    modes: list[Any] = termios.tcgetattr(terminal)
    modes[LOCAL_MODES] = modes[LOCAL_MODES] | termios.ECHO if shown else modes[LOCAL_MODES] & ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
