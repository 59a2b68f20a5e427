"""A bucket on loopback: the storage emulator, and what it lacks of the real one: if-generation-match 0."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest


class Bucket:
    """The bucket's address, and what is to go wrong."""

    def __init__(self, port: int):
        self.endpoint = f"http://127.0.0.1:{port}"
        self.refused = 0
        """Writes that met an object of their name."""
        self.lose_answers = 0
        """So many writes are carried out and not answered."""


@contextmanager
def bucket(name: str) -> Iterator[Bucket]:
    """An empty bucket."""
    pytest.importorskip("gcp_storage_emulator")
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.server import RequestHandler
    from gcp_storage_emulator.storage import Storage

    storage = Storage(use_memory_fs=True)
    create_bucket(name, storage)

    class Handler(RequestHandler):
        def __init__(self, *args):
            super().__init__(storage, *args)

        def do_POST(self):  # noqa: N802
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.rfile = io.BytesIO(body)
            query = parse_qs(urlsplit(self.path).query)
            if query.get("ifGenerationMatch") == ["0"] and self.exists(query, body):
                made.refused += 1
                self.send_response(412)
                self.end_headers()
                return
            if query.get("uploadType") == ["multipart"] and made.lose_answers:
                made.lose_answers -= 1
                self.wfile = io.BytesIO()
                super().do_POST()
                self.connection.close()
                return
            super().do_POST()

        def exists(self, query, body):
            if "name" in query:
                key = query["name"][0]
            else:  # a multipart body: metadata, then content
                key = json.loads(body.split(b"\n\n", 1)[1].split(b"\n--", 1)[0])["name"]
            try:
                storage.get_file_obj(name, key)
            except NotFound:
                return False
            return True

    class Server(HTTPServer):  # one request at a time
        def handle_error(self, request, client_address):
            """A client that went away is none of our business."""

    server = Server(("127.0.0.1", 0), Handler)
    made = Bucket(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
