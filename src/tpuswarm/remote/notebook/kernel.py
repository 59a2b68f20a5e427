"""On worker 0 of a slice: a Jupyter kernel that runs each cell on all workers at once, in one JAX program.

This file is sent to the host and needs nothing but Python 3.10 and ipykernel there. Each worker has an engine, which is
IPython's own kernel; `worker.py` starts it there. What worker 0 shows is passed on as it is: text, plots, widgets,
progress bars. The others' output is shown once they are done, where it is not worker 0's. A first line `%%worker 2`
sends a cell to one worker alone.
"""

import asyncio
import hashlib
import json
import os
import re
import socket
import threading
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel
from jupyter_client.asynchronous import AsyncKernelClient

OURS = Path(__file__).resolve().parent
MAGIC = re.compile(r"\s*%%worker\b[ \t]*(\S*)[^\n]*(?:\n|$)")
CONNECTS_S, BEGINS_S = 20.0, 120.0
"""Seconds for a worker to take a connection, and for its engine to be there."""
PATIENCE_S = 5.0
"""Seconds after which it is said for whom a cell waits that has failed, or was interrupted, elsewhere."""
KEPT = 1 << 16
"""Characters of another worker's output that are kept; of the rest only a digest."""
PASSED = ("stream", "display_data", "update_display_data", "execute_result", "error", "clear_output",
          "comm_open", "comm_msg", "comm_close")  # fmt: skip
PROGRAM = """\
if hasattr(__import__("jax").config, "jax_enable_preemption_service"):
    __import__("jax").config.update("jax_enable_preemption_service", False)
__import__("jax").distributed.initialize({where!r}, {count}, {number}, cluster_detection_method="deactivate",
                                         coordinator_bind_address={where!r})
"""
"""What makes the engines one program; it leaves no name behind."""
ALL = "A slice is one program, so its other workers were ended too: restart the kernel"


class Gone(Exception):
    """A worker has no engine any more, or never had: why, in words."""


class Output:
    """What a worker other than 0 printed in a cell."""

    def __init__(self) -> None:
        self.text, self.length = "", 0
        self._digest = hashlib.sha256()

    def add(self, text: str) -> None:
        """More of it."""
        if "at 0x" in text:
            text = re.sub(r"\bat 0x[0-9a-f]+", "at 0x…", text)  # where an object lies is no difference
        self._digest.update(text.encode(errors="replace"))
        self.length += len(text)
        self.text += text[: KEPT - len(self.text)]

    @property
    def same(self) -> bytes:
        """Equal for what is equal."""
        return self._digest.digest()

    @property
    def shown(self) -> str:
        """As much as is kept."""
        left = self.length - len(self.text)
        return self.text + (f"\n… {left:,} more characters" if left else "")


