"""A bucket on loopback: the local cloud's storage, with faults that a test switches on."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route


class Bucket:
    """The bucket's address and its faults."""

    def __init__(self, port: int):
        self.endpoint = f"http://127.0.0.1:{port}"
        self.refused = 0
        """Writes refused because an object of that name exists."""
        self.lose_answers = 0
        """The next so many writes succeed, but the connection breaks before the answer."""
        self.denied = ""
        """The message of a 403 to every request; empty: requests are allowed."""
        self.gone = False
        """Every request gets a 404, as after somebody deleted the bucket."""

    def with_faults(self, app):
        async def respond(scope, receive, send):
            if self.denied or self.gone:
                code, message = (404, "The specified bucket does not exist.") if self.gone else (403, self.denied)
                body = {"error": {"code": code, "message": message, "errors": [{"message": message}]}}
                await JSONResponse(body, status_code=code)(scope, receive, send)
                return
            is_upload = scope["type"] == "http" and scope["path"].startswith("/upload/") and scope["method"] == "POST"
            is_lost = is_upload and self.lose_answers > 0
            self.lose_answers -= is_lost

            async def answer(event):
                self.refused += event.get("status") == 412
                if not is_lost:
                    await send(event)

            await app(scope, receive, answer)
            if is_lost:
                raise ConnectionError("the answer is lost")

        return respond


@contextmanager
def bucket(name: str, folder: Path) -> Iterator[Bucket]:
    """Serve an empty bucket."""
    from tpuswarm.cloud.rehearsal.common.call import Rejected
    from tpuswarm.cloud.rehearsal.common.records import Records
    from tpuswarm.cloud.rehearsal.web.objects import Objects
    from tpuswarm.cloud.rehearsal.web.storage import Storage
    from tpuswarm.cloud.rehearsal.wire.batch import batch
    from tpuswarm.cloud.rehearsal.wire.rest import reject

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for an ACK
    made = Bucket(listener.getsockname()[1])
    ready, stops = threading.Event(), []

    async def serve():
        objects = Objects(Records(folder / "records.sqlite"), folder / "objects")
        objects.make_bucket("project", {"name": name})
        routes = [*Storage(objects).routes(), Route("/batch/{rest:path}", batch, methods=["POST"])]
        app = made.with_faults(Starlette(routes=routes, exception_handlers={Rejected: reject}))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        stops.append(lambda: setattr(server, "should_exit", True))
        ready.set()
        await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield made
    finally:
        stops[0]()
        thread.join()
