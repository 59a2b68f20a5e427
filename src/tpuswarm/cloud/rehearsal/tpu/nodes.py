"""Nodes: one slice each, from CREATING to its end, whichever that is."""

import re
import secrets
from collections.abc import Callable
from typing import Any, Literal

from google.cloud.tpu_v2.types import cloud_tpu
from google.protobuf import empty_pb2

from tpuswarm.catalog import Accelerator
from tpuswarm.cloud.rehearsal.common.hosts import Facts, Hosts, RehearsedHost
from tpuswarm.cloud.rehearsal.common.records import Records
from tpuswarm.cloud.rehearsal.common.refused import (
    ABORTED,
    ALREADY_EXISTS,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    Refused,
    not_found,
)
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.weather import Weather, no_capacity
from tpuswarm.cloud.rehearsal.tpu.offers import Offers, accelerator_of, kind_of, place_of
from tpuswarm.cloud.rehearsal.tpu.operations import Operations, now

CREATE_S, DELETE_S, STOP_S, START_S, UPDATE_S = 60, 30, 30, 40, 5
REFUSE_S = 30
"""A zone says so late that it has no capacity."""
NOTICE_S = 30
"""Between SIGTERM and the end of a machine that is preempted."""
REPAIR_S = 120
Ending = Literal["preempted", "terminated", "gone"]
"""How a preempted node shows: PREEMPTED, TERMINATED, or not at all."""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
State = cloud_tpu.Node.State


