"""All methods of the TPU API by service, for gRPC and REST."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from google.cloud.location import locations_pb2
from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2

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
    """A method; `request` is its protobuf class, and `answer` may raise Refused."""

    service: str
    name: str
    request: Any
    answer: Callable[[Any], Any]


class TpuService:
    """google.cloud.tpu.v2.Tpu and the services for locations and operations."""

    def __init__(
        self,
        check_project: Callable[[str, str], None],
        nodes: Nodes,
        queue: Queue,
        offers: Offers,
        guests: GuestAttributes,
        operations: Operations,
    ):
        """check_project: raises Refused if a service is off in a project."""
        self._check_project = check_project
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
                    yield Method(service, name, request, self._checked(getattr(handler, name)))

    def _checked(self, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def checked(request: Any) -> Any:
            name = getattr(request, "parent", "") or getattr(request, "name", "") or request.node.name
            self._check_project(name.split("/")[1] if "/" in name else name, "tpu.googleapis.com")
            return answer(request)

        return checked
