"""Being asked to stop: Ctrl-C, the notice before a preemption, a terminal that closes."""

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

from tpuswarm.train.process import input_echo

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLEAR_LINE = "\r\x1b[2K"
"""Takes a line of a terminal away."""
REDELIVERY_DELAY_S = 0.02
"""Seconds until a signal that came at a bad moment comes again."""
SWALLOWED_CHECK_S = 1.0
"""Seconds until it is looked whether what was raised has been swallowed: a future may hold it for a moment."""
CLEANUP_GRACE_S = 3.0
"""Seconds in which another Ctrl-C does not cut short what is done because of the first."""
SLOW_STOP_S = 1.0
"""Seconds of Ctrl-C without an end, after which it is said what is waited for."""

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def _install(handler: Handler) -> dict[Signals, Any]:
    """The handlers before. A SIGHUP that is ignored stays so: that is what nohup asks for."""
    if threading.current_thread() is not threading.main_thread():
        return {}  # Python gives it no signals
    wanted = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
    return {each: signal.signal(each, handler) for each in wanted}


def _restore(handlers: dict[Signals, Any]) -> None:
    for each, handler in handlers.items():
        signal.signal(each, handler)


class Interrupted(KeyboardInterrupt):
    """One of SIGNALS ends what this process does; nothing has to be saved first."""

    def __init__(self, asked: Signals):
        super().__init__(asked.name)
        self.asked = _ProcessState.taken = asked
        _ProcessState.taken_at = time.monotonic()


class _ProcessState:
    """What is true of the whole process."""

    holds = 0
    """How many parts of it must not be cut short."""
    taken: Signals | None = None
    """The signal that was raised."""
    taken_at = 0.0
    again = False
    """Whether the next signal is one of this process's own, by `_raise_again`."""
    words: str | None = None
    """What is said where Ctrl-C ends it."""
    listening: "list[StopSignals]" = []  # noqa: RUF012  # of the process, as all of this
    """Those that are entered; the newest takes the signals."""
    ends: Callable[[], NoReturn] | None = None
    """Ends it at once, as Ctrl-C does; None in a program or a notebook of the user's, which is not ours to end."""


class _Fork(threading.local):
    """A fork by this thread."""

    block_signals: set[int] | set[Signals] = set()  # noqa: RUF012  # replaced, not changed
    """The signals that were blocked before."""


_fork = _Fork()


def _before_fork() -> None:
    _fork.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.blocked)


def _after_fork_in_child() -> None:
    if _ProcessState.listening:
        signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.blocked)


# A forked process, a worker of a DataLoader say, gets the Ctrl-C of its terminal, too. It must not write that into the
# parent's wake-up descriptor, not even between the fork and the first line of Python: one Ctrl-C would count as two.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def set_exit_message(text: str) -> None:
    """What this process says where Ctrl-C ends it."""
    _ProcessState.words = text


class InterruptHandler:
    """From when it is made, a signal raises Interrupted in the main thread, once what it does there can be cut short.

    A library that is being imported cannot: C++ code crashes. Nor can what is `held`: the signal comes again shortly
    after. So it does for as long as the process lives, because what was raised may be swallowed, by C++ code that calls
    Python as a program is compiled, or in what Python runs between two lines (`__del__`, a callback of the garbage
    collector): then it is raised once more. For a whole process: nothing puts the handlers back.
    """

    def __init__(self) -> None:
        _ProcessState.taken = _ProcessState.words = None
        _ProcessState.ends = self._interrupted
        _ProcessState.again = False
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._swallowed
        _install(self._take)

    def end(self, code: int | None) -> NoReturn:
        """End the process: with `code`, or as the signal that was raised has it, whatever has become of that since.

        None is the code of what was interrupted and has not said so.
        """
        _install(signal.SIG_IGN)
        taken = _ProcessState.taken
        if taken == signal.SIGINT:
            self._interrupted()
        if taken is not None:
            self._say(f"ended by {taken.name}")
            self._end_at_once(128 + taken)
        if code is None:
            self._say(_ProcessState.words or "interrupted")
        _install(lambda number, frame: self._end_at_once(128 + number))
        sys.exit(128 + signal.SIGINT if code is None else code)

    def _interrupted(self) -> NoReturn:
        self._say(_ProcessState.words or "interrupted")
        self._end_at_once(128 + signal.SIGINT)

    def _say(self, text: str) -> None:
        """In place of a line of waiting that was cut short."""
        sys.stderr.write(f"{CLEAR_LINE * sys.stderr.isatty()}{text}\n")

    def _end_at_once(self, code: int) -> NoReturn:
        """Without Python's own tidying up, in which threads of JAX that still compile crash."""
        input_echo.restore()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # closed, or not there
                stream.flush()
        os._exit(code)

    def _take(self, number: int, frame: FrameType | None) -> None:
        again, _ProcessState.again = _ProcessState.again, False
        soon = time.monotonic() - _ProcessState.taken_at < CLEANUP_GRACE_S
        if _ProcessState.taken is not None and (again or soon or number != signal.SIGINT) and _on_its_way():
            if again:
                self._again(number, SWALLOWED_CHECK_S)
            return
        # Not a thread of `threading`, whose lock may be held by what was interrupted: that would wait for itself.
        late = bool(_ProcessState.holds) or _importing(frame)
        self._again(number, REDELIVERY_DELAY_S if late else SWALLOWED_CHECK_S)
        if not late:
            raise Interrupted(Signals(number))

    def _again(self, number: int, seconds: float) -> None:
        _thread.start_new_thread(_raise_again, (number, seconds))

    def _swallowed(self, what: Any) -> None:
        if isinstance(what.exc_value, Interrupted):
            self._again(what.exc_value.asked, REDELIVERY_DELAY_S)  # certainly lost: no need to wait for ARRIVES
        else:
            self._unraisable(what)