class Nodes:
    """The part of google.cloud.tpu.v2.Tpu that is about nodes."""

    def __init__(
        self,
        records: Records,
        timetable: Timetable,
        weather: Weather,
        hosts: Hosts,
        offers: Offers,
        operations: Operations,
    ):
        self._table = records.table(
            "node",
            lambda body: cloud_tpu.Node.deserialize(body),
            lambda node: cloud_tpu.Node.serialize(node),
        )
        self._timetable, self._weather, self._hosts = timetable, weather, hosts
        self._offers, self._operations = offers, operations
        self.ended: Callable[[str, str | None], None] = lambda request, why: None
        """Called with the name of the queued resource whose node has ended, or could not be made and why."""
        self.check_network: Callable[[str, str, str, str], None] = lambda project, zone, network, subnetwork: None
        """Raises Refused for a subnetwork that the network does not have in the zone's region."""
        self.made: Callable[[str], None] = lambda request: None
        """Called with the name of the queued resource whose node is ready."""
        for what in ("created", "refused", "deleted", "stopped", "started", "updated", "taken", "repaired"):
            timetable.on(f"node {what}", getattr(self, f"_{what}"))

    # What others of the cloud ask and do.

    def get(self, name: str) -> Any | None:
        """The node; None if there is none."""
        return self._table.get(name)

    def all(self) -> list[Any]:
        """Every one."""
        return self._table.values()

    def check(self, parent: str, node_id: str, node: Any) -> Accelerator:
        """What a node asks for. Raises Refused for what would not be made."""
        place = place_of(parent)
        if not NAME.fullmatch(node_id):
            raise Refused(INVALID_ARGUMENT, f"Invalid node id '{node_id}': it must match {NAME.pattern}")
        if f"{place.name}/nodes/{node_id}" in self._table:
            raise Refused(ALREADY_EXISTS, f"Resource '{place.name}/nodes/{node_id}' already exists")
        accelerator = accelerator_of(node)
        self._offers.check(place, accelerator)
        if not node.runtime_version:
            raise Refused(INVALID_ARGUMENT, "runtime_version must be specified.")
        wanted = node.network_config
        self.check_network(place.project, place.zone, wanted.network or "default", wanted.subnetwork or "default")
        return accelerator

    def check_quota(self, parent: str, wanted: Accelerator, spot: bool) -> None:
        """Raises Refused if the project may not have it as well."""
        place = place_of(parent)
        alive = (each for each in self._table.values() if each.name.startswith(f"{place.name}/") and _holds(each))
        self._weather.check_quota(
            place.zone, wanted, spot, ((accelerator_of_made(each), is_spot(each)) for each in alive)
        )

    def make(self, parent: str, node_id: str, node: Any, request: str = "") -> Any:
        """Begin to make one that was checked; its operation. `request`: the queued resource that it comes from."""
        place = place_of(parent)
        accelerator = accelerator_of(node)
        node = cloud_tpu.Node(node)
        node.name = f"{place.name}/nodes/{node_id}"
        node.state, node.create_time, node.id = State.CREATING, now(), secrets.randbits(62)
        node.accelerator_type, node.accelerator_config = accelerator.api_name, kind_of(accelerator)
        node.queued_resource = request
        node.network_config.network = node.network_config.network or "default"
        self._table.put(node.name, node)
        operation = self._operations.begin(node.name, "create")
        if self._weather.has(place.zone, "stockout"):
            self._timetable.after(REFUSE_S, "node refused", node.name, node.id, operation.name)
        elif not self._weather.has(place.zone, "stuck"):
            self._timetable.after(CREATE_S, "node created", node.name, node.id, operation.name)
        return operation

    def preempt(self, name: str, ending: Ending = "preempted") -> None:
        """Take it away, after a notice to what runs there."""
        node = self._alive(name)
        for host in self._hosts.of(node.name):
            self._hosts.announce(host)
        self._timetable.after(NOTICE_S, "node taken", name, node.id, ending)

    def maintain(self, name: str) -> None:
        """Repair it: it reboots, and has another external address afterwards."""
        node = self._alive(name)
        node.state, node.health = State.REPAIRING, cloud_tpu.Node.Health.UNHEALTHY_MAINTENANCE
        node.health_description = "The TPU had a maintenance event and is being repaired."
        for host in self._hosts.of(name):
            self._hosts.turn_off(host)
        self._table.put(name, node)
        self._timetable.after(REPAIR_S, "node repaired", name, node.id)

    def report(self, name: str, fault: str, wrong: bool) -> None:
        """Say one of NODE_FAULTS of it, or no longer."""
        node = self._alive(name)
        if fault == "symptom":
            node.symptoms = (
                [cloud_tpu.Symptom(symptom_type="LOW_MEMORY", worker_id="0", create_time=now())] if wrong else []
            )
        else:
            node.health = cloud_tpu.Node.Health.UNHEALTHY_TENSORFLOW if wrong else cloud_tpu.Node.Health.HEALTHY
            node.health_description = "The TPU's runtime does not answer." if wrong else ""
        self._table.put(name, node)

    def remove(self, name: str) -> Any:
        """Begin to delete it; the operation."""
        node = self._table[name]
        node.state = State.DELETING
        self._table.put(name, node)
        operation = self._operations.begin(name, "delete")
        self._timetable.after(DELETE_S, "node deleted", name, node.id, operation.name)
        return operation

    def facts(self, host: RehearsedHost) -> Facts | None:
        """What one of its hosts may know of a node."""
        node = self._table.get(host.owner)
        if node is None:
            return None
        place = place_of(node.name)
        workers = self._hosts.of(node.name)
        bounds = (*accelerator_of_made(node).host_topology, 1)[:3]
        tpu_env = {
            "ACCELERATOR_TYPE": node.accelerator_type,
            "CHIPS_PER_HOST_BOUNDS": ",".join(map(str, bounds)),
            "NODE_ID": node.name.rsplit("/", 1)[-1],
            "RUNTIME_VERSION": node.runtime_version,
            "WORKER_ID": str(host.number),
            "ZONE": place.zone,
        }
        attributes = {
            **node.metadata,
            "accelerator-type": node.accelerator_type,
            "agent-worker-number": str(host.number),
            "instance-id": node.name.rsplit("/", 1)[-1],
            "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in tpu_env.items()),
            "worker-network-endpoints": ",".join(f"unknown:unknown:{each.internal}" for each in workers),
        }
        return Facts(place.project, place.zone, node.accelerator_type, attributes, list(node.tags), is_spot(node))

    # The API.

    def CreateNode(self, request: Any) -> Any:
        node = cloud_tpu.Node(request.node)
        accelerator = self.check(request.parent, request.node_id, node)
        self.check_quota(request.parent, accelerator, is_spot(node))
        return self.make(request.parent, request.node_id, node)

    def GetNode(self, request: Any) -> Any:
        return cloud_tpu.Node.pb(self._find(request.name))

    def ListNodes(self, request: Any) -> Any:
        place = place_of(request.parent)
        unreachable: list[str] = []
        if place.zone == "-":
            unreachable = self._weather.unreachable()
            prefix = f"projects/{place.project}/locations/"
        else:
            self._weather.reach(place.zone)
            prefix = f"{place.name}/"
        found = [
            node for name, node in self._table.items() if name.startswith(prefix) and self._visible(place_of(name).zone)
        ]
        start, size = int(request.page_token or 0), request.page_size or 1000
        answer = cloud_tpu.ListNodesResponse(
            nodes=found[start : start + size],
            next_page_token=str(start + size) if start + size < len(found) else "",
            unreachable=[f"projects/{place.project}/locations/{zone}" for zone in unreachable],
        )
        return cloud_tpu.ListNodesResponse.pb(answer)

    def DeleteNode(self, request: Any) -> Any:
        self._find(request.name)
        return self.remove(request.name)

    def StopNode(self, request: Any) -> Any:
        node = self._find(request.name)
        if accelerator_of_made(node).hosts > 1:
            raise Refused(FAILED_PRECONDITION, "Stopping a TPU Pod is not supported; it can only be deleted.")
        self._must_be(node, State.READY, "stop")
        return self._turn(node, State.STOPPING, "stop", STOP_S, "node stopped")

    def StartNode(self, request: Any) -> Any:
        node = self._find(request.name)
        if is_spot(node):
            raise Refused(FAILED_PRECONDITION, "A Spot or preemptible TPU cannot be started again; delete it.")
        self._must_be(node, State.STOPPED, "start")
        return self._turn(node, State.STARTING, "start", START_S, "node started")

    def _turn(self, node: Any, state: Any, verb: str, seconds: float, then: str) -> Any:
        node.state = state
        self._table.put(node.name, node)
        operation = self._operations.begin(node.name, verb)
        self._timetable.after(seconds, then, node.name, node.id, operation.name)
        return operation

    def UpdateNode(self, request: Any) -> Any:
        wanted = cloud_tpu.Node(request.node)
        node = self._find(wanted.name)
        for path in request.update_mask.paths:
            if path not in ("description", "labels", "metadata", "tags", "network_config.enable_external_ips"):
                raise Refused(INVALID_ARGUMENT, f"Updating '{path}' is not supported.")
        for path in request.update_mask.paths:
            if path == "network_config.enable_external_ips":
                self._must_be(node, State.READY, "change the addresses of")
                node.network_config.enable_external_ips = wanted.network_config.enable_external_ips
                for host in self._hosts.of(node.name):
                    self._hosts.expose(host, node.network_config.enable_external_ips)
                self._ready(node)
            else:
                setattr(node, path, getattr(wanted, path))
        self._table.put(node.name, node)
        operation = self._operations.begin(node.name, "update")
        self._timetable.after(UPDATE_S, "node updated", node.name, node.id, operation.name)
        return operation

    # What happens when its time has come.

    def _created(self, name: str, number: int, operation: str) -> None:
        node = self._same(name, number)
        if node is None or node.state != State.CREATING:
            self._operations.fail(operation, Refused(ABORTED, f"'{name}' was deleted while it was being created."))
            return
        accelerator = accelerator_of_made(node)
        external = node.network_config.enable_external_ips
        for number in range(accelerator.hosts):
            self._hosts.add(name, number, external, accelerator)
        self._ready(node)
        self._operations.succeed(operation, cloud_tpu.Node.pb(node))
        if node.queued_resource:
            self.made(node.queued_resource)

    def _refused(self, name: str, number: int, operation: str) -> None:
        why = no_capacity(place_of(name).zone)
        if (node := self._same(name, number)) and node.state == State.CREATING:
            self._table.pop(name)
            if node.queued_resource:
                self.ended(node.queued_resource, why.message)
        self._operations.fail(operation, why)

    def _deleted(self, name: str, number: int, operation: str) -> None:
        if node := self._same(name, number):
            self._forget(node)
        self._operations.succeed(operation, empty_pb2.Empty())

    def _stopped(self, name: str, number: int, operation: str) -> None:
        if (node := self._same(name, number)) and node.state == State.STOPPING:
            for host in self._hosts.of(name):
                self._hosts.turn_off(host)
            node.state, node.health = State.STOPPED, 0
            self._table.put(name, node)
            self._operations.succeed(operation, cloud_tpu.Node.pb(node))

    def _started(self, name: str, number: int, operation: str) -> None:
        if (node := self._same(name, number)) and node.state == State.STARTING:
            self._boot(node)
            self._operations.succeed(operation, cloud_tpu.Node.pb(node))

    def _updated(self, name: str, number: int, operation: str) -> None:
        if node := self._same(name, number):
            self._operations.succeed(operation, cloud_tpu.Node.pb(node))

    def _taken(self, name: str, number: int, ending: Ending) -> None:
        node = self._same(name, number)
        if node is None or node.state == State.DELETING:
            return
        request = node.queued_resource
        if ending == "gone":
            self._forget(node)
        else:
            for host in self._hosts.of(name):
                self._hosts.turn_off(host)
            node.state = State.PREEMPTED if ending == "preempted" else State.TERMINATED
            node.health = 0
            self._table.put(name, node)
            if request:
                self.ended(request, None)

    def _repaired(self, name: str, number: int) -> None:
        if (node := self._same(name, number)) and node.state == State.REPAIRING:
            self._boot(node, new_external=True)

    def _boot(self, node: Any, new_external: bool = False) -> None:
        for host in self._hosts.of(node.name):
            self._hosts.boot(host, new_external)
        self._ready(node)

    def _ready(self, node: Any) -> None:
        node.state, node.health, node.health_description = State.READY, cloud_tpu.Node.Health.HEALTHY, ""
        node.network_endpoints = [
            cloud_tpu.NetworkEndpoint(
                ip_address=host.internal,
                port=8470,
                access_config=cloud_tpu.AccessConfig(external_ip=host.external) if host.external else None,
            )
            for host in self._hosts.of(node.name)
        ]
        self._table.put(node.name, node)

    def _forget(self, node: Any) -> None:
        self._table.pop(node.name)
        self._hosts.remove(node.name)
        if node.queued_resource:
            self.ended(node.queued_resource, None)

    def _find(self, name: str) -> Any:
        self._weather.reach(place_of(name).zone)
        node = self._table.get(name)
        if node is None:
            raise not_found(name)
        return node

    def _same(self, name: str, number: int) -> Any | None:
        """The node of that name, unless it is another one by now."""
        node = self._table.get(name)
        return node if node is not None and node.id == number else None

    def _alive(self, name: str) -> Any:
        node = self._find(name)
        self._must_be(node, State.READY, "do that to")
        return node

    def _must_be(self, node: Any, state: Any, verb: str) -> None:
        if node.state != state:
            short = node.name.rsplit("/", 1)[-1]
            raise Refused(
                FAILED_PRECONDITION, f"Cannot {verb} TPU {short}: it is {State(node.state).name}, not {state.name}."
            )

    def _visible(self, zone: str) -> bool:
        return not (self._weather.has(zone, "hidden") or self._weather.has(zone, "unreachable"))


def is_spot(node: Any) -> bool:
    """Whether it may be taken away."""
    return bool(node.scheduling_config.spot or node.scheduling_config.preemptible)


def accelerator_of_made(node: Any) -> Accelerator:
    """What a node is, which shows both forms."""
    return accelerator_of(cloud_tpu.Node(accelerator_type=node.accelerator_type))


def _holds(node: Any) -> bool:
    """Whether it counts for the quota."""
    return node.state not in (State.PREEMPTED, State.TERMINATED)
