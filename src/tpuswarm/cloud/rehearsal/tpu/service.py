"""All methods of the TPU API by service: what brings requests asks here who answers."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from google.cloud.location import locations_pb2
from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2

from tpuswarm.cloud.rehearsal.tpu.guests import Guests
from tpuswarm.cloud.rehearsal.tpu.nodes import Nodes
from tpuswarm.cloud.rehearsal.tpu.offers import Offers
from tpuswarm.cloud.rehearsal.tpu.operations import Operations
from tpuswarm.cloud.rehearsal.tpu.queue import Queue

NODES = ("ListNodes", "GetNode", "CreateNode", "DeleteNode", "StopNode", "StartNode", "UpdateNode")
QUEUE = (
    "ListQueuedResources",
    "GetQueuedResource",
    "CreateQueuedResource",
    "DeleteQueuedResource",
    "ResetQueuedResource",
)
OFFERS = ("ListAcceleratorTypes", "GetAcceleratorType", "ListRuntimeVersions", "GetRuntimeVersion")
LOCATIONS = ("ListLocations", "GetLocation")
OPERATIONS = ("ListOperations", "GetOperation", "DeleteOperation", "CancelOperation")


class Method(NamedTuple):
    """A method: its request's class (protobuf), and what answers it or raises Refused."""

    service: str
    name: str
    request: Any
    answer: Callable[[Any], Any]


class Service:
    """google.cloud.tpu.v2.Tpu, and the two services beside it."""

    def __init__(
        self,
        check: Callable[[str, str], None],
        nodes: Nodes,
        queue: Queue,
        offers: Offers,
        guests: Guests,
        operations: Operations,
    ):
        """`check`: raises Refused where a project has not the API that is named."""
        self._check = check
        self._parts: list[tuple[str, tuple[str, ...], object, Any]] = [
            ("google.cloud.tpu.v2.Tpu", NODES, nodes, cloud_tpu),
            ("google.cloud.tpu.v2.Tpu", QUEUE, queue, cloud_tpu),
            ("google.cloud.tpu.v2.Tpu", OFFERS, offers, cloud_tpu),
            ("google.cloud.tpu.v2.Tpu", ("GetGuestAttributes",), guests, cloud_tpu),
            ("google.cloud.location.Locations", LOCATIONS, offers, locations_pb2),
            ("google.longrunning.Operations", OPERATIONS, operations, operations_pb2),
        ]

    def methods(self) -> Iterator[Method]:
        """All of them."""
        for service, names, part, messages in self._parts:
            for name in names:
                request = getattr(messages, f"{name}Request")
                if hasattr(request, "pb"):  # proto-plus
                    request = type(request.pb(request()))
                yield Method(service, name, request, self._checked(getattr(part, name)))

    def _checked(self, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def checked(request: Any) -> Any:
            name = getattr(request, "parent", "") or getattr(request, "name", "") or request.node.name
            self._check(name.split("/")[1] if "/" in name else name, "tpu.googleapis.com")
            return answer(request)

        return checked
