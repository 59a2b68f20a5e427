"""A bucket on loopback: the local cloud's storage, without its guard, and what may go wrong on the way to it."""

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
    """The bucket's address, and what is to go wrong."""

    def __init__(self, port: int):
        self.endpoint = f"http://127.0.0.1:{port}"
        self.refused = 0
        """Writes that met an object of their name."""
        self.lose_answers = 0
        """So many writes are carried out and not answered."""
        self.denied = ""
        """Who asks for anything is told that this is not allowed any more; empty: it is."""
        self.gone = False
        """Somebody has deleted it."""

    def over(self, app):
        """An application whose answers may be lost on the way."""

        async def respond(scope, receive, send):
            if self.denied or self.gone:
                code, why = (404, "The specified bucket does not exist.") if self.gone else (403, self.denied)
                body = {"error": {"code": code, "message": why, "errors": [{"message": why}]}}
                await JSONResponse(body, status_code=code)(scope, receive, send)
                return
            upload = scope["type"] == "http" and scope["path"].startswith("/upload/") and scope["method"] == "POST"
            lost = upload and self.lose_answers > 0
            self.lose_answers -= lost

            async def answer(event):
                self.refused += event.get("status") == 412
                if not lost:
                    await send(event)

            await app(scope, receive, answer)
            if lost:  # instead of an answer the connection ends
                raise ConnectionError("the answer is lost")

        return respond


@contextmanager
def bucket(name: str, folder: Path) -> Iterator[Bucket]:
    """An empty bucket."""
    from tpuswarm.cloud.rehearsal.common.call import Rejected
    from tpuswarm.cloud.rehearsal.common.records import Records
    from tpuswarm.cloud.rehearsal.web.objects import Objects
    from tpuswarm.cloud.rehearsal.web.storage import Storage
    from tpuswarm.cloud.rehearsal.wire.batch import batch
    from tpuswarm.cloud.rehearsal.wire.rest import reject

    listener = socket.create_server(("127.0.0.1", 0))
    made = Bucket(listener.getsockname()[1])
    ready, over = threading.Event(), []

    async def serve():
        objects = Objects(Records(folder / "records.sqlite"), folder / "objects")
        objects.make_bucket("project", {"name": name})
        routes = [*Storage(objects).routes(), Route("/batch/{rest:path}", batch, methods=["POST"])]
        app = made.over(Starlette(routes=routes, exception_handlers={Rejected: reject}))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        over.append(lambda: setattr(server, "should_exit", True))
        ready.set()
        await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield made
    finally:
        over[0]()
        thread.join()
