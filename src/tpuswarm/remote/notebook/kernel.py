"""Run the kernel of a slice on worker 0. It is Jupyter's own kernel; the other workers repeat its cells.

`worker.py` starts an engine on each other worker, and all form one JAX program. Output of another worker is shown at
the end of a cell if it differs. A first line `%%worker 2` sends a cell to one worker.
"""

import asyncio
import base64
import json
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .engine import COLLECTIVE, MAGIC, App, Mirrored, has_devices, in_thread, reserve_port
from .output import MAX_CHARS, Output
from .worker import FOLDER, shut_down, tune

CONNECT_TIMEOUT_S, JOIN_TIMEOUT_S = 20.0, 300.0
MEET_TIMEOUT_S, SPLIT_MEET_TIMEOUT_S = 60.0, 5.0
SETTLE_S = 1.5
"""How long other workers may run on after one has failed."""
LATE_OUTPUT_S = 0.5
MAX_REQUESTS = 100
RESTART = ". A slice is one program, so its other workers were ended too: restart the kernel"
Reply = dict[str, Any]


class Lost(Exception):
    """The slice's program cannot go on."""


@dataclass
class Request:
    """A cell or a widget's message that workers carry out."""

    message: Any
    workers: Sequence[int]
    results: dict[int, "Future[Reply]"] = field(default_factory=dict)
    outputs: dict[tuple[int, str], Output] = field(default_factory=lambda: defaultdict(Output))
    failed: list[int] = field(default_factory=list)
    """Workers in the order of their failures."""
    is_cut = is_over = is_comparing = False

    @property
    def id(self) -> str:
        """The identifier of its message."""
        return str(self.message["header"]["msg_id"])


