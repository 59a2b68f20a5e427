"""The inside of a process of a swarm: a Ray actor, and what works in it."""

import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import ray

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.swarm.engines.notice import on_notice
from tpuswarm.swarm.engines.variables import CALLS
from tpuswarm.swarm.processes.effects import Over, Unreachable

GROUPS = {"work": 1, "calls": CALLS, "beats": 4, "control": 4}
"""Threads of an actor for each kind of method."""
MADE = 20.0
"""Seconds that a call waits for a process that is still making its work; a heartbeat is not waited for longer."""


class Workload(Protocol):
    """What runs in a process."""

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out a call; may raise Unreachable."""
        ...

    def run(self) -> str:
        """Its work, until a word that says how it ended."""
        ...

    def look(self, since: int) -> Any:
        """How it stands."""
        ...

    def leave(self) -> None:
        """It will have to go soon."""
        ...


class Outcome(NamedTuple):
    """How a process ended."""

    how: Literal["ended", "left", "over", "wrong", "failed", "dead"]
    """The run ended; asked to go; no place in the swarm; wrong input; an error; gone without a word."""
    reason: str


class Actor:
    """The process. Its control calls have threads of their own, so that no payload delays a heartbeat."""

    def __init__(self, name: str, maker: str, arguments: dict[str, Any], environment: dict[str, str], log: str | None):
        """maker: module:function that makes the work from the arguments; environment: set before JAX is imported."""
        os.environ.update(environment)
        if log:
            _redirect(Path(log))
        self._name, self._log = name, log
        module, _, function = maker.partition(":")
        self._made = threading.Event()
        self._leaving = False
        self._work: Workload
        on_notice(self._go)
        self._make: Callable[[], Workload] = lambda: getattr(importlib.import_module(module), function)(**arguments)

    @ray.method(concurrency_group="work")
    def run(self) -> Outcome:
        """Make the work and let it run; errors are told in words, their tracebacks are in the log."""
        # On a joined node Ray's processes begin without it (engines/node.py); those that are started here end at one.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            self._work = self._make()
            self._made.set()
            if self._leaving:
                self._work.leave()
            return Outcome(self._work.run(), "")  # type: ignore[arg-type]  # the words of Outcome
        except Over as error:
            return Outcome("over", str(error))
        except InputError as error:
            return Outcome("wrong", str(error))
        except TpuswarmError as error:
            return Outcome("failed", str(error))
        except BaseException as error:  # noqa: BLE001  # whatever it is, the supervisor is told
            traceback.print_exc()
            where = f"; its traceback is in logs/{self._name}.log" if self._log else ""
            return Outcome("failed", f"{type(error).__name__}: {error}{where}")

    @ray.method(concurrency_group="calls")
    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """A call from another process of the swarm."""
        return self._serve(method, arguments)

    @ray.method(concurrency_group="beats")
    def beat(self, arguments: bytes) -> bytes:
        """A heartbeat: of so many each comes pickled, which is less work than what Ray would do with objects."""
        return pickle.dumps(self._serve("beat", pickle.loads(arguments)))

    @ray.method(concurrency_group="control")
    def look(self, since: int) -> tuple[int, Any]:
        """The process's pid, and how its work stands (None before there is one)."""
        return os.getpid(), self._work.look(since) if self._made.is_set() else None

    @ray.method(concurrency_group="control")
    def trace(self, steps: int) -> None:
        """A member's next steps."""
        if self._made.is_set():
            host: Any = self._work  # only a member has steps
            host.trace(steps)

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """It will have to go soon."""
        self._go()

    def _serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if not self._made.wait(MADE):
            raise Unreachable(self._name)
        return self._work.serve(method, arguments)

    def _go(self) -> None:
        self._leaving = True
        if self._made.is_set():
            self._work.leave()


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