class Worker:
    """One of them: its engine, and what is asked of it."""

    def __init__(self, number: int, at: tuple[str, int], secret: bytes, folder: str):
        self.number = number
        self._line: Any = None
        self._engine: Future[dict[str, Any]] = Future()
        self.gone: Future[str] = Future()
        """Done when its engine is: why."""
        self._replies: dict[str, asyncio.Future[Any]] = {}
        self._idle: dict[str, asyncio.Event] = {}
        self.printed, self.warned = Output(), Output()
        self.error: dict[str, Any] | None = None
        self._pumps: list[asyncio.Task[None]] = []
        threading.Thread(target=self._attend, args=(at, secret, folder), daemon=True).start()

    def _attend(self, at: tuple[str, int], secret: bytes, folder: str) -> None:
        """Hold the line to its host, by which an engine lives there."""
        try:
            socket.create_connection(at, CONNECTS_S).close()
            self._line = connection.Client(at, authkey=secret)
            keep_alive(self._line.fileno())
            self._line.send_bytes(json.dumps({"folder": folder}).encode())
            first = json.loads(self._line.recv_bytes())
            if "engine" in first:
                self._engine.set_result(first["engine"])
                first = json.loads(self._line.recv_bytes())
            if "refused" in first:
                why = f"{first['refused']}: shut that one down, then restart this one"
            else:
                why = self._lost(f"its process has ended: {first['ended']}")
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            why = self._lost(f"its host {at[0]} does not answer ({error or type(error).__name__})")
        self.gone.set_result(why)
        if not self._engine.done():
            self._engine.set_exception(Gone(why))

    def _lost(self, why: str) -> str:
        return f"worker {self.number} is lost: {why}. {ALL}"

    async def begin(self, hear: Any) -> None:
        """Wait for the engine. `hear`: takes each message that it publishes. Raises Gone."""
        try:
            about = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._engine)), BEGINS_S)
            context = zmq.asyncio.Context()
            context.setsockopt(zmq.RCVHWM, 0)  # nothing is left out, an end least of all
            self._client: Any = AsyncKernelClient(context=context)
            about["key"] = about["key"].encode()
            self._client.load_connection_info(about)
            self._client.start_channels(stdin=False, hb=False)
            await self._client.wait_for_ready(timeout=BEGINS_S)
        except (TimeoutError, RuntimeError) as error:
            raise Gone(self._lost(f"its process does not answer after {BEGINS_S:g} s")) from error
        self._pumps = [asyncio.ensure_future(self._pump_replies()), asyncio.ensure_future(self._pump_published(hear))]

    async def _pump_replies(self) -> None:
        while True:
            message = await self._client.get_shell_msg()
            waiting = self._replies.pop(message["parent_header"].get("msg_id"), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message["content"])

    async def _pump_published(self, hear: Any) -> None:
        while True:
            message = await self._client.get_iopub_msg()
            asked = message["parent_header"].get("msg_id")
            if message["msg_type"] == "status":
                if message["content"]["execution_state"] == "idle" and asked in self._idle:
                    self._idle[asked].set()
            else:
                hear(self, message)

    async def run(self, code: str, silent: bool, stored: bool, expressions: Any = None) -> dict[str, Any]:
        """Run a cell; its reply, once all that it has printed was heard."""
        self.printed, self.warned, self.error = Output(), Output(), None
        asked = self._client.execute(code, silent, stored, expressions, allow_stdin=False)
        self._idle[asked] = asyncio.Event()
        reply = await self._reply(asked)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle[asked].wait(), PATIENCE_S)
        del self._idle[asked]
        return reply

    async def ask(self, kind: str, *words: Any) -> dict[str, Any]:
        """What a request of another kind comes to: complete, inspect, is_complete."""
        return await self._reply(getattr(self._client, kind)(*words))

    def _reply(self, asked: str) -> "asyncio.Future[dict[str, Any]]":
        found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[asked] = found
        return found

    def pass_on(self, message: Any) -> None:
        """What has no reply: a widget's messages."""
        self._client.session.send(
            self._client.shell_channel.socket, message["msg_type"], message["content"],
            metadata=message["metadata"], buffers=message["buffers"],
        )  # fmt: skip

    def interrupt(self) -> None:
        """As Ctrl-C would."""
        with suppress(OSError, AttributeError):
            self._line.send_bytes(b"interrupt")

    def end(self) -> None:
        """Let go of its engine, which ends."""
        for each in self._pumps:
            each.cancel()
        with suppress(OSError, AttributeError), socket.socket(fileno=os.dup(self._line.fileno())) as held:
            held.shutdown(socket.SHUT_RDWR)  # to close it would not wake the thread that reads


