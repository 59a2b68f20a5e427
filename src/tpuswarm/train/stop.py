"""Being asked to stop: Ctrl-C, and the notice before a preemption."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, NamedTuple

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Takes the first Ctrl-C or SIGTERM as a wish to stop after the step under way; a second Ctrl-C interrupts.

    Off the main thread Python gives no signals, and this does nothing.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._asked_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, self._take) for each in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number))

    def ask(self, wish: signal.Signals) -> None:
        """Ask to stop, as the signal does."""
        self.asked, self._asked_at = wish, time.monotonic()

    def since(self) -> float:
        """Seconds since it was asked."""
        return time.monotonic() - self._asked_at


class StopDecision(NamedTuple):
    """Whether to save before ending, and why."""

    save: bool
    reason: str


def decide_stop(asked: signal.Signals, save_seconds: float | None, busy: bool, left: float) -> StopDecision:
    """Save at Ctrl-C always; at SIGTERM if what a save takes fits the `left` seconds of the notice.

    A save under way must end first.
    """
    if asked == signal.SIGINT:
        return StopDecision(True, "interrupted")
    if save_seconds is None:
        return StopDecision(False, f"no save was measured yet, so none is begun in the {left:.1f} s left")
    needed = save_seconds * (2 if busy else 1)
    if needed <= left:
        return StopDecision(True, f"a save takes {needed:.1f} s of the {left:.1f} s left")
    return StopDecision(False, f"a save takes {needed:.1f} s, more than the {left:.1f} s left")
