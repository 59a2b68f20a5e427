"""Serve the gateway by HTTPS, to people with an invite."""

import asyncio
import socket
import ssl
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tpuswarm.errors import InputError
from tpuswarm.swarm.anywhere import wire
from tpuswarm.swarm.anywhere.certificate import ensure_certificate
from tpuswarm.swarm.anywhere.gateway import Gateway, RemoteMember
from tpuswarm.swarm.anywhere.invites import InviteBook
from tpuswarm.swarm.anywhere.transfers import ANSWERS_PER_LARGEST, DIGEST, PART_BYTES, Answers, Uploads
from tpuswarm.swarm.core.messages import Refused
from tpuswarm.swarm.processes.effects import Call, Unreachable

MAX_OVERHEAD_BYTES = 2**22
"""Size of a message besides its arrays."""
MAX_FAILURES, FAILURE_WINDOW_S = 20, 60.0
"""After so many wrong secrets from one address within this time, the next are not told why they are refused."""
MAX_PEERS = 10_000
"""Addresses whose wrong secrets are remembered."""
MAX_CALLS, MAX_CALLS_OF_A_PERSON = 32, 16
"""Calls that are executed at a time. Each holds its message in memory."""
BODY_TIMEOUT_S = 300.0
"""A request must have arrived within this time."""
MAX_IDLE_CONNECTION_S = 30.0
"""A connection is closed after this time without a request; members keep theirs busy."""


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on an address. Raise InputError if that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise InputError(f"--listen {host}:{port} is impossible: {error.strerror}; use another address") from error
    return listener


