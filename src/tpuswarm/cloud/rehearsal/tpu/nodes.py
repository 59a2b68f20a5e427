"""Nodes of the TPU API, one slice each, from CREATING to their end."""

import math
import random
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from google.cloud.tpu_v2.types import cloud_tpu
from google.protobuf import empty_pb2

from tpuswarm.catalog import Accelerator
from tpuswarm.cloud.rehearsal.common.api import (
    ABORTED,
    ALREADY_EXISTS,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    Refused,
    not_found,
)
from tpuswarm.cloud.rehearsal.common.hosts import Facts, Hosts, RehearsedHost
from tpuswarm.cloud.rehearsal.common.policies import default_account
from tpuswarm.cloud.rehearsal.common.records import Records
from tpuswarm.cloud.rehearsal.common.region_quotas import Held, RegionQuotas
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults, no_capacity, region_quota_exhausted
from tpuswarm.cloud.rehearsal.tpu.offers import (
    RUNTIMES,
    Offers,
    accelerator_config,
    parse_location,
    requested_accelerator,
)
from tpuswarm.cloud.rehearsal.tpu.operations import Operations, now

CREATE_S, DELETE_S, STOP_S, START_S, UPDATE_S = 60, 30, 30, 40, 5
SHORTEST_REFUSAL_S, LONGEST_REFUSAL_S = 5, 1800
"""How long after the request a zone reports that it has no capacity: mostly within two minutes. A public log of 2026
has a spot v6e refused after 23 minutes in CREATING."""
REGION_QUOTA_S = 60
"""How long after the request an exhausted quota of the region is reported: within two minutes in public logs."""
PREEMPTION_NOTICE_S, REPAIR_S = 30, 120
Ending = Literal["preempted", "terminated", "gone"]
"""The state in which a preempted node is listed; gone: it is not listed."""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
State, Health = cloud_tpu.Node.State, cloud_tpu.Node.Health
ENDED_STATES = (State.PREEMPTED, State.TERMINATED)
"""Nodes in these states hold no quota."""


