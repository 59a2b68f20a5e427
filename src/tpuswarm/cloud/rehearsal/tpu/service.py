"""All methods of the TPU API by service, for gRPC and REST."""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from google.cloud.location import locations_pb2
from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2

from tpuswarm.cloud.rehearsal.common.policies import Policies, default_account, permission_denied
from tpuswarm.cloud.rehearsal.tpu.guests import GuestAttributes
from tpuswarm.cloud.rehearsal.tpu.nodes import Nodes
from tpuswarm.cloud.rehearsal.tpu.offers import Offers
from tpuswarm.cloud.rehearsal.tpu.operations import Operations
from tpuswarm.cloud.rehearsal.tpu.queue import Queue

TPU = "google.cloud.tpu.v2.Tpu"
MESSAGES = {
    TPU: cloud_tpu,
    "google.cloud.location.Locations": locations_pb2,
    "google.longrunning.Operations": operations_pb2,
}
"""Modules of request messages by service."""


class Method(NamedTuple):
    """A method; `request` is its protobuf class. `answer` gets a request and its caller, and may raise Refused."""

    service: str
    name: str
    request: Any
    answer: Callable[[Any, str], Any]


class TpuService:
    """google.cloud.tpu.v2.Tpu and the services for locations and operations."""

    def __init__(
        self,
        check_project: Callable[[str, str], None],
        policies: Policies,
        nodes: Nodes,
        queue: Queue,
        offers: Offers,
        guests: GuestAttributes,
        operations: Operations,
    ):
        """check_project: raises Refused if a service is off in a project."""
        self._check_project, self._policies = check_project, policies
        self._handlers: list[tuple[str, object]] = [
            (TPU, nodes),
            (TPU, queue),
            (TPU, offers),
            (TPU, guests),
            ("google.cloud.location.Locations", offers),
            ("google.longrunning.Operations", operations),
        ]

    def methods(self) -> Iterator[Method]:
        """Yield the methods: each handler's public attributes in CamelCase with a request message in the service."""
        for service, handler in self._handlers:
            for name in dir(handler):
                request = getattr(MESSAGES[service], f"{name}Request", None)
                if request is not None:
                    if hasattr(request, "pb"):  # proto-plus
                        request = type(request.pb(request()))
                    yield Method(service, name, request, self._checked(name, getattr(handler, name)))

    def _checked(self, method: str, answer: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
        permission = _permission(method)

        def checked(request: Any, caller: str) -> Any:
            name = getattr(request, "parent", "") or getattr(request, "name", "") or request.node.name
            project = name.split("/")[1] if "/" in name else name
            self._check_project(project, "tpu.googleapis.com")
            if not self._policies.allow(caller, permission, f"projects/{project}"):
                raise permission_denied(permission, f"//tpu.googleapis.com/{name}")
            if permission == "tpu.nodes.create":
                for node in _requested_nodes(request):
                    self._policies.check_use(caller, node.service_account.email or default_account(project), project)
            return answer(request)

        return checked


def _permission(method: str) -> str:
    """Return the permission for a method; requests in the queue need those of nodes.

    https://cloud.google.com/iam/docs/roles-permissions/tpu
    """
    verb, noun = re.findall("[A-Z][a-z]+", method)[0].lower(), re.sub("^[A-Z][a-z]+", "", method)
    kinds = {"Accelerator": "acceleratortypes", "Runtime": "runtimeversions", "Location": "locations"}
    kinds["Operation"] = "operations"
    kind = next((kind for start, kind in kinds.items() if noun.startswith(start)), "nodes")
    return f"tpu.{kind}.{verb}"


def _requested_nodes(request: Any) -> list[Any]:
    if hasattr(request, "queued_resource"):
        return [spec.node for spec in request.queued_resource.tpu.node_spec]
    return [request.node]
