"""Being asked to stop: Ctrl-C, and the notice before a preemption."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, NamedTuple

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Takes the first Ctrl-C or SIGTERM as a wish to stop after the step under way; a second Ctrl-C interrupts.

    Off the main thread Python gives no signals, and this does nothing.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
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
        self.asked = signal.Signals(number)


class StopDecision(NamedTuple):
    """Whether to save before ending, and why."""

    save: bool
    reason: str


def decide_stop(asked: signal.Signals, save_seconds: float | None, busy: bool, notice: float) -> StopDecision:
    """Save at Ctrl-C always; at SIGTERM if what a save takes fits the notice (a save under way must end first)."""
    if asked == signal.SIGINT:
        return StopDecision(True, "interrupted")
    if save_seconds is None:
        return StopDecision(False, f"no save was measured yet, so none is begun within the {notice:g} s notice")
    needed = save_seconds * (2 if busy else 1)
    if needed <= notice:
        return StopDecision(True, f"a save takes {needed:.1f} s of the {notice:g} s notice")
    return StopDecision(False, f"a save takes {needed:.1f} s, more than the {notice:g} s notice")
