"""The kernel of each worker but the first, which gets its cells from kernel.py, and what all workers' kernels share."""

import asyncio
import base64
import hashlib
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection
from typing import Any

import comm
import zmq
from ipykernel.comm.comm import BaseComm
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from IPython.core.error import StdinNotImplementedError

MAGIC = re.compile(r"(?:\s*#[^\n]*\n|\s*\n)*\s*%%worker\b[ \t]*(\S*)[^\n]*\n?")
"""The line that sends a cell to one worker, after comments and empty lines."""


class Tap:
    """The iopub socket, which shows each message to its kernel before it sends it."""

    def __init__(self, socket: Any):
        self._socket = socket
        self.passes: Callable[[Sequence[bytes]], bool] = lambda frames: True

    def send_multipart(self, frames: Sequence[bytes], *args: Any, **options: Any) -> Any:
        """Send the frames unless the kernel holds them back."""
        return self._socket.send_multipart(frames, *args, **options) if self.passes(frames) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class App(IPKernelApp):
    """Never drops output, and shows it to the kernel first."""

    def init_iopub(self, context: Any) -> None:
        """Open the socket without a high-water mark."""
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)
        self.iopub_thread.socket = Tap(self.iopub_thread.socket)


class Mirrored(IPythonKernel):
    """IPython's kernel, with what must be alike on all workers: interrupts, and the identifiers of widgets."""

    def __init__(self, **about: Any):
        self.opened: list[str] = []
        """Comms that the current request has opened."""
        self.error: dict[str, Any] = {}
        """The last error that the current request has published."""
        self._request = self._running = self.interrupted = ""
        """Identifiers of the current request, of one whose user code runs, and of the last interrupted one."""
        super().__init__(**about)
        self.shell.input_transformers_cleanup.insert(0, without_magic)
        self.iopub_thread.socket.passes = self._passes
        comm.create_comm = self._create_comm

    def start(self) -> None:
        """Start; from now on an interrupt ends user code and nothing else."""
        super().start()
        signal.signal(signal.SIGINT, self._raise_interrupt)

    def pre_handler_hook(self) -> None:
        """Leave the signal handler in place."""

    post_handler_hook = pre_handler_hook

    def _raise_interrupt(self, *_: Any) -> None:
        if self._running:
            raise KeyboardInterrupt

    def interrupt(self, request_id: str) -> None:
        """Interrupt the user code of this request, now or when it begins."""
        self.interrupted = request_id
        if self._running == request_id:
            self._send_interrupt_children()

    async def run_user_code(self, request_id: str, work: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
        """Await the work, which an interrupt ends; return the reply to the request."""
        self._request, self.opened, self.error = request_id, [], {}
        reply: dict[str, Any] | None = None
        try:
            self._running = request_id
            if self.interrupted == request_id:
                raise KeyboardInterrupt
            reply = await work()
        except (KeyboardInterrupt, asyncio.CancelledError):
            self._running = ""
            self.show_error({"ename": "KeyboardInterrupt", "evalue": "", "traceback": ["KeyboardInterrupt"]})
        finally:
            self._running = ""
        sys.stdout.flush()
        sys.stderr.flush()
        published = threading.Event()  # a flush returns before its messages are sent
        self.iopub_thread.schedule(published.set)
        published.wait()
        return {"status": "error" if self.error else "ok", **self.error, **(reply or {})}

    def show_error(self, error: dict[str, Any], parent: Any = None, ident: bytes = b"error") -> None:
        """Publish an error."""
        self.session.send(self.iopub_socket, "error", error, parent or self.get_parent(), ident=ident)

    def _passes(self, frames: Sequence[bytes]) -> bool:
        """Note a message before it is published; return whether it may be."""
        header, parent, metadata, content = frames[frames.index(b"<IDS|MSG>") + 2 :][:4]
        kind, request_id = json.loads(header)["msg_type"], json.loads(parent).get("msg_id", "")
        if kind in ("status", "execute_input") or kind.startswith("comm_"):
            return self.publish(kind, request_id, {}, {}, frames[0])
        found = json.loads(content)
        if kind == "error" and request_id == self._request:
            self.error = found
        return self.publish(kind, request_id, found, json.loads(metadata), frames[0])

    def publish(self, kind: str, request_id: str, content: Any, metadata: Any, ident: bytes) -> bool:
        """Note a message; return whether this worker's own clients get it."""
        raise NotImplementedError

    def _create_comm(
        self, target_name: str = "comm", data: Any = None, metadata: Any = None, buffers: Any = None,
        comm_id: str | None = None, **about: Any,
    ) -> Any:  # fmt: skip
        """Create a comm; workers that create the same one at the same place give it the same identifier."""
        if comm_id is None:
            place = [self._request, len(self.opened), target_name, data]
            text = json.dumps(place, sort_keys=True, default=lambda value: type(value).__name__)
            comm_id = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.opened.append(comm_id)
        return BaseComm(target_name, data, metadata, buffers, comm_id, **about)


class Engine(Mirrored):
    """The kernel of a worker other than the first, which is its only client."""

    def __init__(self, **about: Any):
        self._line = connection.Connection(int(os.environ.pop("TPUSWARM_ENGINE_FD")))
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        super().__init__(**about)

    def start(self) -> None:
        """Start, and take messages."""
        super().start()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                message = json.loads(self._line.recv_bytes())
                task, request_id = message["do"], message["id"]
                if task == "interrupt":
                    self.interrupt(request_id)
                elif task == "answer":
                    self._answers.put(message)
                elif task in COLLECTIVE:
                    in_thread(COLLECTIVE[task], *message["values"]).add_done_callback(partial(self._report, request_id))
                else:
                    self.io_loop.add_callback(self._perform, message)

    def _report(self, request_id: str, done: "Future[None]") -> None:
        self._send(done=request_id, raised=done.exception())

    def _send(self, **message: Any) -> None:
        data = json.dumps(message, default=repr).encode()
        with self._sending, suppress(OSError):
            self._line.send_bytes(data)

    async def _perform(self, message: dict[str, Any]) -> None:
        """Run a cell or handle a comm's message, one at a time, and reply."""
        async with self._main_asyncio_lock:
            self.set_parent([], {"header": {"msg_id": message["id"], "msg_type": "execute_request", "session": ""}})
            work = self._run_cell if message["do"] == "run" else self._handle_comm
            reply = await self.run_user_code(message["id"], lambda: work(message))
            fields = {key: reply[key] for key in ("status", "ename", "evalue", "traceback") if key in reply}
            self._send(done=message["id"], **fields, opened=self.opened, has_devices=has_devices())

    async def _run_cell(self, message: dict[str, Any]) -> dict[str, Any]:
        shell = self.shell
        shell.execution_count = message["count"]
        for cells in (shell.history_manager.input_hist_parsed, shell.history_manager.input_hist_raw):
            cells += [""] * (shell.execution_count - len(cells))  # cells of other workers alone
        return await self.do_execute(message["code"], message["silent"], message["store"], None, message["stdin"])

    async def _handle_comm(self, message: dict[str, Any]) -> None:
        message["buffers"] = [base64.b64decode(buffer) for buffer in message["buffers"]]
        getattr(self.comm_manager, message["kind"])(None, [], message)

    def publish(self, kind: str, request_id: str, content: Any, metadata: Any, ident: bytes) -> bool:
        """Send output to the first worker."""
        if content:
            self._send(kind=kind, id=request_id, content=content, metadata=metadata)
        return False

    def _input_request(self, prompt: str, ident: Any, parent: Any, password: bool = False) -> str:
        """Wait for the answer that the first worker got."""
        while True:
            with suppress(queue.Empty):
                answer = self._answers.get(timeout=0.1)  # an interrupt ends it
                if answer["id"] == parent["header"]["msg_id"]:
                    break
        if "value" not in answer:
            raise EOFError if answer["is_eof"] else StdinNotImplementedError("input() did not run on worker 0")
        return str(answer["value"])


def without_magic(lines: list[str]) -> list[str]:
    """Drop a line that sends a cell to one worker."""
    text = "".join(lines)
    found = MAGIC.match(text)
    return text[found.end() :].splitlines(keepends=True) if found else lines


def in_thread(work: Callable[..., None], *values: Any) -> "Future[None]":
    """Run in a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work(*values)
            future.set_result(None)
        except Exception as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextmanager
def reserve_port(name: str) -> Iterator[int]:
    """Keep a free port from other programs until JAX's coordinator, which shares its port, listens on it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((name, 0))
        yield int(reserved.getsockname()[1])


def join(address: str, count: int, number: int) -> None:
    """Become one of the processes of a JAX program."""
    import jax

    if hasattr(jax.config, "jax_enable_preemption_service"):
        jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address, count, number, cluster_detection_method="deactivate", coordinator_bind_address=address
    )


def meet(place: str, *_: Any) -> None:
    """Wait for all workers at this place of the program; fail if one is at another place."""
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(place)


COLLECTIVE: dict[str, Callable[..., None]] = {"join": join, "meet": meet}


def has_devices() -> bool:
    """Return whether a cell has used devices."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def main() -> None:
    """Run an engine on the connection whose descriptor is the first argument."""
    os.environ["TPUSWARM_ENGINE_FD"] = descriptor = sys.argv.pop(1)
    os.set_inheritable(int(descriptor), False)
    App.launch_instance(kernel_class=Engine)
