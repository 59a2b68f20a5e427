"""Stop on Ctrl-C (SIGINT), before a preemption (SIGTERM) and when the terminal closes (SIGHUP)."""

import _thread
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from signal import Signals
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEAR_LINE = "\r\x1b[2K"

REDELIVERY_DELAY_S = 0.02
SWALLOWED_CHECK_S = 1.0
"""A future, for example, may hold back an Interrupted; one that has not arrived by then was swallowed."""
CLEANUP_GRACE_S = 3.0
"""A second Ctrl-C within this time does not cut short the cleanup after the first."""
SLOW_STOP_S = 1.0

Handler = Callable[[int, FrameType | None], None] | signal.Handlers

run_before_exit: list[Callable[[], None]] = []
"""Called before the process ends, even if it skips Python's own cleanup."""
end_drawings: list[Callable[[], None]] = []
"""Called before a thread ends the process with a sentence. They may wait for the thread that draws."""
interruptible_imports: set[CodeType] = set()
"""Functions that import a file of the user, in which an interrupt is safe."""
DEFAULT_EXIT_MESSAGE = "interrupted"


class _State:
    """The state of this process."""

    deferrals = 0
    """How many `defer_interrupts` blocks are open."""
    raised: Signals | None = None
    raised_at = 0.0
    is_redelivery = False
    """Whether `_redeliver` sends the next signal."""
    exit_message = DEFAULT_EXIT_MESSAGE
    listeners: "list[StopSignals]" = []  # noqa: RUF012  # shared by the whole process
    """Only the newest gets signals."""
    end_now: Callable[[], NoReturn] | None = None
    """Ends a process of the command; None in a program or notebook of the user."""


def clears_lines(stream: Any) -> bool:
    """Return whether CLEAR_LINE works on a stream."""
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def _install(handler: Handler) -> dict[Signals, Any]:
    """Return the previous handlers. An ignored SIGHUP stays ignored, for nohup."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python allows no handlers there
    numbers = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


class Interrupted(KeyboardInterrupt):
    """A signal ends this process, and nothing has to be saved."""

    def __init__(self, number: Signals):
        super().__init__(number.name)
        self.signal = _State.raised = number
        _State.raised_at = time.monotonic()


_fork = threading.local()


def _before_fork() -> None:
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _after_fork_in_child() -> None:
    if _State.listeners:
        signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


# A forked process, a DataLoader worker for example, also gets the terminal's Ctrl-C. It must never write it into the
# parent's wake-up descriptor, not even before its first line of Python: one Ctrl-C would count as two.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def set_exit_message(text: str) -> None:
    """Replace the line that this process prints when Ctrl-C ends it; empty for none."""
    _State.exit_message = text


def end_quietly() -> None:
    """Print nothing when Ctrl-C ends this process."""
    set_exit_message("")


class InterruptHandler:
    """Raise Interrupted in the main thread for each signal, for the rest of the process.

    It is delayed in `defer_interrupts`, and while a library is imported, whose C++ code would crash. C++ code that
    calls Python, `__del__` and callbacks of the garbage collector may swallow it: then it is raised again.
    """

    def __init__(self) -> None:
        _State.raised, _State.exit_message = None, DEFAULT_EXIT_MESSAGE
        _State.end_now = _end_interrupted
        _State.is_redelivery = False
        self._unraisable_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        _install(self._handle)

    def end(self, code: int | None) -> NoReturn:
        """End the process with `code` (None: interrupted), or as the raised signal demands."""
        _install(signal.SIG_IGN)
        if _State.raised == signal.SIGINT:
            _end_interrupted()
        if _State.raised is not None:
            _print(f"ended by {_State.raised.name}")
            _end_at_once(128 + _State.raised)
        if code is None:
            _print(_State.exit_message)
        _install(lambda number, frame: _end_at_once(128 + number))
        sys.exit(128 + signal.SIGINT if code is None else code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_redelivery, _State.is_redelivery = _State.is_redelivery, False
        is_early = time.monotonic() - _State.raised_at < CLEANUP_GRACE_S
        if _State.raised is not None and (is_redelivery or is_early or number != signal.SIGINT) and _is_unwinding():
            if is_redelivery:
                _redeliver(number, SWALLOWED_CHECK_S)
            return
        must_wait = _State.deferrals > 0 or _is_importing_library(frame)
        _redeliver(number, REDELIVERY_DELAY_S if must_wait else SWALLOWED_CHECK_S)
        if not must_wait:
            raise Interrupted(Signals(number))

    def _on_unraisable(self, error: Any) -> None:
        if isinstance(error.exc_value, Interrupted):
            _redeliver(error.exc_value.signal, REDELIVERY_DELAY_S)
        else:
            self._unraisable_hook(error)


def _end_interrupted() -> NoReturn:
    _print(_State.exit_message)
    _end_at_once(128 + signal.SIGINT)


def _print(text: str) -> None:
    """Print a line in place of an unfinished progress line."""
    sys.stderr.write(CLEAR_LINE * clears_lines(sys.stderr) + (text and f"{text}\n"))


def _end_at_once(code: int) -> NoReturn:
    """Skip Python's own cleanup, in which compiling threads of JAX crash."""
    for callback in run_before_exit:
        callback()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or None
            stream.flush()
    os._exit(code)


