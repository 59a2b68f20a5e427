"""Routes of Compute Engine's REST API."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tpuswarm.cloud.rehearsal.cloud import Cloud
from tpuswarm.cloud.rehearsal.common.api import Call, Handler, Rejected
from tpuswarm.cloud.rehearsal.common.policies import ACT_AS
from tpuswarm.cloud.rehearsal.compute.groups import KINDS
from tpuswarm.cloud.rehearsal.compute.instances import requested_account
from tpuswarm.cloud.rehearsal.compute.resources import Resource
from tpuswarm.cloud.rehearsal.wire.rest import parse_call, routes

PROJECT = "/compute/v1/projects/{project}"
ZONE = PROJECT + "/zones/{zone}"
REGION = PROJECT + "/regions/{region}"
INSTANCE = ZONE + "/instances/{name}"
MAX_WAIT_S = 120.0
POLL_INTERVAL_S = 0.02


def compute_routes(cloud: Cloud) -> list[Route]:
    """Return all routes. The first call for a project makes its default network."""
    instances, groups, networks, resources = cloud.instances, cloud.groups, cloud.networks, cloud.resources

    def with_kind(kind: str, handler: Handler) -> Handler:
        return lambda call: handler(Call({**call.path, "kind": kind}, call.query, call.body))

    def operation(call: Call) -> Resource:
        return resources.operation(_operation_path(call))

    table: list[tuple[str, str, Handler]] = [
        ("GET", PROJECT, networks.project),
        ("POST", f"{ZONE}/instances", instances.insert),
        ("GET", f"{ZONE}/instances", instances.list_page),
        ("GET", INSTANCE, instances.get),
        ("DELETE", INSTANCE, instances.delete),
        ("POST", f"{INSTANCE}/stop", instances.stop),
        ("POST", f"{INSTANCE}/start", instances.start),
        ("POST", f"{INSTANCE}/setMetadata", instances.set_metadata),
        ("POST", f"{INSTANCE}/setTags", instances.set_tags),
        ("POST", f"{INSTANCE}/setLabels", instances.set_labels),
        ("GET", f"{INSTANCE}/getGuestAttributes", lambda call: instances.guest_attributes(call, cloud.guests.read)),
        ("GET", PROJECT + "/aggregated/{kind}", networks.aggregated),
        ("POST", f"{PROJECT}/global/networks", networks.insert_network),
        ("DELETE", PROJECT + "/global/networks/{name}", networks.delete_network),
        ("POST", f"{REGION}/subnetworks", networks.insert_subnetwork),
        ("POST", REGION + "/subnetworks/{name}/setPrivateIpGoogleAccess", networks.set_private_google_access),
        ("POST", f"{REGION}/routers", networks.insert_router),
        ("PATCH", REGION + "/routers/{name}", networks.patch_router),
        ("POST", f"{PROJECT}/global/firewalls", networks.insert_rule),
        ("PATCH", PROJECT + "/global/firewalls/{name}", networks.patch_rule),
        ("PUT", PROJECT + "/global/firewalls/{name}", networks.patch_rule),
        ("POST", f"{ZONE}/disks", networks.insert_disk),
        ("POST", ZONE + "/disks/{name}/resize", networks.resize_disk),
        ("GET", f"{PROJECT}/zones", networks.list_zones),
        ("GET", ZONE, networks.zone),
        ("GET", f"{PROJECT}/regions", networks.list_regions),
        ("GET", REGION, networks.region),
        ("GET", f"{ZONE}/machineTypes", networks.list_machine_types),
        ("GET", ZONE + "/machineTypes/{name}", networks.machine_type),
    ]
    table += [
        ("POST", f"{ZONE}/instanceGroupManagers", groups.insert),
        ("DELETE", ZONE + "/instanceGroupManagers/{name}", groups.delete),
        ("POST", ZONE + "/instanceGroupManagers/{name}/listManagedInstances", groups.list_members),
    ]
    for kind in KINDS:
        table += [
            ("POST", f"{REGION}/{kind}", with_kind(kind, groups.insert_part)),
            ("DELETE", f"{REGION}/{kind}/{{name}}", with_kind(kind, groups.delete_part)),
        ]
    for scope in (ZONE, REGION, f"{PROJECT}/global"):
        table += [
            ("GET", scope + "/operations/{name}", operation),
            ("GET", f"{scope}/operations", lambda call: _operations(cloud, call)),
        ]
    for scope, kinds in (
        (ZONE, ["disks", "instanceGroupManagers"]),
        (REGION, ["subnetworks", "routers", *KINDS]),
        (f"{PROJECT}/global", ["networks", "firewalls"]),
    ):
        for kind in kinds:
            table += [
                ("GET", f"{scope}/{kind}", with_kind(kind, networks.list_page)),
                ("GET", f"{scope}/{kind}/{{name}}", with_kind(kind, networks.get)),
                ("DELETE", f"{scope}/{kind}/{{name}}", with_kind(kind, networks.delete)),
            ]  # of two routes for one path the first counts
    waits = [
        Route(scope + "/operations/{name}/wait", _wait(cloud, operation), methods=["POST"])
        for scope in (ZONE, REGION, f"{PROJECT}/global")
    ]
    checked = [(verb, path, _checked(cloud, verb, path, handler)) for verb, path, handler in table]
    public = ("GET", PROJECT + "/global/images/family/{name}", networks.image_of_family)  # Google's own projects
    return waits + routes(cloud.answer, [public, *checked])


def _checked(cloud: Cloud, verb: str, path: str, handler: Handler) -> Handler:
    """Return a handler that first checks the project's API and the caller, and adds its default network."""
    permission = _permission(verb, path)

    def answer(call: Call) -> Any:
        project = call.path["project"]
        cloud.projects.check(project, "compute.googleapis.com")
        cloud.policies.check_old(call.caller, permission.format_map(call.path), f"projects/{project}")
        if permission == "compute.instances.create":
            _check_account(cloud, call, requested_account(call.body, project))
        cloud.networks.add_default(project)
        return handler(call)

    return answer


