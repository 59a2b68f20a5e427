"""Plain REST handlers, from a call to JSON."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.call import Call, Handler, Rejected


def routes(cloud: Cloud, table: Iterable[tuple[str, str, Handler]]) -> list[Route]:
    """Starlette's, from lines of verb, path and handler."""
    return [Route(path, endpoint(cloud, handler), methods=[verb]) for verb, path, handler in table]


def endpoint(cloud: Cloud, handler: Handler) -> Callable[[Request], Any]:
    """The handler as Starlette calls it."""

    async def respond(request: Request) -> Response:
        return JSONResponse(cloud.answer(handler, await call_of(request)))

    return respond


async def call_of(request: Request) -> Call:
    """The parts of a request. Raises Rejected for a body that is no JSON."""
    body = await request.body()
    try:
        given = json.loads(body) if body else {}
    except ValueError as error:
        raise Rejected(400, "parseError", f"Parse Error: {error}") from error
    return Call(dict(request.path_params), dict(request.query_params), given)


async def reject(request: Request, error: Exception) -> Response:
    """Starlette's handler of Rejected."""
    assert isinstance(error, Rejected)
    return JSONResponse(error.body, error.status)
