"""Who may ask: the token's owner, and no page that a browser shows. A start-up script is code."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class Guard:
    """Refuses requests without the token, for another host's name, or from a page of another origin."""

    def __init__(self, app: Asgi, token: str):
        self._app = app
        self._token = f"Bearer {token}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        address, port = scope["server"]
        why = None
        if headers.get(b"host", b"").decode("latin-1") not in (f"{address}:{port}", f"localhost:{port}"):
            why = (403, "PERMISSION_DENIED", f"This is {address}:{port}, and no other host.")
        elif b"origin" in headers:
            why = (403, "PERMISSION_DENIED", "Pages of browsers have no access.")
        elif not hmac.compare_digest(headers.get(b"authorization", b"").split(b"~")[0], self._token):
            why = (401, "UNAUTHENTICATED", "The request does not carry this local cloud's token.")
        if why is None:
            await self._app(scope, receive, send)
            return
        code, status, message = why
        body = {"error": {"code": code, "message": message, "status": status}}
        await JSONResponse(body, code)(scope, receive, send)