class Worker:
    """The connection to another worker's engine."""

    def __init__(self, number: int, at: tuple[str, int], kernel: "SliceKernel"):
        self.number, self._at, self._kernel = number, at, kernel
        self._line: Any = None
        self._outgoing: SimpleQueue[bytes] = SimpleQueue()
        self._waiting: dict[str, Future[Reply]] = {}
        self._lock, self._is_gone = threading.Lock(), False
        threading.Thread(target=self._attend, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Send a message, once the engine is connected."""
        self._outgoing.put(json.dumps(message, default=str).encode())

    def request(self, **message: Any) -> "Future[Reply]":
        """Send a request; the future fails with Lost if the engine ends."""
        future: Future[Reply] = Future()
        with self._lock:
            if self._is_gone:
                future.set_exception(Lost())
            self._waiting[message["id"]] = future
        self.send(**message)
        return future

    def disconnect(self) -> None:
        """End the connection, and with it the engine."""
        if self._line is not None:
            shut_down(self._line)

    def _attend(self) -> None:
        """Take messages until the connection ends; then report why."""
        try:
            socket.create_connection(self._at, CONNECT_TIMEOUT_S).close()
            self._line = connection.Client(self._at, authkey=(FOLDER / "secret").read_bytes())
            tune(self._line)
            self._line.send_bytes(json.dumps({"folder": os.path.relpath(Path.cwd(), Path.home())}).encode())
            threading.Thread(target=self._write, daemon=True).start()
            while "ended" not in (message := json.loads(self._line.recv_bytes())) and "refused" not in message:
                if "kind" in message:
                    self._kernel.note_remote(self.number, message)
                elif message.get("raised"):
                    self._waiting.pop(message["done"]).set_exception(RuntimeError(message["raised"]))
                else:
                    self._waiting.pop(message["done"]).set_result(message)
            if "refused" in message:
                self._kernel.lose(message["refused"], ": shut that one down, then restart this one")
            why = f"its process has ended: {message.get('ended')}"
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            why = f"its host {self._at[0]} does not answer ({error or type(error).__name__})"
        self._kernel.lose(f"worker {self.number} is lost: {why}")
        with self._lock:
            self._is_gone = True
        for future in [*self._waiting.values()]:
            future.set_exception(Lost())

    def _write(self) -> None:
        with suppress(OSError):
            while True:
                self._line.send_bytes(self._outgoing.get())


class SliceKernel(Mirrored):
    """IPython's kernel, which has the other workers repeat cells and messages of widgets."""

    def __init__(self, **about: Any):
        self._requests: dict[str, Request] = {}
        self._current: Request | None = None
        self._lock = threading.RLock()
        self._lost, self._has_joined = "", False
        self._shared: set[str] = set()
        """Comms that all workers have opened."""
        super().__init__(**about)
        self.shell_handlers.update(comm_msg=self._handle_comm, comm_close=self._handle_comm)
        found = json.loads((FOLDER / "slice.json").read_text())
        self._address = found["address"]
        self._others = {number: Worker(number, tuple(at), self) for number, at in enumerate(found["workers"], 1)}
        self._all = range(len(self._others) + 1)

    @property
    def kernel_info(self) -> dict[str, Any]:
        """Announce no subshells: other workers could not run them at the same point."""
        info = super().kernel_info
        return {**info, "supported_features": [name for name in info["supported_features"] if "subshell" not in name]}

    async def shell_main(self, subshell_id: str | None, msg: Any) -> None:
        """Handle messages strictly in order, even a widget's during an asynchronous cell."""
        async with self._main_asyncio_lock:
            await self.dispatch_shell(msg)

    async def do_execute(
        self, code: str, silent: bool, store_history: bool = True, user_expressions: Any = None,
        allow_stdin: bool = False, *, cell_meta: Any = None, cell_id: Any = None,
    ) -> Reply:  # fmt: skip
        """Run a cell on all workers, or on one."""
        count, run = self.shell.execution_count, super().do_execute
        if (magic := MAGIC.match(code)) and not (magic[1].isdecimal() and int(magic[1]) in self._all):
            why = f"%%worker takes a worker's number, 0 to {self._all[-1]}, not {magic[1]!r}"
            reply = self._fail(self.get_parent(), "UsageError", why)
        else:
            about = {"cell_meta": cell_meta, "cell_id": cell_id}
            task = {"code": code, "silent": silent, "store": store_history, "count": count, "stdin": allow_stdin}
            reply = await self._carry_out(
                [int(magic[1])] if magic else self._all,
                lambda: run(code, silent, store_history, user_expressions, allow_stdin, **about),
                {"do": "run", **task},
            )
        if store_history and self.shell.execution_count == count:  # this worker had no part in it
            self.shell.history_manager.store_inputs(count, "", code)
            self.shell.execution_count += 1
        return {"user_expressions": {}, "payload": [], "execution_count": count, **reply}

    async def _handle_comm(self, stream: Any, ident: Any, message: Any) -> None:
        kind, content = message["header"]["msg_type"], message["content"]

        async def work() -> None:
            getattr(self.comm_manager, kind)(stream, ident, message)

        if content["comm_id"] in self._shared:
            buffers = [base64.b64encode(buffer).decode() for buffer in message["buffers"]]
            await self._carry_out(self._all, work, {"do": "comm", "kind": kind, "content": content, "buffers": buffers})
        else:
            await self.run_user_code(message["header"]["msg_id"], work)

    async def _carry_out(
        self, workers: Sequence[int], work: Callable[[], Awaitable[Any]], task: dict[str, Any]
    ) -> Reply:
        """Have these workers carry out the current message; return the reply once all have."""
        request = Request(self.get_parent(), workers)
        with self._lock:
            self._requests[request.id] = self._current = request
            for old in [*self._requests][:-MAX_REQUESTS]:
                del self._requests[old]
        others = [self._others[number] for number in workers if number]
        try:
            await self._join()
            if self.interrupted == request.id:
                return await self.run_user_code(request.id, work)  # which does not begin
            request.results = {worker.number: worker.request(id=request.id, **task) for worker in others}
            if 0 in workers:
                request.results[0] = Future()
            for number, result in request.results.items():
                result.add_done_callback(lambda done, number=number: self._check(request, number, done))  # type: ignore[misc]
            if 0 in workers:
                request.results[0].set_result(await self.run_user_code(request.id, work))
                for worker in others:
                    worker.send(do="answer", id=request.id, is_eof=False)  # end a wait for input()
            await asyncio.wait([asyncio.wrap_future(result) for result in request.results.values()])
            replies = {number: result.result() for number, result in sorted(request.results.items())}
        except Lost:
            if request.is_cut:
                return request.results[request.failed[0]].result()
            return self._fail(request.message, "WorkerLost", self._lost)
        finally:
            with self._lock:
                request.is_over, self._current = True, None
        return await self._conclude(request, replies)

    async def _join(self) -> None:
        """Make all workers one JAX program, once; interrupts wait. Raises Lost."""
        if self._lost:
            raise Lost
        if not self._has_joined:
            problem = "the workers formed no JAX program"
            with reserve_port(self._address) as port:
                values = [f"{self._address}:{port}", len(self._all)]
                await self._together("join", values, JOIN_TIMEOUT_S, problem)
            self._has_joined = True

    async def _together(self, task: str, values: list[Any], timeout_s: float, problem: str) -> None:
        """Have all workers do a task that ends on none before it ends on all; raises Lost."""
        futures: list[Future[Any]] = [in_thread(COLLECTIVE[task], *values, 0)]
        for number, worker in self._others.items():
            futures.append(worker.request(do=task, id=f"{task} {values[0]}", values=[*values, number]))
        waiting = [asyncio.wrap_future(future) for future in futures]
        done, missing = await asyncio.wait(waiting, timeout=timeout_s, return_when=FIRST_EXCEPTION)
        errors = [error for future in done if (error := future.exception())]
        if missing or errors:
            self.lose(problem + "".join(f": {error}" for error in errors[:1]))
            raise Lost

    async def _conclude(self, request: Request, replies: dict[int, Reply]) -> Reply:
        """Show what differs between the workers; have them meet after a failure. Return the reply to the request."""
        opened = [reply["opened"] if number else self.opened for number, reply in replies.items()]
        if len(replies) == len(self._all) and all(identifiers == opened[0] for identifiers in opened):
            self._shared.update(opened[0])
        elif any(opened):
            self._show_text(request, "the workers have made different widgets, whose values reach one worker only\n")
        if 0 in replies:
            self._compare(request)
        failed = {number: replies[number] for number in request.failed}
        if not failed:
            return next(iter(replies.values()))
        errors = [number for number in failed if failed[number]["ename"] != "KeyboardInterrupt"] or [*failed]
        if 0 in replies and not request.is_cut:
            shown = set()
            for number in sorted(errors):
                error = failed[number]["ename"], failed[number]["evalue"]
                if error not in shown:
                    shown.add(error)
                    self._show_failure(request, number)
        if has_devices() or any(reply.get("has_devices") for reply in replies.values()):
            timeout_s = SPLIT_MEET_TIMEOUT_S if len(failed) < len(replies) else MEET_TIMEOUT_S
            with suppress(Lost):
                await self._together("meet", [request.id], timeout_s, "the workers stopped at different places")
            if self._lost and not request.is_cut:
                self._show_text(request, f"{self._lost}\n")
        return failed[errors[0]]

    # Failures.

    def _check(self, request: Request, number: int, done: "Future[Reply]") -> None:
        if done.exception() is None and done.result()["status"] != "ok":
            with self._lock:
                request.failed.append(number)
            if len(request.failed) == 1 and len(request.workers) > 1:
                threading.Thread(target=self._settle, args=(request,), daemon=True).start()

    def _settle(self, request: Request) -> None:
        """Show a failure for which other workers wait. They cannot catch up, so the slice is lost."""
        wait(request.results.values(), SETTLE_S)
        left = [number for number, result in request.results.items() if not result.done()]
        if left and self.interrupted != request.id:
            request.is_cut = True
            why = f"{label(request.failed)} failed while {label(left)} waited"
            self._show_failure(request, request.failed[0])
            self._show_text(request, f"{why}{RESTART}\n")
            self.lose(why)

    def lose(self, why: str, advice: str = RESTART) -> None:
        """End all engines and refuse cells from now on."""
        with self._lock:
            if self._lost or self.shell.exit_now:
                return
            self._lost = why + advice
            request = self._current
        for worker in self._others.values():
            worker.disconnect()
        if request is not None:
            self.interrupt(request.id)

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Interrupt the current request on all workers. The control thread calls this."""
        if (request := self._current) is not None:
            for worker in self._others.values():
                worker.send(do="interrupt", id=request.id)
            self.interrupt(request.id)
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    async def do_shutdown(self, restart: bool) -> Reply:
        """End all engines."""
        for worker in self._others.values():
            worker.disconnect()
        return super().do_shutdown(restart)

    def _fail(self, message: Any, ename: str, evalue: str, traceback: Sequence[str] = ()) -> Reply:
        error = {"ename": ename, "evalue": evalue, "traceback": [*traceback] or [f"{ename}: {evalue}"]}
        self.show_error(error, message, b"slice")
        return {"status": "error", **error}

    def _show_failure(self, request: Request, number: int) -> None:
        if number:  # worker 0 has shown its own error
            error = request.results[number].result()
            traceback = [f"worker {number}:", *error["traceback"]]
            self._fail(request.message, error["ename"], error["evalue"], traceback)

    def _input_request(self, prompt: str, ident: Any, parent: Any, password: bool = False) -> str:
        """Ask on this worker; send the answer to the others."""
        answer: dict[str, Any] = {"is_eof": True}
        try:
            value = super()._input_request(prompt, ident, parent, password)
            answer = {"value": value}
        finally:
            for worker in self._others.values():
                worker.send(do="answer", id=parent["header"]["msg_id"], **answer)
        return str(value)

    # Output.

    def publish(self, kind: str, request_id: str, content: Any, metadata: Any, ident: bytes) -> bool:
        """Note this worker's output; hold back an interrupt that another worker's failure caused."""
        if ident == b"slice" or (request := self._requests.get(request_id)) is None:
            return True
        self._note(request, 0, kind, content)
        return not (kind == "error" and self._lost and content["ename"] == "KeyboardInterrupt")

    def note_remote(self, number: int, message: dict[str, Any]) -> None:
        """Take what another worker publishes: show it if the cell is that worker's alone."""
        request = self._requests.get(message["id"]) or next(reversed(self._requests.values()), None)
        if request is not None and 0 in request.workers:
            self._note(request, number, message["kind"], message["content"])
        elif request is not None:
            about = {"metadata": message["metadata"], "ident": b"slice"}
            self.session.send(self.iopub_socket, message["kind"], message["content"], request.message, **about)

    def _note(self, request: Request, number: int, kind: str, content: Any) -> None:
        if kind == "stream":
            stream, text = content["name"], content["text"]
        elif kind in ("display_data", "execute_result"):
            stream, text = "stdout", content["data"].get("text/plain", "") + "\n"
        else:
            return
        with self._lock:
            request.outputs[number, stream].add(text)
            if request.is_over and not request.is_comparing:
                request.is_comparing = True
                timer = threading.Timer(LATE_OUTPUT_S, self._compare, [request])
                timer.daemon = True
                timer.start()

    def _compare(self, request: Request) -> None:
        """Show output of other workers since the last comparison that this one has not."""
        with self._lock:
            outputs, request.outputs, request.is_comparing = request.outputs, defaultdict(Output), False
        for stream in ("stdout", "stderr"):
            groups: dict[bytes, list[int]] = defaultdict(list)
            for number in request.workers[1:]:
                if outputs[number, stream].chars or number not in request.failed:
                    groups[outputs[number, stream].finish()].append(number)
            groups.pop(outputs[0, stream].finish(), None)
            for numbers in groups.values():
                output = outputs[numbers[0], stream]
                text = output.text.rstrip("\n") or "nothing"
                left = f"\n… {output.chars - MAX_CHARS:,} more characters" if output.chars > MAX_CHARS else ""
                self._show_text(
                    request, f"{label(numbers)}:{chr(10) if chr(10) in text else ' '}{text}{left}\n", stream
                )

    def _show_text(self, request: Request, text: str, stream: str = "stderr") -> None:
        content = {"name": stream, "text": text}
        self.session.send(self.iopub_socket, "stream", content, request.message, ident=b"slice")


def label(numbers: Iterable[int]) -> str:
    """Return `worker 3` or `workers 1, 2, 3`."""
    found = sorted(numbers)
    return f"worker{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def main() -> None:
    """Run the kernel."""
    App.launch_instance(kernel_class=SliceKernel)