def _permission(verb: str, path: str) -> str:
    """Return the permission for a route, such as compute.instances.list."""
    parts = path.removeprefix(PROJECT).removeprefix("/").split("/")
    scope = parts[0]
    if scope in ("global", "aggregated"):
        parts = parts[1:]
    elif scope in ("zones", "regions") and len(parts) > 2:
        parts = parts[2:]
    kind = parts[0] or "projects"
    if kind == "operations":
        kind = f"{scope.removesuffix('s')}Operations"
    if len(parts) == 1:
        action = "get" if kind == "projects" else "list" if verb == "GET" else "create"
    elif len(parts) == 2:
        action = {"GET": "get", "DELETE": "delete"}.get(verb, "update")
    else:
        action = parts[2]
    return f"compute.{kind}.{action}"


def _check_account(cloud: Cloud, call: Call, account: str) -> None:
    if not cloud.policies.allow(call.caller, ACT_AS, f"accounts/{account}", f"projects/{call.path['project']}"):
        user = cloud.policies.member(call.caller).partition(":")[2]
        message = f"The user does not have access to service account '{account}'.  User: '{user}'.  Ask a project owner"
        raise Rejected(
            403, "forbidden", f"{message} to grant you the iam.serviceAccountUser role on the service account"
        )


def _operation_path(call: Call) -> str:
    scopes = [f"{kind}s/{call.path[kind]}" for kind in ("zone", "region") if kind in call.path] or ["global"]
    return f"projects/{call.path['project']}/{scopes[0]}/operations/{call.path['name']}"


def _operations(cloud: Cloud, call: Call) -> Resource:
    prefix = _operation_path(Call({**call.path, "name": ""}, call.query, call.body))
    return cloud.resources.page(cloud.resources.operations(prefix), call, "operation")


def _wait(cloud: Cloud, operation: Callable[[Call], Resource]) -> Any:
    async def respond(request: Request) -> Response:
        call = await parse_call(request)
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            current: Resource = cloud.answer(operation, call)
            if current["status"] == "DONE" or time.monotonic() > deadline:
                return JSONResponse(current)
            await asyncio.sleep(POLL_INTERVAL_S)

    return respond
