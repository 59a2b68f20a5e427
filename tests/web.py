"""A web server on loopback for tests."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def serve_web(answer: Callable[[str, Mapping[str, str]], tuple[int, bytes]]) -> Iterator[str]:
    """Answer GET and POST requests, of a path and headers, with a status and a body; yield HOST:PORT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def serve_folder(
    folder: Path, headers: Mapping[str, str] | None = None, counts: Counter[str] | None = None
) -> Iterator[str]:
    """Serve the files of a folder; yield http://HOST:PORT.

    headers: sent in place of Last-Modified; may change meanwhile. counts: requests by method.
    """

    class Handler(SimpleHTTPRequestHandler):
        def send_header(self, name: str, value: str) -> None:
            if headers is None or name != "Last-Modified":
                super().send_header(name, value)

        def end_headers(self) -> None:
            for name, value in (headers or {}).items():
                super().send_header(name, value)
            super().end_headers()

        def log_message(self, *arguments: object) -> None:
            if counts is not None:
                counts[self.command] += 1

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
