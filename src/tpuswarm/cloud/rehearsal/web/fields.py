"""Partial answers: https://cloud.google.com/storage/docs/json_api#fields-and-partial-responses."""

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tpuswarm.cloud.rehearsal.common.call import Rejected

Tree = dict[str, "Tree"]
"""The fields wanted of an object, and of what is in them; an empty one wants all."""


def with_fields(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that leaves out what `fields` does not name, and gives the address that it was asked at."""

    async def answer(request: Request) -> Response:
        tree = _parse(request.query_params.get("fields", ""))
        response = await endpoint(request)
        if not isinstance(response, JSONResponse):
            return response
        here = f"http://{request.headers.get('host', '')}/"
        body = bytes(response.body).replace(b"https://www.googleapis.com/", here.encode())
        if tree:
            body = json.dumps(_pick(json.loads(body), tree)).encode()
        return Response(body, response.status_code, media_type="application/json")

    return answer


def _parse(fields: str) -> Tree:
    """Read `a,b(c,d),e/f`. Raises Rejected."""
    tree: Tree = {}
    stack = [(tree, tree)]
    """Of each open bracket: the object around it, and the field named last."""
    for token in re.findall(r"[^,()/]+|[,()/]", fields.replace(" ", "")):
        around, last = stack[-1]
        if token == ",":
            stack[-1] = (around, around)
        elif token == "(":
            stack.append((last, last))
        elif token == ")" and len(stack) > 1:
            stack.pop()
        elif token not in ")/":
            stack[-1] = (around, last.setdefault(token, {}))
    if len(stack) > 1 or fields.count(")") > fields.count("("):
        raise Rejected(400, "invalidParameter", f"Invalid field selection {fields}")
    return tree


def _pick(value: Any, tree: Tree) -> Any:
    if not tree or "*" in tree:
        return value
    if isinstance(value, list):
        return [_pick(each, tree) for each in value]
    if isinstance(value, dict):
        return {name: _pick(value[name], inner) for name, inner in tree.items() if name in value}
    return value
