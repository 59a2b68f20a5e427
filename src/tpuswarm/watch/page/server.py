"""Serve the page: on loopback only, behind a token, without anything from other servers."""

import asyncio
import base64
import errno
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tpuswarm.errors import InputError
from tpuswarm.train.look.pictures import FOLDER
from tpuswarm.watch.page.guard import LOOPBACK, refuse_request
from tpuswarm.watch.page.live import LivePage
from tpuswarm.watch.page.metrics import CONTENT_TYPE, metrics_text
from tpuswarm.watch.page.pages import Pages

LOG_TAIL_BYTES = 1 << 16


def open_listener(port: int) -> socket.socket:
    """Listen on a port of this computer; raise InputError if it is taken."""
    # asyncio turns off Nagle's algorithm (40 ms delay) only if the protocol number is TCP's.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of this computer is in use; for the next one: --port {port + 1}") from error
        raise
    return listener


async def serve(pages: Pages, listener: socket.socket, token: str, ready: Callable[[], None]) -> None:
    """Serve until a signal ends it."""
    import uvicorn

    app = make_app(pages, token, listener.getsockname()[1])
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, lifespan="on", proxy_headers=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    ready()
    await serving


def make_app(pages: Pages, token: str, port: int) -> ASGIApp:
    """Make the web application."""

    @asynccontextmanager
    async def watching(_: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(pages.watch())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def page(request: Request) -> Response:
        text, policy = document()
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    async def stream(request: Request) -> Response:
        live = await _page_of(pages, request)

        async def lines() -> AsyncIterator[str]:
            async for kind, data in live.messages():
                yield f"event: {kind}\ndata: {data}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def events(request: Request) -> Response:
        before = request.query_params.get("before", "")
        if not before.isdecimal():
            return PlainTextResponse("before: a number is missing", 400)
        return JSONResponse(await (await _page_of(pages, request)).older(int(before)))

    async def log(request: Request) -> Response:
        name = request.query_params.get("of", "")
        return PlainTextResponse(await _read_log(await _page_of(pages, request), name))

    async def picture(request: Request) -> Response:
        step, folder = request.query_params.get("step", ""), (await _page_of(pages, request)).folder
        path = folder / FOLDER / f"{int(step):08d}.png" if folder and step.isdecimal() else None
        if path is None or not path.is_file():
            return PlainTextResponse(f"there is no picture of {step or 'no step'}", 404)
        return Response(await asyncio.to_thread(path.read_bytes), media_type="image/png")

    async def metrics(request: Request) -> Response:
        state = await pages.first.fresh()
        return Response(metrics_text(state, pages.first.hosts.rows(state)), media_type=CONTENT_TYPE)

    async def refuse(request: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), 404)

    handlers = {"/": page, "/stream": stream, "/events": events, "/log": log, "/picture": picture, "/metrics": metrics}
    routes = [Route(path, answer) for path, answer in handlers.items()]
    return _guard(Starlette(routes=routes, lifespan=watching, exception_handlers={InputError: refuse}), token, port)


async def _page_of(pages: Pages, request: Request) -> LivePage:
    return await pages.find(request.query_params.get("run", ""))


async def _read_log(live: LivePage, name: str) -> str:
    """Return the last log lines of a process of the run, or of the jobs on a machine."""
    folder = live.folder
    for path in [*folder.glob("*.log"), *folder.glob("logs/*.log")] if folder else ():
        if path.stem == name:
            return await asyncio.to_thread(_read_log_tail, path)
    state = live.state()
    if state.machines is not None:
        return await live.hosts.log(name.removeprefix("j-"), state.machines.document)
    raise InputError(f"there is no log of {name or 'nothing'} here")


def _read_log_tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_TAIL_BYTES))
        data = file.read()
    return (data if size <= LOG_TAIL_BYTES else data.partition(b"\n")[2]).decode(errors="replace")


def _guard(app: ASGIApp, token: str, port: int) -> ASGIApp:
    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return

        async def private(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (b"cache-control", b"no-store"), (b"referrer-policy", b"no-referrer"),
                    (b"x-content-type-options", b"nosniff"),
                ]  # fmt: skip
            await send(message)

        request = Request(scope)
        if refused := refuse_request(request.headers, request.query_params.get("token"), token, port):
            code, sentence = refused
            await PlainTextResponse(f"{sentence}\n", code)(scope, receive, private)
        else:
            await app(scope, receive, private)

    return guarded


@cache
def document() -> tuple[str, str]:
    """Return the page with its style and script, and a policy that forbids the browser anything else."""
    here = files("tpuswarm.watch.page").joinpath("static")

    def text(name: str) -> str:
        return here.joinpath(name).read_text(encoding="utf-8")

    style, script = text("page.css"), "\n".join(map(text, ("plot.js", "page.js")))
    html = text("page.html").replace("/*page.css*/", style).replace("/*page.js*/", script)
    digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script)]
    policy = (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy
