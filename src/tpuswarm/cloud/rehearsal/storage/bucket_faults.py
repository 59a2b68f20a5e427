"""Faults of buckets, planted by `rehearsal break BUCKET FAULT`; or of the requests of one machine alone."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpuswarm.cloud.rehearsal.common.api import Rejected
from tpuswarm.cloud.rehearsal.common.records import Records, Table
from tpuswarm.cloud.rehearsal.wire.rest import read_caller

BUCKET_FAULTS = {
    "lost-answers": "carries out one request in ten and loses its answer",
    "outage": "answers 503 to every request",
    "silent": "answers no request",
    "stalls": "leaves one request in fifty without an answer",
    "lost-chunks": "keeps four of five chunks of an upload (308 without Range for the other)",
    "lost-uploads": "forgets one upload session in five (410)",
    "corrupt": "damages one download in ten",
    "rate-limit": "takes one write a second of each object (429)",
    "retention": "lets no object be deleted or replaced (403)",
    "requester-pays": "wants every request to name a project that pays (400)",
}
MACHINE_FAULTS = BUCKET_FAULTS.keys() - {"rate-limit", "retention", "requester-pays"}
"""Faults that can affect one machine alone, known by the end ~ID of its token."""
Endpoint = Callable[[Request], Awaitable[Response]]


class BucketFaults:
    """The faults of each bucket, and of each machine's requests."""

    def __init__(self, records: Records):
        self._faults: Table[list[str]] = records.table("bucket fault")
        self._random = random.Random(0)
        self._written: dict[str, float] = {}

    def set_fault(self, key: str, fault: str, is_planted: bool) -> None:
        """Plant a fault in a bucket or a machine (`machine_key`), or remove it."""
        faults = set(self._faults.get(key) or ())
        (faults.add if is_planted else faults.discard)(fault)
        self._faults.put(key, sorted(faults))

    def all(self) -> dict[str, list[str]]:
        return {bucket: faults for bucket, faults in self._faults.items() if faults}

    def wrap(self, endpoint: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            keys = request.path_params.get("bucket", ""), machine_key(read_caller(request))
            faults = [fault for key in keys for fault in self._faults.get(key) or ()]
            if not faults:
                return await endpoint(request)
            await self._refuse_or_wait(faults, request)
            is_chunk = request.method == "PUT" and "upload_id" in request.query_params
            if "lost-chunks" in faults and is_chunk and self._random.random() < 0.2:
                await request.body()
                return Response(status_code=308)
            response = await endpoint(request)
            if "corrupt" in faults and request.query_params.get("alt") == "media" and self._random.random() < 0.1:
                body = bytes(response.body)
                return Response(body[:-1] + bytes([body[-1] ^ 1]) if body else body, 200, dict(response.headers))
            if "lost-answers" in faults and self._random.random() < 0.1:
                return _LostAnswer()
            return response

        return answer

    async def _refuse_or_wait(self, faults: list[str], request: Request) -> None:
        if "silent" in faults or ("stalls" in faults and self._random.random() < 0.02):
            await asyncio.sleep(3600)
        if "outage" in faults:
            raise Rejected(503, "backendError", "Service Unavailable")
        if "requester-pays" in faults and "userProject" not in request.query_params:
            raise Rejected(400, "required", "Bucket is a requester pays bucket but no user project provided.")
        if "lost-uploads" in faults and "upload_id" in request.query_params and self._random.random() < 0.2:
            raise Rejected(410, "gone", "The requested upload session is gone.")

    def check_write(self, bucket: str, name: str, exists: bool) -> None:
        """Raise Rejected if an object may not be written or deleted now. exists: whether there is one to replace."""
        faults = self._faults.get(bucket) or ()
        key = f"{bucket}/{name}"
        if "retention" in faults and exists:
            reason = "is subject to bucket's retention policy or object retention and cannot be deleted or overwritten"
            raise Rejected(403, "retentionPolicyNotMet", f"Object '{key}' {reason}.")
        if "rate-limit" in faults:
            if time.monotonic() - self._written.get(key, -1.0) < 1.0:
                raise Rejected(429, "rateLimitExceeded", f"The object {key} exceeded the rate limit for mutations.")
            self._written[key] = time.monotonic()


def machine_key(machine: str) -> str:
    """Return the key of a machine's faults, in the place of a bucket's name."""
    return f"machine/{machine}"


class _LostAnswer(Response):
    """An answer that ends before its body."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