def _raise_again(number: int, seconds: float) -> None:
    time.sleep(seconds)
    _ProcessState.again = True
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)  # it wakes up for it, whatever it waits for


def _on_its_way() -> bool:
    """Whether what the main thread does now is done because Interrupted was raised."""
    error = sys.exception()
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


@contextmanager
def block_signals() -> Iterator[None]:
    """Block SIGNALS in this thread, and in a process that is started meanwhile until it calls `unblock`.

    Python itself may lose a signal that comes while it starts.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_signals() -> None:
    """Let SIGNALS in, those too that came while this process started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Keep Interrupted away from what has to be done as a whole, and shortly."""
    _ProcessState.holds += 1
    try:
        yield
    finally:
        _ProcessState.holds -= 1


loads_user_code: set[CodeType] = set()
"""Functions that import a file of the user's, which may do anything as it is read: it can be interrupted."""


def _importing(frame: FrameType | None) -> bool:
    """Whether the innermost import under way is that of a library."""
    inside = False
    while frame is not None:
        machinery = frame.f_code.co_filename.startswith("<frozen importlib")
        if inside and not machinery:
            return frame.f_code not in loads_user_code
        inside, frame = machinery, frame.f_back
    return inside


class StopSignals:
    """Takes the first of SIGNALS as a wish to stop after the step under way; a second Ctrl-C interrupts.

    Off the main thread Python gives no signals, and this does nothing. While the main thread waits in C++ code for the
    devices Python runs no handler; a thread hears of Ctrl-C all the same.
    """

    def __init__(self) -> None:
        self.asked: Signals | None = None
        self.slow: Callable[[], None] = lambda: None
        """Told, by that thread, that Ctrl-C has not ended the run yet."""
        self.unheard: Callable[[], None] = lambda: None
        """Told, by that thread, that a second one has not either, and that the process ends now."""
        self._asked_at = 0.0
        self._before: dict[Signals, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> "StopSignals":
        self._before = _install(self._take)
        if self._before:
            here, there = socket.socketpair()
            there.setblocking(False)
            _ProcessState.listening.append(self)
            self._wakes = there
            self._woke = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(here,), name="Ctrl-C", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self._before:
            return
        if _ProcessState.listening[-1] is self:
            signal.set_wakeup_fd(self._woke)
            _restore(self._before)
        else:  # two loops in turn, and the first ended first
            after = _ProcessState.listening[_ProcessState.listening.index(self) + 1]
            after._before, after._woke = self._before, self._woke
        _ProcessState.listening.remove(self)
        self._wakes.close()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            self._ended.set()
            raise Interrupted(signal.SIGINT)
        if self.asked is None or number != signal.SIGHUP:  # SIGTERM after Ctrl-C: there is less time now
            self.ask(Signals(number))

    def _listen(self, here: socket.socket) -> None:
        """What Python writes the number of each signal into, as it comes, until the other end is closed."""
        pressed, main = 0, threading.main_thread().ident
        assert main is not None
        with here:
            while numbers := here.recv(64):
                for _ in range(numbers.count(signal.SIGINT)):
                    pressed += 1
                    if pressed == 1 and not self._ended.wait(SLOW_STOP_S):
                        self.slow()
                    elif pressed > 1 and not self._ended.wait(CLEANUP_GRACE_S):
                        if _ProcessState.ends:
                            self.unheard()
                            _ProcessState.ends()
                        else:  # the first came just before a long call, and Python took both for one
                            signal.pthread_kill(main, signal.SIGINT)

    def ask(self, wish: Signals) -> None:
        """Ask to stop, as the signal does."""
        self.asked, self._asked_at = wish, time.monotonic()

    def since(self) -> float:
        """Seconds since it was asked."""
        return time.monotonic() - self._asked_at


class StopDecision(NamedTuple):
    """Whether to save before ending, and why."""

    save: bool
    reason: str


def decide_stop(asked: Signals, save_seconds: float | None, busy: bool, left: float) -> StopDecision:
    """Save at Ctrl-C always; at SIGTERM and SIGHUP if what a save takes fits the `left` seconds of the notice.

    A save under way must end first.
    """
    if asked == signal.SIGINT:
        return StopDecision(True, "interrupted")
    if save_seconds is None:
        return StopDecision(False, f"no save has been timed yet, so none was started with {left:.1f} s left")
    needed = save_seconds * (2 if busy else 1)
    if needed <= left:
        return StopDecision(True, f"a save takes {needed:.1f} s of the {left:.1f} s left")
    return StopDecision(False, f"a save takes {needed:.1f} s, more than the {left:.1f} s left")