def _redeliver(number: int, delay_s: float) -> None:
    # not threading.Thread: the interrupted code may hold a lock of `threading`
    _thread.start_new_thread(_send_later, (number, delay_s))


def _send_later(number: int, delay_s: float) -> None:
    time.sleep(delay_s)
    _State.is_redelivery = True
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)  # also wakes it from a blocking call


def _is_unwinding() -> bool:
    """Return whether the main thread is handling an Interrupted."""
    error = sys.exception()
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


def find_interrupt(error: BaseException | None) -> Interrupted | None:
    """Return the Interrupted in whose place an error was raised, as C++ code does; not if it was raised `from None`."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error


@contextmanager
def block_signals() -> Iterator[None]:
    """Block SIGNALS in this thread, and in a new process until it calls `unblock_signals`.

    Python may lose a signal that arrives while it starts.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def unblock_signals() -> None:
    """Accept SIGNALS, pending ones too."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Let a short action finish before Interrupted is raised."""
    _State.deferrals += 1
    try:
        yield
    finally:
        _State.deferrals -= 1


def _is_importing_library(frame: FrameType | None) -> bool:
    is_importlib = False
    while frame is not None:
        is_caller_importlib = frame.f_code.co_filename.startswith("<frozen importlib")
        if is_importlib and not is_caller_importlib:
            return frame.f_code not in interruptible_imports
        is_importlib, frame = is_caller_importlib, frame.f_back
    return is_importlib


class StopSignals:
    """Take the first of SIGNALS as a request to stop after the current step; a second Ctrl-C interrupts.

    Does nothing off the main thread, where Python allows no handlers. A thread reacts to Ctrl-C while the main thread
    waits in C++ code, where Python calls no handler.
    """

    def __init__(self) -> None:
        self.requested: Signals | None = None
        self.on_slow_stop: Callable[[], None] = lambda: None
        """Called in that thread while the run has not ended SLOW_STOP_S after Ctrl-C."""
        self.on_forced_exit: Callable[[], None] = lambda: None
        """Called in that thread before it ends a process that survived a second Ctrl-C."""
        self._requested_at = 0.0
        self._previous_handlers: dict[Signals, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> "StopSignals":
        self._previous_handlers = _install(self._handle)
        if self._previous_handlers:
            reader, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            _State.listeners.append(self)
            self._previous_fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(reader,), name="Ctrl-C", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self._previous_handlers:
            return
        if _State.listeners[-1] is self:
            signal.set_wakeup_fd(self._previous_fd)
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)
        else:  # two loops overlap, and the older one ends first
            newer = _State.listeners[_State.listeners.index(self) + 1]
            newer._previous_handlers, newer._previous_fd = self._previous_handlers, self._previous_fd
        _State.listeners.remove(self)
        self._wakeup.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            self._ended.set()
            raise Interrupted(signal.SIGINT)
        if self.requested is None or number != signal.SIGHUP:  # SIGTERM replaces an earlier Ctrl-C: it leaves less time
            self.request(Signals(number))

    def _listen(self, reader: socket.socket) -> None:
        """Read the signal numbers that Python writes, until `__exit__` closes the other end."""
        ctrl_c_count, main = 0, threading.main_thread().ident
        assert main is not None
        with reader:
            while numbers := reader.recv(64):
                for _ in range(numbers.count(signal.SIGINT)):
                    ctrl_c_count += 1
                    if ctrl_c_count == 1 and not self._ended.wait(SLOW_STOP_S):
                        self.on_slow_stop()
                    elif ctrl_c_count > 1 and not self._ended.wait(CLEANUP_GRACE_S):
                        if _State.end_now:
                            self.on_forced_exit()
                            _State.end_now()
                        else:  # Python merged two presses of Ctrl-C before a long call
                            signal.pthread_kill(main, signal.SIGINT)

    def request(self, number: Signals) -> None:
        """Request a stop, as the signal does."""
        self.requested, self._requested_at = number, time.monotonic()

    def seconds_since_request(self) -> float:
        return time.monotonic() - self._requested_at


class StopDecision(NamedTuple):
    save: bool
    reason: str


def decide_stop(requested: Signals, save_s: float | None, is_saving: bool, remaining_s: float) -> StopDecision:
    """Always save after Ctrl-C; after SIGTERM and SIGHUP only if a save fits into the remaining seconds.

    save_s: duration of the last save. is_saving: another save has to finish first.
    """
    if requested == signal.SIGINT:
        return StopDecision(True, "interrupted")
    if save_s is None:
        return StopDecision(False, f"no save has been timed yet, so none was started with {remaining_s:.1f} s left")
    needed = save_s * (2 if is_saving else 1)
    if needed <= remaining_s:
        return StopDecision(True, f"a save takes {needed:.1f} s of the {remaining_s:.1f} s left")
    return StopDecision(False, f"a save takes {needed:.1f} s, more than the {remaining_s:.1f} s left")
