"""A bucket on loopback: the local cloud's storage, with faults that a test switches on.

STORAGE_TESTBENCH=http://HOST:PORT in the environment selects another server, such as Google's storage-testbench, behind
a proxy with the same faults.
"""

import asyncio
import os
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class Bucket:
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
        self.faults: list[str] = []
        """Faults of the next requests: a status code, "reset", "stall", "lose the answer", "corrupt" (of a
        download), "forget the chunk" (a 308 without Range), or "fine"."""
        self.random, self.random_faults = random.Random(0), ()
        """Faults of one request in ten."""
        self.requests: list[str] = []
        """Methods and paths of all requests."""
        self.refuses_deletion = False
        """Deleting gets a 403, as under a retention policy."""
        self.stalled = False
        """No request is ever answered."""
        self.omits_zeros = False
        """Objects without bytes are described without a size, as by Google's storage-testbench."""

    async def answer(self, request, call_next):
        self.requests.append(f"{request.method} {request.url.path}")
        fault = self.faults.pop(0) if self.faults else "fine"
        if self.random_faults and self.random.random() < 0.1:
            fault = self.random.choice(self.random_faults)
        if self.stalled or fault == "stall":
            await asyncio.sleep(3600)
        if fault == "reset":
            raise ConnectionError("the connection breaks")
        if self.refuses_deletion and request.method == "DELETE":
            fault = "403"
        if fault.isdigit():
            return JSONResponse({"error": {"code": int(fault), "message": "as planned"}}, status_code=int(fault))
        if fault == "forget the chunk":
            await request.body()
            return Response(status_code=308)
        if self.denied or self.gone:
            code, message = (404, "The specified bucket does not exist.") if self.gone else (403, self.denied)
            body = {"error": {"code": code, "message": message, "errors": [{"message": message}]}}
            return JSONResponse(body, status_code=code)
        response = await call_next(request)
        if fault == "lose the answer":
            raise ConnectionError("the answer is lost")
        if fault == "corrupt" and request.query_params.get("alt") == "media":
            body = b"".join([part async for part in response.body_iterator])
            damaged = bytes([body[0] ^ 1]) + body[1:]
            return Response(damaged, response.status_code, dict(response.headers))
        if self.omits_zeros and response.headers.get("content-type", "").startswith("application/json"):
            text = b"".join([part async for part in response.body_iterator])
            shorter = re.sub(rb'"size": ?"0", ?', b"", text)
            headers = {**response.headers, "content-length": str(len(shorter))}
            response = Response(shorter, response.status_code, headers)
        self.refused += response.status_code == 412
        if self.lose_answers and request.method == "POST" and request.url.path.startswith("/upload/"):
            self.lose_answers -= 1
            raise ConnectionError("the answer is lost")
        return response


@contextmanager
def bucket(name: str, folder: Path) -> Iterator[Bucket]:
    from tpuswarm.cloud.rehearsal.common.api import Rejected
    from tpuswarm.cloud.rehearsal.common.records import Records
    from tpuswarm.cloud.rehearsal.storage.objects import Objects
    from tpuswarm.cloud.rehearsal.storage.service import Storage
    from tpuswarm.cloud.rehearsal.wire.rest import reject

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for an ACK
    made = Bucket(listener.getsockname()[1])
    ready, stops = threading.Event(), []

    async def serve():
        if upstream := os.environ.get("STORAGE_TESTBENCH"):
            served = proxy(upstream, name, made.endpoint)
        else:
            objects = Objects(Records(folder / "records.sqlite"), folder / "objects")
            objects.make_bucket("project", {"name": name})
            served = Starlette(routes=Storage(objects).routes(), exception_handlers={Rejected: reject})
        app = BaseHTTPMiddleware(served, made.answer)
        # From Python 3.12, a server waits for all its connections, also for requests that a fault never answers.
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))

        def stop():
            server.should_exit = server.force_exit = True

        stops.append(stop)
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


def proxy(upstream: str, name: str, endpoint: str) -> Starlette:
    """Forward requests to another server, after making its bucket empty."""
    import httpx

    with httpx.Client(base_url=upstream) as bench:
        bench.post("/storage/v1/b", params={"project": "project"}, json={"name": name})
        for stored in bench.get(f"/storage/v1/b/{name}/o").json().get("items", []):
            bench.delete(f"/storage/v1/b/{name}/o/{quote(stored['name'], safe='')}").raise_for_status()
    client = httpx.AsyncClient(base_url=upstream, timeout=60)

    async def forward(request):
        path = request.scope["raw_path"].decode()
        query = request.url.query
        headers = [(key, value) for key, value in request.headers.items() if key not in ("host", "content-length")]
        answer = await client.request(
            request.method, f"{path}?{query}" if query else path, headers=headers, content=await request.body()
        )
        kept = {
            key: value.replace(upstream, endpoint)
            for key, value in answer.headers.items()
            if key not in ("connection", "content-encoding", "content-length", "date", "server", "transfer-encoding")
        }
        return Response(answer.content, answer.status_code, kept)

    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
    return Starlette(routes=[Route("/{rest:path}", forward, methods=methods)])
