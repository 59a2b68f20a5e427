"""Run the processes of one node in threads, in real time."""

import threading
from collections.abc import Callable, Sequence
from inspect import isgenerator
from typing import Any, cast

from tpuswarm.swarm.processes.effects import Call, Process, RunBlocking, Sleep, Unreachable
from tpuswarm.swarm.processes.requests import call_request


class NodeThreads:
    """A server object and processes that share its state and end together.

    Their code between two effects is atomic (one lock); effects run in parallel.
    """

    def __init__(self, calls: Callable[[Call], Any]):
        """calls: makes a call to another node; raises Unreachable if no answer comes."""
        self._calls = calls
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None

    """The error that ended the node, possibly ProcessEnded."""

    def start(self, name: str, process: Process) -> None:
        """Run a process in a thread; its error ends the node."""
        thread = threading.Thread(target=self._guarded, args=(process,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def call(self, server: Any, method: str, arguments: tuple[Any, ...]) -> Any:
        """Execute a request in the caller's thread. Raise Unreachable once the node has ended.

        An error ends the node: a new process starts from what is stored. Only a malformed request is refused.
        """
        if self._stopped.is_set():
            raise Unreachable(method)
        try:
            with self._lock:
                result = call_request(server, method, arguments)
            return self._drive(cast(Process, result)) if isgenerator(result) else result
        except Unreachable:
            raise
        except Exception as error:
            self._stop(error)
            raise Unreachable(method) from error

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all processes or the node ended; return False after a timeout."""
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def drain(self, seconds: float) -> bool:
        """Wait until all processes ended; False if one hangs this long after the end of the node."""
        for thread in self._threads:
            while thread.is_alive() and not self._stopped.is_set():
                thread.join(0.2)
        return self.wait(seconds)

    def stop(self) -> None:
        """End the node at the next effects of its processes."""
        self._stopped.set()

    def _guarded(self, process: Process) -> None:
        try:
            self._drive(process)
        except BaseException as error:  # noqa: BLE001  # `failure` reports it
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
        self._stopped.set()

    def _drive(self, process: Process) -> Any:
        value: Any = None
        error: Exception | None = None
        while not self._stopped.is_set():
            with self._lock:
                try:
                    effect = process.throw(error) if error else process.send(value)
                except StopIteration as end:
                    return end.value
            value = error = None
            try:
                if isinstance(effect, Sleep):
                    self._stopped.wait(effect.seconds)
                elif isinstance(effect, RunBlocking):
                    value = effect.action()
                elif isinstance(effect, Call):
                    value = self._calls(effect)
                else:
                    value = self._call_all(effect.calls)
            except Exception as raised:  # noqa: BLE001  # passed to the process
                error = raised
        raise Unreachable("the node has ended")

    def _call_all(self, calls: Sequence[Call]) -> list[Any]:
        """Make each call in a thread. After all have ended, raise an error that is not Unreachable."""
        answers: list[Any] = [None] * len(calls)

        def make(number: int) -> None:
            try:
                answers[number] = self._calls(calls[number])
            except Exception as error:  # noqa: BLE001  # raised below
                answers[number] = error

        threads = [threading.Thread(target=make, args=(number,), daemon=True) for number in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, Unreachable):
                raise answer
        return answers
