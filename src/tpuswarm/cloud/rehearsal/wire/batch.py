"""Several calls in one: https://cloud.google.com/storage/docs/batch, which Google's clients use."""

import re
from email.parser import BytesParser
from email.policy import HTTP
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response


async def batch(request: Request) -> Response:
    """Each part is a request to the same application; the answers come in the same order."""
    kind = request.headers.get("content-type", "").encode()
    whole = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + kind + b"\r\n\r\n" + await request.body())
    answers = []
    for number, part in enumerate(whole.iter_parts()):
        answer = await _call(request.app, request, part.get_content())
        # Google's answers name the part that they answer.
        about = (part.get("Content-ID") or f"<{number}>").strip("<>")
        answers.append(
            f"--batch\r\nContent-Type: application/http\r\nContent-ID: <response-{about}>\r\n\r\n".encode() + answer
        )
    return Response(b"\r\n".join([*answers, b"--batch--"]), media_type="multipart/mixed; boundary=batch")


async def _call(app: Starlette, outer: Request, message: bytes | str) -> bytes:
    text = message if isinstance(message, bytes) else message.encode()
    head, _, body = re.sub(rb"\r?\n", b"\r\n", text).partition(b"\r\n\r\n")
    line, _, rest = head.partition(b"\r\n")
    method, target = line.decode().split()[:2]
    path, _, query = re.sub(r"^https?://[^/]+", "", target).partition("?")
    headers = [
        (key.strip().lower(), value.strip())
        for key, _, value in (each.partition(b":") for each in rest.split(b"\r\n"))
        if key
    ]
    scope = {
        **{key: outer.scope[key] for key in ("type", "asgi", "http_version", "scheme", "server", "client")},
        "method": method,
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": headers,
        "root_path": "",
    }
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body.strip(), "more_body": False}

    async def send(event: dict[str, object]) -> None:
        sent.append(event)

    await app(scope, receive, send)  # type: ignore[arg-type]
    start = sent[0]
    said = b"".join(event.get("body", b"") for event in sent[1:])  # type: ignore[misc]
    fields = b"".join(key + b": " + value + b"\r\n" for key, value in start["headers"])  # type: ignore[attr-defined]
    return f"HTTP/1.1 {start['status']} -\r\n".encode() + fields + b"\r\n" + said
