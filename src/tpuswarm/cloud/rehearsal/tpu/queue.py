"""Queued resources of the TPU API: each waits for its node's capacity, and ends when the node ends."""

from collections.abc import Iterator
from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu
from google.protobuf import empty_pb2
from google.rpc import status_pb2

from tpuswarm.catalog import Accelerator
from tpuswarm.cloud.rehearsal.common.api import (
    ALREADY_EXISTS,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    Refused,
    not_found,
)
from tpuswarm.cloud.rehearsal.common.records import Records
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults
from tpuswarm.cloud.rehearsal.tpu.nodes import ENDED_STATES, NAME, Nodes, list_page
from tpuswarm.cloud.rehearsal.tpu.nodes import State as NodeState
from tpuswarm.cloud.rehearsal.tpu.offers import parse_location, requested_accelerator
from tpuswarm.cloud.rehearsal.tpu.operations import Operations, now

ACCEPT_S, RETRY_S, SUSPEND_S, DELETE_S = 5, 30, 20, 20
State = cloud_tpu.QueuedResourceState.State
DELETABLE_STATES = (State.ACCEPTED, State.WAITING_FOR_RESOURCES, State.FAILED, State.SUSPENDED)
"""States in which a request may be deleted without force."""


class Queue:
    """The methods for queued resources of google.cloud.tpu.v2.Tpu."""

    def __init__(
        self, records: Records, timetable: Timetable, zone_faults: ZoneFaults, nodes: Nodes, operations: Operations
    ):
        self._table = records.table(
            "queued resource",
            lambda body: cloud_tpu.QueuedResource.deserialize(body),
            lambda request: cloud_tpu.QueuedResource.serialize(request),
        )
        self._timetable, self._zone_faults, self._nodes, self._operations = timetable, zone_faults, nodes, operations
        nodes.on_ready, nodes.on_end = self._handle_ready_node, self._handle_ended_node
        nodes.list_requested = self._list_requested
        for what in ("accepted", "tried", "expired", "suspended", "deleted", "reset"):
            timetable.register(f"request {what}", getattr(self, f"_{what}"))

    def all(self) -> list[Any]:
        return self._table.values()

    def _list_requested(self, location: str) -> Iterator[tuple[Accelerator, bool]]:
        """List what requests hold of a location's quota, also SUSPENDED and FAILED ones, until they are deleted."""
        for queued in self._table.values():
            if queued.state.state == State.ACTIVE:
                continue
            living = {node.name for node in self._nodes_of(queued) if node.state not in ENDED_STATES}
            for spec in queued.tpu.node_spec:
                names = (f"{spec.parent}/nodes/{node_id}" for node_id in _node_ids(spec))
                missing = [name for name in names if name not in living and name.startswith(f"{location}/")]
                yield from [(requested_accelerator(spec.node), "spot" in queued)] * len(missing)

    def CreateQueuedResource(self, request: Any) -> Any:
        name = f"{parse_location(request.parent).name}/queuedResources/{request.queued_resource_id}"
        if not NAME.fullmatch(request.queued_resource_id):
            raise Refused(INVALID_ARGUMENT, f"Invalid queued resource id '{request.queued_resource_id}'")
        if name in self._table:
            raise Refused(ALREADY_EXISTS, f"Resource '{name}' already exists")
        queued = cloud_tpu.QueuedResource(request.queued_resource)
        if not queued.tpu.node_spec:
            raise Refused(INVALID_ARGUMENT, "tpu.node_spec must be specified.")
        is_spot = "spot" in queued
        for spec in queued.tpu.node_spec:
            spec.parent = spec.parent or request.parent
            for node_id in _node_ids(spec):
                accelerator = self._nodes.check(spec.parent, node_id, spec.node)
                self._nodes.check_quota(spec.parent, accelerator, is_spot)
        queued.name, queued.create_time = name, now()
        queued.state = cloud_tpu.QueuedResourceState(
            state=State.CREATING, state_initiator=cloud_tpu.QueuedResourceState.StateInitiator.USER
        )
        self._table.put(name, queued)
        operation = self._operations.begin(name, "create")
        self._timetable.schedule(ACCEPT_S, "request accepted", name, operation.name)
        policy = queued.queueing_policy
        if "valid_until_duration" in policy:
            self._timetable.schedule(policy.valid_until_duration.total_seconds(), "request expired", name)
        elif "valid_until_time" in policy:
            self._timetable.schedule_at(policy.valid_until_time.timestamp(), "request expired", name)
        return operation

    def GetQueuedResource(self, request: Any) -> Any:
        return cloud_tpu.QueuedResource.pb(self._find(request.name))

    def ListQueuedResources(self, request: Any) -> Any:
        requests, token, unreachable = list_page(request, self._table.items(), self._zone_faults)
        answer = cloud_tpu.ListQueuedResourcesResponse(
            queued_resources=requests, next_page_token=token, unreachable=unreachable
        )
        return cloud_tpu.ListQueuedResourcesResponse.pb(answer)

    def DeleteQueuedResource(self, request: Any) -> Any:
        queued = self._find(request.name)
        nodes = self._nodes_of(queued)
        if nodes and not request.force and queued.state.state not in DELETABLE_STATES:
            raise Refused(
                FAILED_PRECONDITION,
                f"Cannot delete '{queued.name}' in state {State(queued.state.state).name}: "
                "delete its nodes first, or use force.",
            )
        self._set_state(queued, State.DELETING)
        for node in nodes:
            if node.state != NodeState.DELETING:
                self._nodes.remove(node.name)
        operation = self._operations.begin(queued.name, "delete")
        self._timetable.schedule(DELETE_S, "request deleted", queued.name, operation.name)
        return operation

    def ResetQueuedResource(self, request: Any) -> Any:
        queued = self._find(request.name)
        if queued.state.state != State.ACTIVE:
            raise Refused(FAILED_PRECONDITION, f"'{queued.name}' can only be reset when it is ACTIVE.")
        for node in self._nodes_of(queued):
            self._nodes.remove(node.name)
        operation = self._operations.begin(queued.name, "reset")
        self._timetable.schedule(SUSPEND_S, "request reset", queued.name, operation.name)
        return operation

    # Events of the timetable.

    def _accepted(self, name: str, operation: str) -> None:
        if queued := self._find_in(name, State.CREATING):
            self._set_state(queued, State.WAITING_FOR_RESOURCES)
            self._operations.succeed(operation, cloud_tpu.QueuedResource.pb(queued))
            self._timetable.schedule(RETRY_S, "request tried", name)

    def _tried(self, name: str) -> None:
        queued = self._find_in(name, State.WAITING_FOR_RESOURCES)
        if queued is None:
            return
        zones = {parse_location(spec.parent).zone for spec in queued.tpu.node_spec}
        if any(self._zone_faults.has_fault(zone, "stockout", "unreachable") for zone in zones):
            self._timetable.schedule(RETRY_S, "request tried", name)
            return
        is_spot = "spot" in queued
        try:
            for spec in queued.tpu.node_spec:
                for node_id in _node_ids(spec):
                    self._nodes.check(spec.parent, node_id, spec.node)
        except Refused as error:
            self._fail(queued, error)
            return
        self._set_state(queued, State.PROVISIONING)
        for spec in queued.tpu.node_spec:
            for node_id in _node_ids(spec):
                node = cloud_tpu.Node(spec.node)
                node.scheduling_config.spot = is_spot
                self._nodes.make(spec.parent, node_id, node, name)

    def _handle_ready_node(self, name: str) -> None:
        queued = self._find_in(name, State.PROVISIONING)
        if queued and all(node.state == NodeState.READY for node in self._nodes_of(queued)):
            self._set_state(queued, State.ACTIVE)

    def _handle_ended_node(self, name: str, error: str | None) -> None:
        queued = self._table.get(name)
        if queued is None or queued.state.state in (State.DELETING, State.SUSPENDING, State.SUSPENDED, State.FAILED):
            return
        if error is not None:
            self._fail(queued, Refused(RESOURCE_EXHAUSTED, error))
            return
        self._set_state(queued, State.SUSPENDING)
        self._timetable.schedule(SUSPEND_S, "request suspended", name)

    def _suspended(self, name: str) -> None:
        if queued := self._find_in(name, State.SUSPENDING):
            self._set_state(queued, State.SUSPENDED)

    def _expired(self, name: str) -> None:
        queued = self._table.get(name)
        if queued and queued.state.state in (State.CREATING, State.ACCEPTED, State.WAITING_FOR_RESOURCES):
            self._fail(
                queued, Refused(DEADLINE_EXCEEDED, "The queued resource was not provisioned within its validity.")
            )

    def _deleted(self, name: str, operation: str) -> None:
        queued = self._table.get(name)
        if queued and self._nodes_of(queued):  # their deletion takes longer
            self._timetable.schedule(DELETE_S, "request deleted", name, operation)
            return
        self._table.pop(name)
        self._operations.succeed(operation, empty_pb2.Empty())

    def _reset(self, name: str, operation: str) -> None:
        queued = self._table.get(name)
        if queued is None or queued.state.state == State.DELETING:
            return
        if self._nodes_of(queued):
            self._timetable.schedule(SUSPEND_S, "request reset", name, operation)
            return
        self._set_state(queued, State.WAITING_FOR_RESOURCES)
        self._operations.succeed(operation, cloud_tpu.QueuedResource.pb(queued))
        self._timetable.schedule(RETRY_S, "request tried", name)

    def _fail(self, queued: Any, error: Refused) -> None:
        queued.state = cloud_tpu.QueuedResourceState(
            state=State.FAILED,
            failed_data=cloud_tpu.QueuedResourceState.FailedData(
                error=status_pb2.Status(code=error.code, message=error.message)
            ),
            state_initiator=cloud_tpu.QueuedResourceState.StateInitiator.SERVICE,
        )
        self._table.put(queued.name, queued)

    def _set_state(self, queued: Any, state: Any) -> None:
        initiator = cloud_tpu.QueuedResourceState.StateInitiator
        by = initiator.USER if state == State.DELETING else initiator.SERVICE
        queued.state = cloud_tpu.QueuedResourceState(state=state, state_initiator=by)
        self._table.put(queued.name, queued)

    def _find(self, name: str) -> Any:
        self._zone_faults.check_reachable(parse_location(name).zone)
        queued = self._table.get(name)
        if queued is None:
            raise not_found(name)
        return queued

    def _find_in(self, name: str, state: Any) -> Any | None:
        queued = self._table.get(name)
        return queued if queued is not None and queued.state.state == state else None

    def _nodes_of(self, queued: Any) -> list[Any]:
        names = [f"{spec.parent}/nodes/{node_id}" for spec in queued.tpu.node_spec for node_id in _node_ids(spec)]
        nodes = (self._nodes.get(name) for name in names)
        return [node for node in nodes if node is not None and node.queued_resource == queued.name]


def _node_ids(spec: Any) -> list[str]:
    if "multislice_params" in spec:
        return [f"{spec.multislice_params.node_id_prefix}-{n}" for n in range(spec.multislice_params.node_count)]
    return [spec.node_id]
