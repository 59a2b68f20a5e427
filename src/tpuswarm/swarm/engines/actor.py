"""The Ray actor that is a process of a swarm, and the work inside it."""

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

from tpuswarm.errors import InputError, TpuswarmError, message_of
from tpuswarm.swarm.engines.notice import on_notice
from tpuswarm.swarm.engines.variables import CALL_LIMIT
from tpuswarm.swarm.processes.effects import ProcessEnded, Unreachable

CONCURRENCY_GROUPS = {"work": 1, "calls": CALL_LIMIT, "beats": 4, "control": 4}
"""Threads of an actor for each kind of method."""
STARTUP_TIMEOUT_S = 20.0
"""How long a call waits for a process that is still creating its work; no longer than a heartbeat may take."""


class Workload(Protocol):
    """The work of a process."""

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Execute a call; may raise Unreachable."""
        ...

    def run(self) -> str:
        """Work to the end; return how it ended, a word of Outcome."""
        ...

    def report(self, since: int) -> Any:
        """Report the state of the work."""
        ...

    def leave(self) -> None:
        """Prepare to end soon."""
        ...


class Outcome(NamedTuple):
    """How a process ended."""

    how: Literal["ended", "left", "over", "wrong", "failed", "dead"]
    """The run ended; asked to leave; the process ended itself; wrong input; an error; died silently."""
    reason: str


class Actor:
    """The process. Control calls have their own threads, so that no payload delays a heartbeat."""

    def __init__(self, name: str, maker: str, arguments: dict[str, Any], environment: dict[str, str], log: str | None):
        """maker: module:function that creates the work; environment: set before JAX is imported."""
        os.environ.update(environment)
        if log:
            _redirect(Path(log))
        self._name, self._log = name, log
        module, _, function = maker.partition(":")
        self._made = threading.Event()
        self._leaving = False
        self._work: Workload
        on_notice(self._leave)
        self._make: Callable[[], Workload] = lambda: getattr(importlib.import_module(module), function)(**arguments)

    @ray.method(concurrency_group="work")
    def run(self) -> Outcome:
        """Create the work and run it. Return errors as words; their tracebacks go to the log."""
        # On a joined node Ray's processes start with SIGTERM blocked (engines/node.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            self._work = self._make()
            self._made.set()
            if self._leaving:
                self._work.leave()
            return Outcome(self._work.run(), "")  # type: ignore[arg-type]  # the words of Outcome
        except ProcessEnded as error:
            return Outcome("over", str(error))
        except InputError as error:
            return Outcome("wrong", str(error))
        except TpuswarmError as error:
            return Outcome("failed", str(error))
        except BaseException as error:  # noqa: BLE001  # the supervisor reports any error
            traceback.print_exc()
            where = f"; its traceback is in logs/{self._name}.log" if self._log else ""
            return Outcome("failed", f"{type(error).__name__}: {message_of(error)}{where}")

    @ray.method(concurrency_group="calls")
    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Execute a call from another process of the swarm."""
        return self._serve(method, arguments)

    @ray.method(concurrency_group="beats")
    def beat(self, arguments: bytes) -> bytes:
        """Execute a heartbeat. It comes pickled, which costs less than Ray's serialization."""
        return pickle.dumps(self._serve("beat", pickle.loads(arguments)))

    @ray.method(concurrency_group="control")
    def report(self, since: int) -> tuple[int, Any]:
        """Return the process's pid and the report of its work, None while it is being created."""
        return os.getpid(), self._work.report(since) if self._made.is_set() else None

    @ray.method(concurrency_group="control")
    def trace(self, steps: int) -> None:
        """Have a member trace its next steps."""
        if self._made.is_set():
            worker: Any = self._work  # only a member has steps
            worker.trace(steps)

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """Prepare to end soon."""
        self._leave()

    def _serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if not self._made.wait(STARTUP_TIMEOUT_S):
            raise Unreachable(self._name)
        return self._work.serve(method, arguments)

    def _leave(self) -> None:
        self._leaving = True
        if self._made.is_set():
            self._work.leave()


class ServerActor(Actor):
    """The process of a coordinator or aggregator: its title tells it from a member's in a list of processes."""


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
