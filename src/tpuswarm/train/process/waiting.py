"""Show on a terminal what the process waits for."""

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


@cache
def stderr_console() -> "Console":
    """Return the console that all live regions share, so that they appear below each other."""
    from tpuswarm.train.process.console import SafeConsole

    return SafeConsole(stderr=True, highlight=False)


@contextmanager
def waiting(what: str, delay_s: float = DISPLAY_DELAY_S) -> Iterator[Callable[[str], None]]:
    """On a terminal, show a wait and its duration once it takes longer than `delay_s`.

    Yields a function that takes the progress as text.
    """
    line = _Line(what)
    if not sys.stderr.isatty():
        yield line.set_progress
        return
    timer = threading.Timer(delay_s, line.show)
    timer.daemon = True
    with defer_interrupts():  # an interrupt in between would leave the region drawn for ever
        if delay_s:
            timer.start()
        else:
            line.show()
    try:
        yield line.set_progress
    finally:
        with defer_interrupts():
            timer.cancel()
            line.hide()


class _Line:
    def __init__(self, what: str):
        self._what, self._progress, self._started_at = what, "", time.monotonic()
        self._lock, self._is_over = threading.Lock(), False
        self._stop: Callable[[], None] | None = None

    def set_progress(self, progress: str) -> None:
        self._progress = progress

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        from tpuswarm.config.formatting import format_duration

        progress = f": {self._progress}" if self._progress else ""
        elapsed = format_duration(time.monotonic() - self._started_at)
        yield Text(f"{self._what}{progress} … {elapsed}", style="dim")

    def show(self) -> None:
        from tpuswarm.train.process.live_region import LiveRegion

        with self._lock:
            if not self._is_over:
                live = LiveRegion(
                    self, console=stderr_console(), transient=True, refresh_per_second=2, redirect_stdout=False
                )
                live.start(refresh=True)
                self._stop = live.stop

    def hide(self) -> None:
        with self._lock:
            self._is_over = True
            if self._stop:
                self._stop()
