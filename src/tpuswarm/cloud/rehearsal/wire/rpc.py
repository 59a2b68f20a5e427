"""Serve the TPU API over gRPC with generic handlers, because Google publishes no servicer."""

import hmac
import logging
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.api import Refused
from tpuswarm.cloud.rehearsal.tpu.service import Method


async def serve(cloud: Cloud, token: str, port: int) -> tuple[Any, int]:
    """Start a server on 127.0.0.1, at `port` if that is free; return it and its port."""
    # By default gRPC lets two servers share a port.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    services: dict[str, dict[str, Any]] = {}
    for method in cloud.tpu.methods():
        services.setdefault(method.service, {})[method.name] = _handler(cloud, token, method)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, methods) for service, methods in services.items()]
    )
    try:
        port = server.add_insecure_port(f"127.0.0.1:{port}")
    except RuntimeError:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


def _handler(cloud: Cloud, token: str, method: Method) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        authorization = dict(context.invocation_metadata() or ()).get("authorization", "")
        if not hmac.compare_digest(str(authorization).split("~")[0], f"Bearer {token}"):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "The request does not carry this local cloud's token.")
        try:
            return cloud.answer(method.answer, request, str(authorization).partition("~")[2])
        except Refused as error:
            await context.abort_with_status(rpc_status.to_status(error.status()))
        except Exception as error:
            logging.exception("%s", method.name)
            await context.abort(grpc.StatusCode.INTERNAL, f"the local cloud failed: {type(error).__name__}: {error}")

    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=method.request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )
