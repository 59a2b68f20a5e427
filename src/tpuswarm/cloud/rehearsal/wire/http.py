"""Serve HTTP on several addresses with one uvicorn server, to the token's owner only."""

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.responses import JSONResponse

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class Guard:
    """Refuse requests without the token, for another host's name, or from a page of another origin."""

    def __init__(self, app: Asgi, token: str):
        self._app = app
        self._token = f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        address, port = scope["server"]
        if headers.get(b"host", b"").decode("latin-1") not in (f"{address}:{port}", f"localhost:{port}"):
            refusal = (403, "PERMISSION_DENIED", f"This is {address}:{port}, and no other host.")
        elif b"origin" in headers:
            refusal = (403, "PERMISSION_DENIED", "Pages of browsers have no access.")
        elif not hmac.compare_digest(headers.get(b"authorization", b"").split(b"~")[0], self._token):
            refusal = (401, "UNAUTHENTICATED", "The request does not carry this local cloud's token.")
        else:
            await self._app(scope, receive, send)
            return
        code, status, message = refusal
        body = {"error": {"code": code, "message": message, "status": status}}
        await JSONResponse(body, code)(scope, receive, send)


class HttpServer:
    """Listens on one address for the cloud's APIs, and on one of each machine for its metadata server."""

    def __init__(self, app: Asgi):
        self._server = uvicorn.Server(_config(app))
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        self._serving = asyncio.create_task(self._server._serve([listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)

    async def listen(self, address: str, port: int, app: Asgi) -> asyncio.Server:
        config = _config(app)
        config.load()

        def protocol() -> asyncio.Protocol:
            protocol_class: Any = config.http_protocol_class
            return protocol_class(config=config, server_state=self._server.server_state, app_state={})

        return await asyncio.get_running_loop().create_server(protocol, address, port)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._serving:
            await self._serving


def _config(app: Asgi) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        timeout_graceful_shutdown=1,  # some calls wait for minutes
    )
