"""Combine all REST APIs into one application, which also answers batches."""

import logging
import re
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.api import Refused, Rejected
from tpuswarm.cloud.rehearsal.compute.service import compute_routes
from tpuswarm.cloud.rehearsal.storage.service import Storage
from tpuswarm.cloud.rehearsal.wire.rest import reject
from tpuswarm.cloud.rehearsal.wire.transcode import Transcoder, error_response

VERBS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


def application(cloud: Cloud, storage: Storage, more: list[Route]) -> Starlette:
    return Starlette(
        routes=[
            *more,
            *storage.routes(),
            *compute_routes(cloud),
            *cloud.projects.routes(cloud.answer),
            Route("/batch/{rest:path}", _batch, methods=["POST"]),
            Route("/{path:path}", Transcoder(cloud).respond, methods=VERBS),
        ],
        exception_handlers={Rejected: reject, Refused: _refuse, Exception: _fail},
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error_response(error)


async def _fail(request: Request, error: Exception) -> Response:
    logging.error("%s %s", request.method, request.url.path, exc_info=error)
    message = f"the local cloud failed: {type(error).__name__}: {error}"
    return JSONResponse({"error": {"code": 500, "message": message, "status": "INTERNAL"}}, 500)


async def _batch(request: Request) -> Response:
    """Send each part to the same application: https://cloud.google.com/storage/docs/batch."""
    content_type = request.headers.get("content-type", "").encode()
    message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type + b"\r\n\r\n" + await request.body())
    answers = []
    for number, part in enumerate(message.iter_parts()):
        answer = await _send_part(request, part.get_content())
        content_id = (part.get("Content-ID") or f"<{number}>").strip("<>")
        head = f"--batch\r\nContent-Type: application/http\r\nContent-ID: <response-{content_id}>\r\n\r\n"
        answers.append(head.encode() + answer)
    return Response(b"\r\n".join([*answers, b"--batch--"]), media_type="multipart/mixed; boundary=batch")


async def _send_part(outer: Request, message: bytes | str) -> bytes:
    text = message if isinstance(message, bytes) else message.encode()
    head, _, body = re.sub(rb"\r?\n", b"\r\n", text).partition(b"\r\n\r\n")
    first_line, *header_lines = head.split(b"\r\n")
    method, target = first_line.decode().split()[:2]
    path, _, query = re.sub(r"^https?://[^/]+", "", target).partition("?")
    headers = [line.partition(b":")[::2] for line in header_lines if line.partition(b":")[0]]
    scope = {
        **{key: outer.scope[key] for key in ("type", "asgi", "http_version", "scheme", "server", "client")},
        "method": method,
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(key.strip().lower(), value.strip()) for key, value in headers],
        "root_path": "",
    }
    events: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body.strip(), "more_body": False}

    async def send(event: Any) -> None:
        events.append(event)

    await outer.app(scope, receive, send)
    fields = b"".join(key + b": " + value + b"\r\n" for key, value in events[0]["headers"])
    content = b"".join(event.get("body", b"") for event in events[1:])
    return f"HTTP/1.1 {events[0]['status']} -\r\n".encode() + fields + b"\r\n" + content
