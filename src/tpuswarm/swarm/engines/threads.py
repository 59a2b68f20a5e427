"""The processes of one node in threads of this one, in real time."""

import threading
from collections.abc import Callable, Sequence
from inspect import isgenerator
from typing import Any, cast

from tpuswarm.swarm.processes.effects import Call, Do, Process, Sleep, Unreachable


class NodeThreads:
    """What lives and dies together: a server object and processes that share its state.

    Their code between two effects is atomic (one lock); effects run beside each other.
    """

    def __init__(self, calls: Callable[[Call], Any]):
        """calls: carries out a call to another node; raises Unreachable where no answer comes."""
        self._calls = calls
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        """What ended the node: Over, or an error of something it did."""

    def start(self, name: str, process: Process) -> None:
        """Run a process in a thread of its own; what it raises ends the node."""
        thread = threading.Thread(target=self._guarded, args=(process,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def call(self, server: Any, method: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out a call to this node in the caller's thread; Unreachable once the node has ended."""
        if self._stopped.is_set():
            raise Unreachable(method)
        try:
            with self._lock:
                result = getattr(server, method)(*arguments)
            return self._drive(cast(Process, result)) if isgenerator(result) else result
        except Exception as error:
            self._end(error)
            raise Unreachable(method) from error

    def wait(self, seconds: float | None = None) -> bool:
        """Until all processes ended, or the node did; False if neither happened in time."""
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def drain(self, seconds: float) -> bool:
        """Until all processes ended; False where the node did and one of them hangs for so long after that."""
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
        except BaseException as error:  # noqa: BLE001  # whatever it is, whoever waits for the node is told
            self._end(error)

    def _end(self, error: BaseException) -> None:
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
                elif isinstance(effect, Do):
                    value = effect.action()
                elif isinstance(effect, Call):
                    value = self._calls(effect)
                else:
                    value = self._together(effect.calls)
            except Exception as raised:  # noqa: BLE001  # the process decides what it means
                error = raised
        raise Unreachable("the node has ended")

    def _together(self, calls: Sequence[Call]) -> list[Any]:
        """Every call in a thread of its own; an error that is not Unreachable is raised when all have ended."""
        answers: list[Any] = [None] * len(calls)

        def make(number: int) -> None:
            try:
                answers[number] = self._calls(calls[number])
            except Exception as error:  # noqa: BLE001  # raised by the thread that waits
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
