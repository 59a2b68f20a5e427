"""Interrupt a call that hangs."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CallHung(TimeoutError):
    """A call took longer than its limit."""


class _Expired(BaseException):
    """No `except Exception` of the code that hangs catches it."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise CallHung, with the traceback of the line that hangs; off the main thread there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def expire(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise _Expired

    previous_handler, start = signal.signal(signal.SIGALRM, expire), time.monotonic()
    previous_s, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except _Expired as expired:
        raise CallHung(f"it hung for {limit_s:g} s").with_traceback(expired.__traceback__) from None
    finally:
        is_over = True
        left_s = max(0.001, previous_s - (time.monotonic() - start)) if previous_s else 0.0  # 0 ends the timer
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        signal.setitimer(signal.ITIMER_REAL, left_s)