class _Protocol(H11Protocol):
    """Closes a connection on which no request arrives: nobody without an invite can occupy them all."""

    _answers = 0
    """Answers on this connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in H11Protocol
        super().connection_made(transport)
        self.loop.call_later(MAX_IDLE_CONNECTION_S, self._close_if_idle, 0)

    def on_response_complete(self) -> None:
        self._answers += 1
        super().on_response_complete()

    def _close_if_idle(self, answers: int) -> None:
        is_working = self.cycle and not self.cycle.response_complete
        if self._answers == answers and not is_working:
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(MAX_IDLE_CONNECTION_S, self._close_if_idle, self._answers)


def make_server(app: Starlette, certificate: Path) -> uvicorn.Server:
    """Make the web server."""
    config = uvicorn.Config(
        app, log_level="error", access_log=False, lifespan="off", proxy_headers=False, server_header=False,
        timeout_graceful_shutdown=1, ssl_certfile=certificate, ssl_keyfile=certificate, http=_Protocol, ws="none",
    )  # fmt: skip
    config.load()
    assert config.ssl is not None
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    return uvicorn.Server(config)


class GatewayWork:
    """The work of the gateway's process."""

    def __init__(self, gateway: Gateway, folder: Path, listen: tuple[str, int], largest: int):
        """folder: of the run; largest: bytes of the largest array of a request."""
        self._gateway, self._folder, self._listen, self._largest = gateway, folder, listen, largest

    def serve(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Let the supervisor change a member."""
        if method != "update":
            raise Unreachable(method)
        self._gateway.update(*arguments)

    def run(self) -> str:
        """Serve to the end of the process. Raise InputError if it cannot listen."""
        listener = open_listener(*self._listen)
        with tempfile.TemporaryDirectory(prefix="tpuswarm-gateway-") as folder:
            app = make_app(self._gateway, InviteBook(self._folder), self._largest, Path(folder))
            asyncio.run(make_server(app, ensure_certificate(self._folder)).serve([listener]))
        return "ended"

    def report(self, since: int) -> dict[str, RemoteMember]:
        return self._gateway.state()

    def leave(self) -> None:
        """Do nothing: members report to the end of the run."""


def make_app(
    gateway: Gateway, book: InviteBook, largest: int, folder: Path, now: Callable[[], float] = time.time
) -> Starlette:
    """Make the web application.

    largest: bytes of the largest array of a request; folder: for messages in parts; now: seconds since 1970.
    """
    authentication, limit = _Authentication(book, now), largest + MAX_OVERHEAD_BYTES
    uploads, answers = Uploads(folder / "uploads", limit), Answers(folder / "answers", ANSWERS_PER_LARGEST * limit)
    threads = ThreadPoolExecutor(MAX_CALLS, "calls")
    turns: dict[str, asyncio.Semaphore] = {}

    async def about(request: Request) -> Response:
        return _text("this is the head of a tpuswarm run; join it with `tpuswarm join` and an invite")

    async def part(request: Request) -> Response:
        digest, start = request.path_params["digest"], request.query_params.get("start", "")
        person = authentication.admit(request)
        if isinstance(person, Response):
            return person
        content = await _read(request, PART_BYTES)
        if content is None or not DIGEST.fullmatch(digest) or not start.isdecimal():
            return _text("this is no part of a message", 400)
        size = await asyncio.to_thread(uploads.add, person, digest, int(start), content)
        return _text("the message is longer than any of this run", 413) if size is None else _text(str(size))

    async def answer(request: Request) -> Response:
        person = authentication.admit(request)
        if isinstance(person, Response):
            return person
        path = answers.path(request.path_params["digest"])
        if path is None:
            return _text("this answer is no longer kept; make the call again", 404)
        return FileResponse(path, media_type=wire.MEDIA_TYPE, headers=_HEADERS)

    async def call(request: Request) -> Response:
        person = authentication.admit(request)
        if isinstance(person, Response):
            return person
        content = await _read(request, PART_BYTES)
        if content is None:
            return _text("a long message is sent in parts", 413)
        sent = request.headers.get(wire.CONTENT, "")

        def execute() -> Response:
            message = uploads.take(person, sent) if sent else content
            if message is None:
                return _text("the message has not arrived whole; send it again", 409)
            response = _answer(gateway, answers, person, message)
            if sent and response.status_code != 503:
                uploads.drop(person, sent)
            return response

        async with turns.setdefault(person, asyncio.Semaphore(MAX_CALLS_OF_A_PERSON)):
            return await asyncio.get_running_loop().run_in_executor(threads, execute)

    routes = [
        Route("/", about),
        Route("/call", call, methods=["POST"]),
        Route("/part/{digest}", part, methods=["POST"]),
        Route("/answer/{digest}", answer),
    ]
    return Starlette(routes=routes)


class _Authentication:
    """Admits requests of people whose invite holds."""

    def __init__(self, book: InviteBook, now: Callable[[], float]):
        self._book, self._now = book, now
        self._failures: dict[str, deque[float]] = {}
        """Times of the last wrong secrets, by address."""

    def admit(self, request: Request) -> str | Response:
        """Return the person whose request this is, or the answer to somebody without a valid invite."""
        now = self._now()
        person, _, secret = request.headers.get("authorization", "").removeprefix("Bearer ").partition(".")
        if why := self._book.check(person, secret, now):
            return self._refuse(request.client.host if request.client else "", why, now)
        if request.headers.get(wire.HEADER) != str(wire.VERSION):
            return _text(
                f"the swarm speaks version {wire.VERSION} of the protocol, this machine another one; install the "
                "swarm's version of tpuswarm here", 400,
            )  # fmt: skip
        return person

    def _refuse(self, peer: str, why: str, now: float) -> Response:
        """Answer a wrong secret. A right one is never refused: behind a tunnel all members have one address."""
        if len(self._failures) >= MAX_PEERS:
            self._failures.clear()
        recent = self._failures.setdefault(peer, deque(maxlen=MAX_FAILURES))
        if len(recent) == MAX_FAILURES and now - recent[0] < FAILURE_WINDOW_S:
            return _text("too many wrong secrets from this address; wait a minute", 429)
        recent.append(now)
        return _text(why, 401)


async def _read(request: Request, limit: int) -> bytes | None:
    """Read the body; None if it is too large, or the client is gone. Raise HTTPException if it takes too long."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                content += part
                if len(content) > limit:
                    return None
    except ClientDisconnect:
        return None
    except TimeoutError as error:
        raise HTTPException(408) from error
    return bytes(content)


def _answer(gateway: Gateway, answers: Answers, person: str, content: bytes) -> Response:
    try:
        call = wire.decode(content)
    except wire.Malformed as error:
        return _text(f"the request is malformed: {error}", 400)
    if not isinstance(call, Call) or not isinstance(call.arguments, tuple):
        return _text("the request is no call", 400)
    is_fixed = call.method == "fetch" and all(isinstance(part, int | str) for part in call.arguments)
    request = (call.address, *call.arguments) if is_fixed else None
    if is_fixed and (known := answers.known(request)):
        return _in_parts(*known)
    try:
        answer: Any = gateway.serve(person, call)
    except Unreachable as error:
        return _text(f"no answer: {error}", 503)
    except Exception as error:  # noqa: BLE001  # one request must never end the gateway
        answer = Refused(f"the request failed: {type(error).__name__}")
    encoded = wire.encode(answer)
    if len(encoded) > PART_BYTES:
        return _in_parts(answers.keep(encoded, request), len(encoded))
    return Response(encoded, media_type=wire.MEDIA_TYPE, headers=_HEADERS)


_HEADERS = {wire.HEADER: str(wire.VERSION)}


def _in_parts(digest: str, size: int) -> Response:
    return Response(headers=_HEADERS | {wire.CONTENT: digest, wire.SIZE: str(size)})


def _text(text: str, status: int = 200) -> Response:
    return PlainTextResponse(text, status, headers=_HEADERS)
