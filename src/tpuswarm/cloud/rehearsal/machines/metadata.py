"""The metadata server of a machine, as https://cloud.google.com/compute/docs/metadata describes it."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tpuswarm.cloud.rehearsal.common.hosts import Facts, RehearsedHost
from tpuswarm.cloud.rehearsal.tpu.guests import Guests

PREFIX = "/computeMetadata/v1/"
FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
LOOK_S = 0.1
"""Between two looks for who waits for a change."""


SCOPES = "https://www.googleapis.com/auth/cloud-platform"


def tree(
    host: RehearsedHost, facts: Facts, token: str, guests: Mapping[str, str], planted: Mapping[str, str]
) -> dict[str, Any]:
    """All that a machine may ask, as folders and values. planted: what a fault makes of `scopes` and `maintenance`."""
    account = {
        "email": "000000000000-compute@developer.gserviceaccount.com",
        "scopes": planted.get("scopes", SCOPES) + "\n",
        "aliases": "default\n",
        "token": {"access_token": token, "expires_in": 3600, "token_type": "Bearer"},
    }
    guest: dict[str, dict[str, str]] = {}
    for path, value in guests.items():
        namespace, _, key = path.partition("/")
        guest.setdefault(namespace, {})[key] = value
    name = f"{host.owner.rsplit('/', 1)[-1]}-w-{host.number}"
    return {
        "instance": {
            "id": str(int(host.id.rsplit("-", 1)[-1], 16)),
            "name": name,
            "hostname": f"{name}.{facts.zone}.c.{facts.project}.internal",
            "zone": f"projects/{facts.project}/zones/{facts.zone}",
            "machine-type": f"projects/{facts.project}/machineTypes/{facts.machine_type}",
            "preempted": "TRUE" if host.leaving else "FALSE",
            "maintenance-event": planted.get("maintenance", "NONE"),
            "scheduling": {"preemptible": str(facts.spot).upper()},
            "tags": facts.tags,
            "attributes": dict(facts.attributes),
            "guest-attributes": guest,
            "network-interfaces": {
                "0": {"ip": host.internal, "access-configs": {"0": {"external-ip": host.external or ""}}}
            },
            "service-accounts": {"default": account, account["email"]: account},
        },
        "project": {"project-id": facts.project, "numeric-project-id": "000000000000", "attributes": {}},
    }


class Metadata:
    """Answers for one host."""

    def __init__(
        self,
        host: Callable[[], RehearsedHost | None],
        facts: Callable[[RehearsedHost], Facts | None],
        token: str,
        guests: Guests,
        planted: Callable[[], Mapping[str, str]],
    ):
        self._host, self._facts, self._token, self._guests, self._planted = host, facts, token, guests, planted

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] == "http":
            response = await self._respond(Request(scope, receive))
            response.headers.update(FLAVOR)
            await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        if request.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in request.headers:
            return PlainTextResponse('Missing required header "Metadata-Flavor": "Google"', 403)
        if not _is_ours(request):
            return PlainTextResponse("This metadata server is another user's.", 403)
        path = request.url.path
        if path in ("/", "/computeMetadata/", "/computeMetadata"):
            return PlainTextResponse("computeMetadata/\n")
        if not path.startswith(PREFIX):
            return PlainTextResponse("Not found", 404)
        path = path.removeprefix(PREFIX)
        host = self._host()
        if host is not None and request.method in ("PUT", "DELETE"):
            return await self._write(request, host, path)
        if request.query_params.get("wait_for_change", "").lower() == "true":
            await self._wait(request, path)
        found = self._find(path)
        if found is None:
            return PlainTextResponse("Not found", 404)
        if isinstance(found, dict | list) and (
            request.query_params.get("recursive", "").lower() == "true" or path.endswith(("/token", "/tags"))
        ):
            return JSONResponse(found)
        if isinstance(found, dict):
            return PlainTextResponse(
                "".join(f"{key}/\n" if _is_folder(value) else f"{key}\n" for key, value in found.items())
            )
        return PlainTextResponse(str(found))

    def _find(self, path: str) -> Any:
        """A value or a folder; None if there is none."""
        host = self._host()
        facts = self._facts(host) if host else None
        if host is None or facts is None:
            return None
        found: Any = tree(host, facts, self._token, self._guests.read(host.id), self._planted())
        for part in path.strip("/").split("/"):
            if part:
                found = found.get(part) if isinstance(found, dict) else None
        return found

    async def _wait(self, request: Request, path: str) -> None:
        until = time.monotonic() + float(request.query_params.get("timeout_sec", "3600"))
        before = self._find(path)
        while self._find(path) == before and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    async def _write(self, request: Request, host: RehearsedHost, path: str) -> Response:
        place = path.removeprefix("instance/guest-attributes/")
        if place == path or place.count("/") != 1:
            return PlainTextResponse("Only instance/guest-attributes/NAMESPACE/KEY can be written", 403)
        if request.method == "PUT":
            self._guests.write(host.id, place, (await request.body()).decode())
        else:
            self._guests.delete(host.id, place)
        return PlainTextResponse("")


def _is_folder(value: Any) -> bool:
    return isinstance(value, dict) and "access_token" not in value


def _is_ours(request: Request) -> bool:
    """Whether who asks is the user whose cloud this is: start-up scripts and tokens are nobody else's business."""
    assert request.client is not None
    here, there = (_hex(*request.scope["server"]), _hex(request.client.host, request.client.port))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, *rest = line.split()[1:]
        if (local, remote) == (there, here):
            return int(rest[4]) in (os.geteuid(), 0)
    return False


def _hex(address: str, port: int) -> str:
    """As in /proc/net/tcp."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"
