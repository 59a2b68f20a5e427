"""HTTP: one server of uvicorn's, on as many addresses as there are."""

import asyncio
import socket
from typing import Any

import uvicorn

from tpuswarm.cloud.rehearsal.wire.guard import Asgi


class Web:
    """Listens on one address for the cloud's APIs, and on one of each machine for its metadata server."""

    def __init__(self, app: Asgi):
        self._server = uvicorn.Server(_config(app))
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Answer what comes in there."""
        self._serving = asyncio.create_task(self._server._serve([listener]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)

    async def listen(self, address: str, port: int, app: Asgi) -> asyncio.Server:
        """Let an app answer there, too."""
        config = _config(app)
        config.load()

        def protocol() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            return kind(config=config, server_state=self._server.server_state, app_state={})

        return await asyncio.get_running_loop().create_server(protocol, address, port)

    async def stop(self) -> None:
        """End, with the answers that are under way."""
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
