"""What is waited for, said on a terminal while it lasts."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from tpuswarm.train.process.stop import defer_interrupts

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

DISPLAY_DELAY_S = 1.0
"""Seconds of a wait that nobody has to be told of."""


@cache
def stderr_console() -> "Console":
    """The one on which views and waits are drawn: they know of each other there."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


@contextmanager
def waiting(what: str, short: float = DISPLAY_DELAY_S) -> Iterator[Callable[[str], None]]:
    """On a terminal, say what is waited for and for how long, once it takes longer than `short` seconds.

    Gives a function that is told how far it is.
    """
    line = _Line(what)
    if not sys.stderr.isatty():
        yield line.at
        return
    timer = threading.Timer(short, line.show)
    timer.daemon = True
    with defer_interrupts():  # a picture that is begun, and cut short before it can be ended, would be drawn for ever
        if short:
            timer.start()
        else:
            line.show()
    try:
        yield line.at
    finally:
        with defer_interrupts():
            timer.cancel()
            line.hide()


class _Line:
    """What is waited for, how far it is, and for how long; on a terminal under the view where there is one."""

    def __init__(self, what: str):
        self._what, self._far, self._began = what, "", time.monotonic()
        self._lock, self._over = threading.Lock(), False
        self._stop: Callable[[], None] | None = None

    def at(self, far: str) -> None:
        """It is so far."""
        self._far = far

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        from tpuswarm.config.formatting import format_duration

        far = f": {self._far}" if self._far else ""
        yield Text(f"{self._what}{far} … {format_duration(time.monotonic() - self._began)}", style="dim")

    def show(self) -> None:
        """It takes long."""
        from tpuswarm.train.process.live_region import LiveRegion

        with self._lock:
            if not self._over:
                live = LiveRegion(
                    self, console=stderr_console(), transient=True, refresh_per_second=2, redirect_stdout=False
                )
                live.start(refresh=True)
                self._stop = live.stop

    def hide(self) -> None:
        """It is over."""
        with self._lock:
            self._over = True
            if self._stop:
                self._stop()
