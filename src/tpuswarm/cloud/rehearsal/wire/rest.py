"""Turn handlers of REST calls into Starlette's routes."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.common.api import Call, Handler, Rejected

Answer = Callable[..., Any]
"""`Cloud.answer`: runs a handler with arguments."""


def routes(answer: Answer, table: Iterable[tuple[str, str, Handler]]) -> list[Route]:
    return [Route(path, _endpoint(answer, handler), methods=[verb]) for verb, path, handler in table]


def _endpoint(answer: Answer, handler: Handler) -> Any:
    async def respond(request: Request) -> Response:
        return JSONResponse(answer(handler, await parse_call(request)))

    return respond


async def parse_call(request: Request) -> Call:
    """Return the parts of a request. Raises Rejected if its body is not JSON."""
    body = await parse_json(request)
    return Call(dict(request.path_params), dict(request.query_params), body, read_caller(request))


def read_caller(request: Request) -> str:
    """Return the end of a request's token: which machine or service account calls; empty for the user."""
    return request.headers.get("authorization", "").partition("~")[2]


async def parse_json(request: Request) -> Any:
    """Return a request's body, {} if it is empty. Raises Rejected."""
    body = await request.body()
    try:
        return json.loads(body) if body else {}
    except ValueError as error:
        raise Rejected(400, "parseError", f"Parse Error: {error}") from error


async def reject(request: Request, error: Exception) -> Response:
    assert isinstance(error, Rejected)
    return JSONResponse(error.body, error.status)
