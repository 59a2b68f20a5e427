"""Cells of a notebook, run as a page runs them: through the server's REST and its websocket."""

import json
import re
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import websocket

from tests.hosts import free_port

if TYPE_CHECKING:
    from tests.remote.conftest import Fleet

PATIENCE_S = 240.0


class Shown:
    """What a cell shows, without the lines of JAX's CPU collectives, which come at any time."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.streams = {"stdout": "", "stderr": ""}
        self.error = ""
        """`NAME: VALUE` of each error, with its traceback."""
        self.types: list[str] = []
        """MIME types of displayed objects."""
        self.reply: dict[str, Any] = {}
        self.is_idle = False
        self._began = time.monotonic()

    @property
    def text(self) -> str:
        """Standard output, and the results."""
        return re.sub(r"(?m)^\[Gloo\].*\n", "", self.streams["stdout"])

    @property
    def errors(self) -> str:
        return re.sub(r"(?m)^\[Gloo\].*\n", "", self.streams["stderr"])

    def add(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        self.messages.append(message)
        if kind == "stream":
            self.streams[content["name"]] += content["text"]
        elif kind in ("execute_result", "display_data"):
            self.streams["stdout"] += content["data"].get("text/plain", "") + "\n"
            self.types += content["data"]
        elif kind == "error":
            trace = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            self.error += f"{content['ename']}: {content['evalue']}\n{trace}\n"
        elif kind == "status":
            self.is_idle = content["execution_state"] == "idle"
        elif kind == "execute_reply":
            self.reply = content
        self.seconds = time.monotonic() - self._began


class Server:
    def __init__(self, printed: str):
        """printed: by `tpuswarm notebook`."""
        found = re.search(r"http://127\.0\.0\.1:(\d+)/lab\?token=([\w-]+)", printed)
        assert found, printed
        self.port, self.token = int(found[1]), found[2]
        self.url = found[0]

    def request(self, method: str, path: str, body: Any = None, token: str | None = None, **headers: str) -> Any:
        """Request JSON; with a token or headers of one's own, the status and the headers of the answer."""
        data = None if body is None else json.dumps(body).encode()
        authorization = {"Authorization": f"token {self.token if token is None else token}"}
        message = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {**authorization, **headers}, method=method
        )
        if token is None and not headers:
            with urllib.request.urlopen(message, timeout=PATIENCE_S) as answer:
                return json.loads(answer.read() or b"null")
        try:
            with urllib.request.urlopen(message, timeout=PATIENCE_S) as answer:
                return answer.status, dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers)

    def has_one_connected_kernel(self) -> bool:
        """Return whether a page is connected to the only kernel; Jupyter answers 500 while a kernel is starting."""
        try:
            return [kernel["connections"] for kernel in self.request("GET", "/api/kernels")] == [1]
        except urllib.error.HTTPError as error:
            assert error.code == 500, error
            return False

    def end_kernels(self) -> None:
        for kernel in self.request("GET", "/api/kernels"):
            self.request("DELETE", f"/api/kernels/{kernel['id']}")

    def kernel(self) -> "Cells":
        return Cells(self, self.request("POST", "/api/kernels", {})["id"])


class Cells:
    def __init__(self, server: Server, id: str):
        self.id = id
        self.connect(server)

    def connect(self, server: Server) -> None:
        """Reach the kernel through this server; the first messages are those that it sent meanwhile."""
        self.server = server
        url = f"ws://127.0.0.1:{server.port}/api/kernels/{self.id}/channels?session_id=tests&token={server.token}"
        self._socket = websocket.create_connection(url, timeout=PATIENCE_S)

    def _send(self, kind: str, content: Mapping[str, Any]) -> str:
        id = uuid.uuid4().hex
        header = {"msg_id": id, "msg_type": kind, "username": "", "session": "tests", "version": "5.3"}
        rest = {"parent_header": {}, "metadata": {}, "channel": "shell", "buffers": []}
        self._socket.send(json.dumps({"header": header, "content": content, **rest}))
        return id

    def _answers(self, id: str) -> Iterator[dict[str, Any]]:
        while True:
            message = json.loads(self._socket.recv())
            if message["parent_header"].get("msg_id") == id:
                yield message

    def run(self, code: str, call_at: str = "", callback: Callable[[], object] = lambda: None) -> Shown:
        """Run a cell to its end, and call `callback` once it has printed `call_at`."""
        shown = Shown()
        for message in self._answers(
            self._send("execute_request", {"code": code, "silent": False, "allow_stdin": False})
        ):
            shown.add(message)
            if call_at and call_at in shown.text:
                call_at = ""
                callback()
            if shown.reply and shown.is_idle:
                return shown
        raise AssertionError

    def interrupt(self) -> None:
        self.server.request("POST", f"/api/kernels/{self.id}/interrupt", {})

    def restart(self) -> None:
        self.server.request("POST", f"/api/kernels/{self.id}/restart", {})
        self._socket.close()
        self.connect(self.server)

    def shut_down(self) -> None:
        self._socket.close()
        self.server.request("DELETE", f"/api/kernels/{self.id}")


@contextmanager
def opened(fleet: "Fleet", *words: str) -> Iterator[Server]:
    """Run the command until the end of the block, and end it with Ctrl-C."""
    process = fleet.start("notebook", *words, "--port", str(free_port()))
    try:
        printed = ""
        while "Ctrl-C disconnects" not in printed:
            line = process.stdout.readline()
            assert line, printed + process.stderr.read()
            printed += line
        yield Server(printed)
    finally:
        assert "disconnected; Jupyter and its kernels keep running" in fleet.interrupt(process)