class Nodes:
    """The methods for nodes of google.cloud.tpu.v2.Tpu."""

    def __init__(
        self,
        records: Records,
        timetable: Timetable,
        zone_faults: ZoneFaults,
        hosts: Hosts,
        offers: Offers,
        operations: Operations,
        region_quotas: RegionQuotas,
        check_network: Callable[[str, str, str, str], None],
    ):
        """check_network: raises Refused if the project's network has no such subnetwork in the zone's region."""
        self._table = records.table(
            "node",
            lambda body: cloud_tpu.Node.deserialize(body),
            lambda node: cloud_tpu.Node.serialize(node),
        )
        self._timetable, self._zone_faults, self._hosts = timetable, zone_faults, hosts
        self._offers, self._operations, self._check_network = offers, operations, check_network
        self._region_quotas = region_quotas
        region_quotas.sources.append(self._hosts_of_project)
        self.list_requested: Callable[[str], Iterable[tuple[Accelerator, bool]]] = lambda location: ()
        """Returns what queued resources of a location hold of its quota beside their nodes: accelerator, is_spot."""
        self.on_ready: Callable[[str], None] = lambda request: None
        """Called with the queued resource of a node that is ready."""
        self.on_end: Callable[[str, str | None], None] = lambda request, error: None
        """Called with the queued resource of a node that has ended, and the error if it was never created."""
        for what in ("created", "refused", "deleted", "stopped", "started", "updated", "taken", "repaired"):
            timetable.register(f"node {what}", getattr(self, f"_{what}"))

    def get(self, name: str) -> Any | None:
        return self._table.get(name)

    def all(self) -> list[Any]:
        return self._table.values()

    def check(self, parent: str, node_id: str, node: Any) -> Accelerator:
        """Return the accelerator that a node requests. Raises Refused if the node cannot be created."""
        location = parse_location(parent)
        if not NAME.fullmatch(node_id):
            raise Refused(INVALID_ARGUMENT, f"Invalid node id '{node_id}': it must match {NAME.pattern}")
        if f"{location.name}/nodes/{node_id}" in self._table:
            raise Refused(ALREADY_EXISTS, f"Resource '{location.name}/nodes/{node_id}' already exists")
        accelerator = requested_accelerator(node)
        self._offers.check(location, accelerator)
        if not node.runtime_version:
            raise Refused(INVALID_ARGUMENT, "runtime_version must be specified.")
        if node.runtime_version not in RUNTIMES:  # in the form of https://github.com/tensorflow/tpu/issues/877
            message = f'The field "runtime_version" cannot be "{node.runtime_version}".'
            raise Refused(INVALID_ARGUMENT, f"Cloud TPU received an invalid argument. {message}")
        config = node.network_config
        self._check_network(
            location.project, location.zone, config.network or "default", config.subnetwork or "default"
        )
        return accelerator

    def check_quota(self, parent: str, requested: Accelerator, is_spot: bool) -> None:
        """Raise Refused if the accelerator exceeds the project's quota."""
        location = parse_location(parent)
        held = [
            (_accelerator(node), _is_spot(node))
            for node in self._table.values()
            if node.name.startswith(f"{location.name}/") and node.state not in ENDED_STATES
        ]
        held += self.list_requested(location.name)
        self._zone_faults.check_quota(location.zone, requested, is_spot, held)

    def _hosts_of_project(self, project: str) -> Iterator[Held]:
        for node in self._table.values():
            if node.name.startswith(f"projects/{project}/") and node.state not in ENDED_STATES:
                has_external = node.network_config.enable_external_ips and node.state != State.STOPPED
                yield Held(parse_location(node.name).zone, _accelerator(node).hosts, has_external)

    def make(self, parent: str, node_id: str, node: Any, request: str = "") -> Any:
        """Begin to create a checked node, of a queued resource or none; return the operation."""
        location = parse_location(parent)
        accelerator = requested_accelerator(node)
        node = cloud_tpu.Node(node)
        node.name = f"{location.name}/nodes/{node_id}"
        node.state, node.create_time, node.id = State.CREATING, now(), secrets.randbits(62)
        node.accelerator_type, node.accelerator_config = accelerator.api_name, accelerator_config(accelerator)
        node.queued_resource = request
        node.network_config.network = node.network_config.network or "default"
        wanted = Held(location.zone, accelerator.hosts, node.network_config.enable_external_ips)
        quota = self._region_quotas.find_exhausted(location.project, wanted)
        self._table.put(node.name, node)
        operation = self._operations.begin(node.name, "create")
        if quota is not None:
            self._timetable.schedule(REGION_QUOTA_S, "node refused", node.name, node.id, operation.name, quota)
        elif self._zone_faults.has_fault(location.zone, "stockout"):
            self._timetable.schedule(_draw_refusal_s(), "node refused", node.name, node.id, operation.name)
        elif not self._zone_faults.has_fault(location.zone, "stuck"):
            self._timetable.schedule(CREATE_S, "node created", node.name, node.id, operation.name)
        return operation

    def remove(self, name: str) -> Any:
        return self._begin(self._table[name], State.DELETING, "delete", DELETE_S, "node deleted")

    def facts(self, host: RehearsedHost) -> Facts | None:
        """Return the facts of a host's node; None if it is gone."""
        node = self._table.get(host.owner)
        if node is None:
            return None
        location = parse_location(node.name)
        node_id = node.name.rsplit("/", 1)[-1]
        bounds = (*_accelerator(node).host_topology, 1)[:3]
        tpu_env = {
            "ACCELERATOR_TYPE": node.accelerator_type,
            "CHIPS_PER_HOST_BOUNDS": ",".join(map(str, bounds)),
            "NODE_ID": node_id,
            "RUNTIME_VERSION": node.runtime_version,
            "WORKER_ID": str(host.number),
            "ZONE": location.zone,
        }
        workers = self._hosts.list_workers(node.name)
        attributes = {
            **node.metadata,
            "accelerator-type": node.accelerator_type,
            "agent-worker-number": str(host.number),
            "instance-id": node_id,
            "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in tpu_env.items()),
            "worker-network-endpoints": ",".join(f"unknown:unknown:{worker.internal}" for worker in workers),
        }
        account = node.service_account.email or default_account(location.project)
        return Facts(
            location.project, location.zone, node.accelerator_type, attributes, list(node.tags), _is_spot(node), account
        )

    # Faults.

    def preempt(self, name: str, ending: Ending) -> None:
        """Give notice to a node's processes and preempt it later."""
        node = self._find_in(name, State.READY, "do that to")
        self._hosts.give_notice(name)
        self._timetable.schedule(PREEMPTION_NOTICE_S, "node taken", name, node.id, ending)

    def maintain(self, name: str) -> None:
        """Repair a node: it reboots and gets new external addresses."""
        node = self._find_in(name, State.READY, "do that to")
        node.state, node.health = State.REPAIRING, Health.UNHEALTHY_MAINTENANCE
        node.health_description = "The TPU had a maintenance event and is being repaired."
        self._hosts.turn_off(name)
        self._table.put(name, node)
        self._timetable.schedule(REPAIR_S, "node repaired", name, node.id)

    def set_fault(self, name: str, fault: str, is_planted: bool) -> None:
        """Begin or end to report one of NODE_FAULTS."""
        node = self._find_in(name, State.READY, "do that to")
        if fault == "symptom":
            symptom = cloud_tpu.Symptom(symptom_type="LOW_MEMORY", worker_id="0", create_time=now())
            node.symptoms = [symptom] if is_planted else []
        else:
            node.health = Health.UNHEALTHY_TENSORFLOW if is_planted else Health.HEALTHY
            node.health_description = "The TPU's runtime does not answer." if is_planted else ""
        self._table.put(name, node)

    # The API.

    def CreateNode(self, request: Any) -> Any:
        node = cloud_tpu.Node(request.node)
        accelerator = self.check(request.parent, request.node_id, node)
        self.check_quota(request.parent, accelerator, _is_spot(node))
        return self.make(request.parent, request.node_id, node)

    def GetNode(self, request: Any) -> Any:
        return cloud_tpu.Node.pb(self._find(request.name))

    def ListNodes(self, request: Any) -> Any:
        nodes, token, unreachable = list_page(request, self._table.items(), self._zone_faults)
        answer = cloud_tpu.ListNodesResponse(nodes=nodes, next_page_token=token, unreachable=unreachable)
        return cloud_tpu.ListNodesResponse.pb(answer)

    def DeleteNode(self, request: Any) -> Any:
        return self.remove(self._find(request.name).name)

    def StopNode(self, request: Any) -> Any:
        if _accelerator(self._find(request.name)).hosts > 1:
            raise Refused(FAILED_PRECONDITION, "Stopping a TPU Pod is not supported; it can only be deleted.")
        node = self._find_in(request.name, State.READY, "stop")
        return self._begin(node, State.STOPPING, "stop", STOP_S, "node stopped")

    def StartNode(self, request: Any) -> Any:
        if _is_spot(self._find(request.name)):
            raise Refused(FAILED_PRECONDITION, "A Spot or preemptible TPU cannot be started again; delete it.")
        node = self._find_in(request.name, State.STOPPED, "start")
        return self._begin(node, State.STARTING, "start", START_S, "node started")

    def UpdateNode(self, request: Any) -> Any:
        update = cloud_tpu.Node(request.node)
        node = self._find(update.name)
        for path in request.update_mask.paths:
            if path not in ("description", "labels", "metadata", "tags", "network_config.enable_external_ips"):
                raise Refused(INVALID_ARGUMENT, f"Updating '{path}' is not supported.")
        for path in request.update_mask.paths:
            if path == "network_config.enable_external_ips":
                self._find_in(node.name, State.READY, "change the addresses of")
                node.network_config.enable_external_ips = update.network_config.enable_external_ips
                self._hosts.set_external(node.name, node.network_config.enable_external_ips)
                self._set_ready(node)
            else:
                setattr(node, path, getattr(update, path))
        return self._begin(node, node.state, "update", UPDATE_S, "node updated")

    def _begin(self, node: Any, state: Any, verb: str, seconds: float, event: str) -> Any:
        """Give a node a new state and begin an operation on it."""
        node.state = state
        self._table.put(node.name, node)
        operation = self._operations.begin(node.name, verb)
        self._timetable.schedule(seconds, event, node.name, node.id, operation.name)
        return operation

    # Events of the timetable.

    def _created(self, name: str, node_number: int, operation: str) -> None:
        node = self._find_same(name, node_number, State.CREATING)
        if node is None:
            self._operations.fail(operation, Refused(ABORTED, f"'{name}' was deleted while it was being created."))
            return
        accelerator = _accelerator(node)
        for worker in range(accelerator.hosts):
            self._hosts.add(name, worker, node.network_config.enable_external_ips, accelerator)
        self._set_ready(node)
        self._operations.succeed(operation, cloud_tpu.Node.pb(node))
        if node.queued_resource:
            self.on_ready(node.queued_resource)

    def _refused(self, name: str, node_number: int, operation: str, quota: str | None = None) -> None:
        error = region_quota_exhausted(quota) if quota else no_capacity(parse_location(name).zone)
        if node := self._find_same(name, node_number, State.CREATING):
            self._table.pop(name)
            if node.queued_resource:
                self.on_end(node.queued_resource, error.message)
        self._operations.fail(operation, error)

    def _deleted(self, name: str, node_number: int, operation: str) -> None:
        if node := self._find_same(name, node_number):
            self._forget(node)
        self._operations.succeed(operation, empty_pb2.Empty())

    def _stopped(self, name: str, node_number: int, operation: str) -> None:
        if node := self._find_same(name, node_number, State.STOPPING):
            self._turn_off(node, State.STOPPED)
            self._operations.succeed(operation, cloud_tpu.Node.pb(node))

    def _started(self, name: str, node_number: int, operation: str) -> None:
        if node := self._find_same(name, node_number, State.STARTING):
            self._hosts.boot(name)
            self._set_ready(node)
            self._operations.succeed(operation, cloud_tpu.Node.pb(node))

    def _updated(self, name: str, node_number: int, operation: str) -> None:
        if node := self._find_same(name, node_number):
            self._operations.succeed(operation, cloud_tpu.Node.pb(node))

    def _taken(self, name: str, node_number: int, ending: Ending) -> None:
        node = self._find_same(name, node_number)
        if node is None or node.state == State.DELETING:
            return
        if ending == "gone":
            self._forget(node)
        else:
            self._turn_off(node, State.PREEMPTED if ending == "preempted" else State.TERMINATED)
            if node.queued_resource:
                self.on_end(node.queued_resource, None)

    def _repaired(self, name: str, node_number: int) -> None:
        if node := self._find_same(name, node_number, State.REPAIRING):
            self._hosts.boot(name, has_new_external=True)
            self._set_ready(node)

    def _turn_off(self, node: Any, state: Any) -> None:
        self._hosts.turn_off(node.name)
        node.state, node.health = state, 0
        self._table.put(node.name, node)

    def _set_ready(self, node: Any) -> None:
        node.state, node.health, node.health_description = State.READY, Health.HEALTHY, ""
        node.network_endpoints = [
            cloud_tpu.NetworkEndpoint(
                ip_address=host.internal,
                port=8470,
                access_config=cloud_tpu.AccessConfig(external_ip=host.external) if host.external else None,
            )
            for host in self._hosts.list_workers(node.name)
        ]
        self._table.put(node.name, node)

    def _forget(self, node: Any) -> None:
        self._table.pop(node.name)
        self._hosts.remove(node.name)
        if node.queued_resource:
            self.on_end(node.queued_resource, None)

    def _find(self, name: str) -> Any:
        """Return a node. Raises Refused if its zone is not reachable or it does not exist."""
        self._zone_faults.check_reachable(parse_location(name).zone)
        node = self._table.get(name)
        if node is None:
            raise not_found(name)
        return node

    def _find_in(self, name: str, state: Any, verb: str) -> Any:
        """Return a node. Raises Refused unless it is in this state."""
        node = self._find(name)
        if node.state != state:
            node_id = name.rsplit("/", 1)[-1]
            message = f"Cannot {verb} TPU {node_id}: it is {State(node.state).name}, not {state.name}."
            raise Refused(FAILED_PRECONDITION, message)
        return node

    def _find_same(self, name: str, node_number: int, state: Any | None = None) -> Any | None:
        """Return the node, or None if it is gone, in another state, or another node has its name."""
        node = self._table.get(name)
        return node if node is not None and node.id == node_number and state in (None, node.state) else None


