"""All REST APIs in one application: their paths tell them apart."""

import logging

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.call import Rejected
from tpuswarm.cloud.rehearsal.common.refused import Refused
from tpuswarm.cloud.rehearsal.compute.service import compute_routes
from tpuswarm.cloud.rehearsal.web.service import project_routes
from tpuswarm.cloud.rehearsal.web.storage import Storage
from tpuswarm.cloud.rehearsal.wire.batch import batch
from tpuswarm.cloud.rehearsal.wire.rest import reject
from tpuswarm.cloud.rehearsal.wire.transcode import Transcoder, refusal

VERBS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


def application(cloud: Cloud, storage: Storage, more: list[Route]) -> Starlette:
    """`more`: routes of the cloud's own."""
    return Starlette(
        routes=[
            *more,
            *storage.routes(),
            *compute_routes(cloud),
            *project_routes(cloud),
            Route("/batch/{rest:path}", batch, methods=["POST"]),
            Route("/{path:path}", Transcoder(cloud).respond, methods=VERBS),
        ],
        exception_handlers={Rejected: reject, Refused: _refuse, Exception: _fail},
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return refusal(error)


async def _fail(request: Request, error: Exception) -> Response:
    logging.error("%s %s", request.method, request.url.path, exc_info=error)
    message = f"the local cloud failed: {type(error).__name__}: {error}"
    return JSONResponse({"error": {"code": 500, "message": message, "status": "INTERNAL"}}, 500)