class SliceKernel(Kernel):
    """The kernel."""

    implementation, implementation_version = "tpuswarm", "1"
    banner = "Each cell runs on all workers of the slice at once."
    language_info = {  # noqa: RUF012
        "name": "python", "mimetype": "text/x-python", "file_extension": ".py", "pygments_lexer": "ipython3",
        "codemirror_mode": {"name": "ipython", "version": 3},
    }  # fmt: skip

    def __init__(self, **about: Any):
        super().__init__(**about)
        found = json.loads((OURS / "slice.json").read_text())
        secret, folder = (OURS / "secret").read_bytes(), os.path.relpath(Path.cwd(), Path.home())
        self._workers = [Worker(n, tuple(each), secret, folder) for n, each in enumerate(found["workers"])]
        self._host = found["workers"][0][0]
        self._gone: list[asyncio.Future[str]] = []
        """Of each worker, in the kernel's loop; made once, since each has a callback there."""
        self._begun: asyncio.Task[None] | None = None
        self._lost = ""
        self._parent: Any = {}
        self._shown, self._showing = Output(), 0
        """What the worker whose output is passed on has printed, and which it is."""
        self._interrupted = False
        for kind in ("comm_open", "comm_msg", "comm_close"):
            self.shell_handlers[kind] = self._comm

    @property
    def kernel_info(self) -> dict[str, Any]:
        """Without subshells: a cell has all workers."""
        return {**super().kernel_info, "supported_features": []}

    # A cell.

    async def do_execute(
        self, code: str, silent: bool, store_history: bool = True, user_expressions: Any = None,
        allow_stdin: bool = False, *, cell_meta: Any = None, cell_id: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Run it on all workers, or on one; it ends where one of them is lost."""
        self._parent, self._interrupted = self.get_parent(), False
        chosen: Sequence[Worker] = self._workers
        if magic := MAGIC.match(code):
            code = code[magic.end() :]
            if not magic[1].isdecimal() or int(magic[1]) >= len(self._workers):
                last = len(self._workers) - 1
                return self._fail("UsageError", f"%%worker takes a worker's number, 0 to {last}, not {magic[1]!r}")
            chosen = [self._workers[int(magic[1])]]
        self._shown, self._showing = Output(), chosen[0].number
        try:
            await self._ready()
            expressions = user_expressions if chosen[0].number == 0 else None
            replies = await self._until_gone(self._run(chosen, code, silent, store_history, expressions))
        except Gone as gone:
            self._lose(str(gone))
            return self._fail("WorkerLost", self._lost)
        self._tell_others(chosen[1:])
        failed = [(each, reply) for each, reply in zip(chosen, replies, strict=True) if reply["status"] != "ok"]
        if not failed:
            return {**replies[0], "execution_count": self.execution_count}
        worker, reply = failed[0]
        if worker is not chosen[0]:
            error = worker.error or {"ename": reply.get("ename", "Aborted"), "evalue": reply.get("evalue", "")}
            self._fail(error["ename"], error["evalue"], [f"worker {worker.number}:", *error.get("traceback", ())])
        return {**reply, "execution_count": self.execution_count}

    async def _run(
        self, chosen: Sequence[Worker], code: str, silent: bool, stored: bool, expressions: Any
    ) -> list[dict[str, Any]]:
        """The reply of each; says whom it waits for where others have failed already, or do not hear an interrupt."""
        runs = [
            asyncio.ensure_future(each.run(code, silent, stored, expressions if each is chosen[0] else None))
            for each in chosen
        ]
        try:
            said, wait = False, set(runs)
            while wait:
                done, wait = await asyncio.wait(wait, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
                failed = [
                    each.number for each, run in zip(chosen, runs, strict=True)
                    if run.done() and run.result()["status"] != "ok"
                ]  # fmt: skip
                if wait and not done and not said and (failed or self._interrupted):
                    said = True
                    left = _workers(n.number for n, run in zip(chosen, runs, strict=True) if not run.done())
                    why = f"{_numbers(failed)} failed" if failed and not self._interrupted else "it was interrupted"
                    self._say(f"{why}, and {left} still at work, perhaps waiting for the others: restart the kernel\n")
            return [each.result() for each in runs]
        finally:
            for each in runs:
                each.cancel()

    async def _until_gone(self, work: Awaitable[Any]) -> Any:
        """What it comes to; raises Gone where a worker is lost meanwhile."""
        task = asyncio.ensure_future(work)
        gone = self._gone = self._gone or [asyncio.wrap_future(each.gone) for each in self._workers]
        await asyncio.wait([task, *gone], return_when=asyncio.FIRST_COMPLETED)
        lost = next((future.result() for future in gone if future.done()), None)
        if lost is None:
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        raise Gone(lost)

    def _lose(self, why: str) -> None:
        """End all engines; every cell from now on says why."""
        self._lost = self._lost or why
        for each in self._workers:
            each.end()

    async def _ready(self) -> None:
        """Wait until all engines are one program. Raises Gone."""
        if self._lost:
            raise Gone(self._lost)
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._begin())
        await asyncio.shield(self._begun)

    async def _begin(self) -> None:
        await self._until_gone(asyncio.gather(*(each.begin(self._hear) for each in self._workers)))
        with socket.create_server((self._host, 0)) as free:
            where = f"{self._host}:{free.getsockname()[1]}"
        count = len(self._workers)
        replies = await self._until_gone(
            asyncio.gather(*(
                each.run(PROGRAM.format(where=where, count=count, number=each.number), True, False)
                for each in self._workers
            ))
        )  # fmt: skip
        for each, reply in zip(self._workers, replies, strict=True):
            if reply["status"] != "ok":
                said = f"{reply.get('ename')}: {reply.get('evalue')}"
                self._say(f"worker {each.number} is not one JAX program with the others: {said}\n")

    # What is shown.

    def _hear(self, worker: Worker, message: Any) -> None:
        """What an engine has published: passed on, or kept for the end of the cell."""
        kind, content = message["msg_type"], message["content"]
        if kind not in PASSED:
            return
        first = worker.number == self._showing
        into = self._shown if first else worker.printed
        if kind == "stream" and content["name"] == "stderr":
            lines = content["text"].split("\n")  # without progress bars, which never agree on the time
            worker.warned.add("".join(f"{line}\n" for line in lines if line.strip() and "\r" not in line))
        elif kind == "stream":
            into.add(content["text"])
        elif kind in ("display_data", "execute_result"):
            into.add(content["data"].get("text/plain", "") + "\n")
        elif kind == "error":
            worker.error = content
        if first:
            if "execution_count" in content:
                content = {**content, "execution_count": self.execution_count}
            self.session.send(
                self.iopub_socket, kind, content, self._parent, ident=self._topic(kind),
                metadata=message["metadata"], buffers=message["buffers"],
            )  # fmt: skip

    def _tell_others(self, others: Sequence[Worker]) -> None:
        """What the others printed where it is something else; who else has failed."""
        first = self._workers[self._showing]
        self._tell("stdout", self._shown, {each.number: each.printed for each in others})
        self._tell("stderr", first.warned, {each.number: each.warned for each in others})
        if first.error is not None and first.error["ename"] != "KeyboardInterrupt":
            for each in others:
                if each.error is not None:
                    about = f"{each.error['ename']}: {each.error['evalue']}".removesuffix(": ")
                    self._say(f"worker {each.number} failed too: {about}\n")

    def _tell(self, name: str, shown: Output, others: dict[int, Output]) -> None:
        """Those of the others that are not what was shown; what is alike is said once."""
        alike: dict[bytes, list[int]] = {}
        for number, each in others.items():
            if each.same != shown.same and (each.length or self._workers[number].error is None):
                alike.setdefault(each.same, []).append(number)
        for numbers in alike.values():
            text = others[numbers[0]].shown.rstrip("\n") or "nothing"
            self._say(f"{_numbers(numbers)}:{' ' if chr(10) not in text else chr(10)}{text}\n", name)

    def _say(self, text: str, name: str = "stderr") -> None:
        content = {"name": name, "text": text}
        self.session.send(self.iopub_socket, "stream", content, self._parent, ident=self._topic("stream"))

    def _fail(self, name: str, value: str, traceback: Sequence[str] = ()) -> dict[str, Any]:
        """Show an error; the reply of its cell."""
        about = {"ename": name, "evalue": value, "traceback": [*traceback] or [f"{name}: {value}"]}
        self.session.send(self.iopub_socket, "error", about, self._parent, ident=self._topic("error"))
        return {"status": "error", "execution_count": self.execution_count, **about}

    # What is asked beside cells.

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        """As worker 0 knows it."""
        return await self._asked("complete", code, cursor_pos) or await super().do_complete(code, cursor_pos)

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> dict[str, Any]:
        """As worker 0 knows it."""
        found = await self._asked("inspect", code, cursor_pos, detail_level)
        return found or await super().do_inspect(code, cursor_pos, detail_level, omit_sections)

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        """Whether a cell is whole."""
        return await self._asked("is_complete", code) or {"status": "unknown"}

    async def _asked(self, kind: str, *words: Any) -> dict[str, Any] | None:
        try:
            await self._ready()
            return await self._until_gone(self._workers[0].ask(kind, *words))
        except Gone as gone:
            self._lose(str(gone))
            return None

    async def _comm(self, stream: Any, ident: Any, message: Any) -> None:
        """A widget's messages are worker 0's, who has made it."""
        with suppress(Gone):
            await self._ready()
            self._parent = message
            self._workers[0].pass_on(message)

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Reach all workers; comes on the control channel, while a cell runs."""
        self._interrupted = True
        for each in self._workers:
            each.interrupt()
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """Ends all engines."""
        for each in self._workers:
            each.end()
        return {"status": "ok", "restart": restart}


def keep_alive(number: int) -> None:
    """Notice within half a minute that the other host is gone."""
    with socket.socket(fileno=os.dup(number)) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _numbers(numbers: Any) -> str:
    """`worker 3`, `workers 1, 2, 3`."""
    found = [*numbers]
    return f"worker{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def _workers(numbers: Any) -> str:
    """The same with its verb's number left to the caller: `worker 3 is`, `workers 1, 2 are`."""
    found = [*numbers]
    return f"{_numbers(found)} {'are' if len(found) > 1 else 'is'}"


if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=SliceKernel)