def list_page(request: Any, items: list[tuple[str, Any]], zone_faults: ZoneFaults) -> tuple[list[Any], str, list[str]]:
    """Return the requested page of resources by name, the next page's token, and the unreachable locations."""
    location = parse_location(request.parent)
    unreachable: list[str] = []
    if location.zone == "-":
        locations = f"projects/{location.project}/locations/"
        unreachable = [f"{locations}{zone}" for zone in zone_faults.unreachable_zones()]
        prefix = locations
    else:
        zone_faults.check_reachable(location.zone)
        prefix = f"{location.name}/"
    matches = [
        resource
        for name, resource in items
        if name.startswith(prefix) and not zone_faults.has_fault(parse_location(name).zone, "hidden", "unreachable")
    ]
    start, size = int(request.page_token or 0), request.page_size or 1000
    return matches[start : start + size], str(start + size) if start + size < len(matches) else "", unreachable


def _draw_refusal_s() -> float:
    return math.exp(random.uniform(math.log(SHORTEST_REFUSAL_S), math.log(LONGEST_REFUSAL_S)))


def _is_spot(node: Any) -> bool:
    return bool(node.scheduling_config.spot or node.scheduling_config.preemptible)


def _accelerator(node: Any) -> Accelerator:
    """Return the accelerator of a created node, which has both accelerator_type and accelerator_config."""
    return requested_accelerator(cloud_tpu.Node(accelerator_type=node.accelerator_type))
