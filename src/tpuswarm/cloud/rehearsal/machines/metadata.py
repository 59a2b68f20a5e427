"""A machine's metadata server: https://cloud.google.com/compute/docs/metadata."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tpuswarm.cloud.rehearsal.common.hosts import Facts, RehearsedHost
from tpuswarm.cloud.rehearsal.tpu.guests import GuestAttributes

PREFIX = "/computeMetadata/v1/"
HEADERS = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
POLL_INTERVAL_S = 0.1
NO_NOTICE = {"error": "no notifications have been received yet, try again later"}
"""https://cloud.google.com/tpu/docs/view-maintenance-notifications."""
SCOPES = "https://www.googleapis.com/auth/cloud-platform"


def _metadata(
    host: RehearsedHost, facts: Facts, token: str, guests: Mapping[str, str], faulty: Mapping[str, str]
) -> dict[str, Any]:
    """Return all metadata as folders and values; `faulty` replaces scopes and announces maintenance."""
    account = {
        "email": facts.account,
        "scopes": faulty.get("scopes", SCOPES) + "\n",
        "aliases": "default\n",
        "token": {"access_token": token, "expires_in": 3600, "token_type": "Bearer"},
    }
    guest_folders: dict[str, dict[str, str]] = {}
    for path, value in guests.items():
        namespace, _, key = path.partition("/")
        guest_folders.setdefault(namespace, {})[key] = value
    name = f"{host.owner.rsplit('/', 1)[-1]}-w-{host.number}"
    return {
        "instance": {
            "id": str(int(host.id.rsplit("-", 1)[-1], 16)),
            "name": name,
            "hostname": f"{name}.{facts.zone}.c.{facts.project}.internal",
            "zone": f"projects/{facts.project}/zones/{facts.zone}",
            "machine-type": f"projects/{facts.project}/machineTypes/{facts.machine_type}",
            "preempted": "TRUE" if host.leaving else "FALSE",
            "maintenance-event": faulty.get("maintenance", "NONE"),
            "upcoming-maintenance": json.loads(faulty.get("upcoming", json.dumps(NO_NOTICE))),
            "scheduling": {"preemptible": str(facts.is_spot).upper()},
            "tags": facts.tags,
            "attributes": dict(facts.attributes),
            "guest-attributes": guest_folders,
            "network-interfaces": {
                "0": {"ip": host.internal, "access-configs": {"0": {"external-ip": host.external or ""}}}
            },
            "service-accounts": {"default": account, account["email"]: account},
        },
        "project": {"project-id": facts.project, "numeric-project-id": "000000000000", "attributes": {}},
    }


def is_from_this_user(request: Request) -> bool:
    assert request.client is not None
    server, client = (_format_address(*request.scope["server"]), _format_address(*request.client))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, remote, *rest = line.split()[1:]
        if (local, remote) == (client, server):
            return int(rest[4]) in (os.geteuid(), 0)
    return False


class MetadataServer:
    """Answers for one host."""

    def __init__(
        self,
        get_host: Callable[[], RehearsedHost | None],
        get_facts: Callable[[RehearsedHost], Facts | None],
        token: str,
        guests: GuestAttributes,
        read_faulty: Callable[[], Mapping[str, str]],
        allows: Callable[[Request], bool] = is_from_this_user,
    ):
        """`allows`: start-up scripts and tokens are secret, and who may read them depends on the network."""
        self._get_host, self._get_facts, self._token = get_host, get_facts, token
        self._guests, self._read_faulty, self._allows = guests, read_faulty, allows

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            response = await self._respond(Request(scope, receive))
            response.headers.update(HEADERS)
            await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        if request.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in request.headers:
            return PlainTextResponse('Missing required header "Metadata-Flavor": "Google"', 403)
        if not self._allows(request):
            return PlainTextResponse("This metadata server is another user's.", 403)
        path = request.url.path
        if path in ("/", "/computeMetadata/", "/computeMetadata"):
            return PlainTextResponse("computeMetadata/\n")
        if not path.startswith(PREFIX):
            return PlainTextResponse("Not found", 404)
        path = path.removeprefix(PREFIX)
        host = self._get_host()
        if host is not None and request.method in ("PUT", "DELETE"):
            return await self._write(request, host, path)
        if request.query_params.get("wait_for_change", "").lower() == "true":
            await self._wait_for_change(request, path)
        value = self._find(path)
        if value is None:
            return PlainTextResponse("Not found", 404)
        if isinstance(value, dict | list) and (
            request.query_params.get("recursive", "").lower() == "true" or path.endswith(("/token", "/tags"))
        ):
            return JSONResponse(value)
        if request.query_params.get("alt") == "json":  # in many lines
            return PlainTextResponse(json.dumps(value, indent=2), 503 if value == NO_NOTICE else 200)
        if isinstance(value, dict):
            return PlainTextResponse(
                "".join(f"{key}/\n" if _is_folder(inner) else f"{key}\n" for key, inner in value.items())
            )
        return PlainTextResponse(str(value))

    def _find(self, path: str) -> Any:
        """Return a value or a folder; None if there is none."""
        host = self._get_host()
        facts = self._get_facts(host) if host else None
        if host is None or facts is None:
            return None
        value: Any = _metadata(host, facts, self._token, self._guests.read(host.id), self._read_faulty())
        for part in path.strip("/").split("/"):
            if part:
                value = value.get(part) if isinstance(value, dict) else None
        return value

    async def _wait_for_change(self, request: Request, path: str) -> None:
        deadline = time.monotonic() + float(request.query_params.get("timeout_sec", "3600"))
        before = self._find(path)
        while self._find(path) == before and time.monotonic() < deadline:
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _write(self, request: Request, host: RehearsedHost, path: str) -> Response:
        name = path.removeprefix("instance/guest-attributes/")
        if name == path or name.count("/") != 1:
            return PlainTextResponse("Only instance/guest-attributes/NAMESPACE/KEY can be written", 403)
        if request.method == "PUT":
            self._guests.write(host.id, name, (await request.body()).decode())
        else:
            self._guests.delete(host.id, name)
        return PlainTextResponse("")


def _is_folder(value: Any) -> bool:
    return isinstance(value, dict) and "access_token" not in value


def _format_address(address: str, port: int) -> str:
    """Return an address in the form of /proc/net/tcp."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"
