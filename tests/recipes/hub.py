"""A Hugging Face hub on loopback: what fetching files needs of its HTTP interface, and faults."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the folders `root/ORG/NAME` as repositories of one commit, under /ORG/NAME/resolve/REVISION/FILE."""

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.requests: list[tuple[str, str, str | None]] = []
        """Method, file and Range of each."""
        self.cut_answers: dict[str, int] = {}
        """File → how many more answers break off half-way."""
        self.delay_s = 0.0
        self.is_down = False
        """Answers every request with 503."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        if not file:  # not a request for a file
            return self._end(404, {})
        self.server.requests.append((self.command, file, self.headers["Range"]))
        sleep(self.server.delay_s)
        path = self.server.root / repository / file
        if self.server.is_down:
            return self._end(503, {})
        if not path.parent.is_dir():
            return self._end(401, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._end(404, {"X-Error-Code": "RevisionNotFound"})
        if not path.is_file():
            return self._end(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        data = path.read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        sent = rest = data[start:]
        if body and self.server.cut_answers.get(file):
            self.server.cut_answers[file] -= 1
            sent = rest[: len(rest) // 2] if not start else b""
            self.close_connection = True
        return self._end(206 if start else 200, headers, rest, sent if body else b"")

    def _end(self, code: int, headers: dict[str, str], whole: bytes = b"", sent: bytes = b"") -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(whole)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, format: str, *args: Any) -> None:
        pass
