"""Cells of a notebook, run as a page runs them: through the server's REST and its websocket."""

import json
import re
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import websocket

PATIENCE = 300.0


class Shown(NamedTuple):
    """What a cell has come to."""

    text: str
    """Standard output, and the results."""
    errors: str
    """Standard error."""
    failed: str
    """`NAME: VALUE` of its error, with the traceback."""
    types: tuple[str, ...]
    """MIME types of what it displayed."""
    seconds: float


class Server:
    """A Jupyter Server at a port of this computer."""

    def __init__(self, said: str):
        """said: what `tpuswarm notebook` printed."""
        found = re.search(r"http://127\.0\.0\.1:(\d+)/lab\?token=([\w-]+)", said)
        assert found, said
        self.port, self.token = int(found[1]), found[2]
        self.url = found[0]

    def ask(self, method: str, path: str, about: Any = None, token: str | None = None, **headers: str) -> Any:
        """The answer of the server as JSON; with other headers a pair of the status and the answer's headers."""
        data = None if about is None else json.dumps(about).encode()
        authorization = {"Authorization": f"token {self.token if token is None else token}"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {**authorization, **headers}, method=method
        )
        if token is None and not headers:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or b"null")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers)

    def end_kernels(self) -> None:
        """Shut down all that there are."""
        for each in self.ask("GET", "/api/kernels"):
            self.ask("DELETE", f"/api/kernels/{each['id']}")

    def kernel(self) -> "Cells":
        """A new kernel."""
        return Cells(self, self.ask("POST", "/api/kernels", {})["id"])


class Cells:
    """One kernel of it."""

    def __init__(self, server: Server, id: str):
        self.server, self.id = server, id
        self._connect()

    def _connect(self) -> None:
        at = f"ws://127.0.0.1:{self.server.port}/api/kernels/{self.id}/channels?token={self.server.token}"
        self._socket = websocket.create_connection(at, timeout=PATIENCE)

    def send(self, kind: str, content: Mapping[str, Any]) -> str:
        """Ask the kernel something."""
        asked = uuid.uuid4().hex
        header = {"msg_id": asked, "msg_type": kind, "username": "", "session": "tests", "version": "5.3"}
        about = {"parent_header": {}, "metadata": {}, "channel": "shell", "buffers": []}
        self._socket.send(json.dumps({"header": header, "content": content, **about}))
        return asked

    def messages(self, asked: str) -> Iterator[dict[str, Any]]:
        """All that belongs to it, as it comes."""
        while True:
            message = json.loads(self._socket.recv())
            if message["parent_header"].get("msg_id") == asked:
                yield message

    def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """The reply to a request."""
        return next(each["content"] for each in self.messages(self.send(kind, content)) if each["channel"] == "shell")

    def run(self, code: str, interrupts_at: str | None = None) -> Shown:
        """Run a cell to its end; interrupt it once it has printed that."""
        began, left = time.monotonic(), {"execute_reply", "idle"}
        text, errors, failed, types = "", "", "", []
        asked = self.send("execute_request", {"code": code, "silent": False, "allow_stdin": False})
        for message in self.messages(asked):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                text += content["text"]
            elif kind == "stream":
                errors += content["text"]
            elif kind in ("execute_result", "display_data"):
                text += content["data"].get("text/plain", "") + "\n"
                types += content["data"]
            elif kind == "error":
                trace = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
                failed = f"{content['ename']}: {content['evalue']}\n{trace}"
            left -= {kind, content.get("execution_state")}
            if interrupts_at and interrupts_at in text:
                interrupts_at = None
                self.interrupt()
            if not left:
                return Shown(text, errors, failed, tuple(types), time.monotonic() - began)
        raise AssertionError

    def interrupt(self) -> None:
        """As the square in a toolbar does."""
        self.server.ask("POST", f"/api/kernels/{self.id}/interrupt", {})

    def restart(self) -> None:
        """As the arrow does."""
        self.server.ask("POST", f"/api/kernels/{self.id}/restart", {})
        self._socket.close()
        self._connect()

    def end(self) -> None:
        """Shut it down."""
        self._socket.close()
        self.server.ask("DELETE", f"/api/kernels/{self.id}")
