"""Serve the TPU API over REST: the routes of Google's own client lead to the handlers of gRPC."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from google.cloud.tpu_v2.services.tpu.transports.rest_base import _BaseTpuRestTransport
from google.protobuf import json_format
from google.rpc import code_pb2
from starlette.requests import Request
from starlette.responses import JSONResponse

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.api import INVALID_ARGUMENT, NOT_FOUND, Refused
from tpuswarm.cloud.rehearsal.tpu.service import Method
from tpuswarm.cloud.rehearsal.wire.rest import read_caller

HTTP_STATUS = {1: 499, 3: 400, 4: 504, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 10: 409, 12: 501, 14: 503, 16: 401}
"""HTTP status by google.rpc.Code; 500 for others."""


class Route(NamedTuple):
    """A verb and a path. The path's groups are fields of the request; the body is the field `body`, or `*`: all."""

    verb: str
    path: re.Pattern[str]
    fields: tuple[str, ...]
    body: str | None
    method: Method


class Transcoder:
    def __init__(self, cloud: Cloud):
        self._cloud = cloud
        self._routes = list(_routes(cloud))

    async def respond(self, request: Request) -> JSONResponse:
        # gcloud requests locations and accelerator types from v1, which has the same ones.
        path = re.sub(r"^/v\w+/", "/v2/", unquote(request.url.path))
        for route in self._routes:
            match = route.path.fullmatch(path) if route.verb == request.method else None
            if match:
                return await self._answer(request, route, match)
        return error_response(Refused(NOT_FOUND, f"Method not found: {request.method} {request.url.path}"))

    async def _answer(self, request: Request, route: Route, match: re.Match[str]) -> JSONResponse:
        query = dict(request.query_params)
        has_enum_numbers = "enum-encoding=int" in query.pop("$alt", query.pop("alt", ""))
        body = await request.body()
        try:
            content = json.loads(body) if body else {}
            fields = content if route.body == "*" else {route.body: content} if route.body else {}
            for key, value in [*query.items(), *zip(route.fields, match.groups(), strict=True)]:
                _set_field(fields, key.split("."), value)
            message = json_format.ParseDict(fields, route.method.request(), ignore_unknown_fields=True)
            answer = self._cloud.answer(route.method.answer, message, read_caller(request))
        except (ValueError, json_format.ParseError) as error:
            return error_response(Refused(INVALID_ARGUMENT, f"Invalid JSON payload received. {error}"))
        except Refused as error:
            return error_response(error)
        return JSONResponse(json_format.MessageToDict(answer, use_integers_for_enums=has_enum_numbers))


def error_response(error: Refused) -> JSONResponse:
    code = HTTP_STATUS.get(error.code, 500)
    details = [json_format.MessageToDict(detail) for detail in error.status().details]
    body = {"code": code, "message": error.message, "status": code_pb2.Code.Name(error.code)}
    return JSONResponse({"error": {**body, **({"details": details} if details else {})}}, code)


def _routes(cloud: Cloud) -> Iterator[Route]:
    methods = {method.name: method for method in cloud.tpu.methods()}
    transport: Any
    for name, transport in vars(_BaseTpuRestTransport).items():
        method = methods.get(name.removeprefix("_Base"))
        if method:
            for option in transport._get_http_options():
                path, fields = _pattern(option["uri"])
                yield Route(option["method"].upper(), path, fields, option.get("body"), method)


def _pattern(uri: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Return `/v2/{name=projects/*/nodes/*}:stop` as an expression, and the names of its groups."""
    fields: list[str] = []

    def group(field: re.Match[str]) -> str:
        fields.append(field[1])
        return f"({field[2].replace('*', '[^/:]+')})"

    return re.compile(re.sub(r"\{([a-z_.]+)=([^}]+)\}", group, uri)), tuple(fields)


def _set_field(fields: dict[str, Any], path: list[str], value: str) -> None:
    for key in path[:-1]:
        fields = fields.setdefault(key, {})
    fields[path[-1]] = {"true": True, "True": True, "false": False, "False": False}.get(value, value)
