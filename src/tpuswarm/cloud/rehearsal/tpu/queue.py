"""Queued resources: requests that wait for their nodes, and end with them."""

from typing import Any

from google.cloud.tpu_v2.types import cloud_tpu
from google.protobuf import empty_pb2
from google.rpc import status_pb2

from tpuswarm.cloud.rehearsal.common.records import Records
from tpuswarm.cloud.rehearsal.common.refused import (
    ALREADY_EXISTS,
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    Refused,
    not_found,
)
from tpuswarm.cloud.rehearsal.common.timetable import Timetable
from tpuswarm.cloud.rehearsal.common.weather import Weather
from tpuswarm.cloud.rehearsal.tpu.nodes import NAME, Nodes
from tpuswarm.cloud.rehearsal.tpu.nodes import State as NodeState
from tpuswarm.cloud.rehearsal.tpu.offers import place_of
from tpuswarm.cloud.rehearsal.tpu.operations import Operations, now

ACCEPT_S, WAIT_S, SUSPEND_S, DELETE_S = 5, 30, 20, 20
State = cloud_tpu.QueuedResourceState.State
WITHOUT_NODES = (State.ACCEPTED, State.WAITING_FOR_RESOURCES, State.FAILED, State.SUSPENDED)
"""Where a request may be deleted without force."""


class Queue:
    """The part of google.cloud.tpu.v2.Tpu that is about queued resources."""

    def __init__(self, records: Records, timetable: Timetable, weather: Weather, nodes: Nodes, operations: Operations):
        self._table = records.table(
            "queued resource",
            lambda body: cloud_tpu.QueuedResource.deserialize(body),
            lambda request: cloud_tpu.QueuedResource.serialize(request),
        )
        self._timetable, self._weather, self._nodes, self._operations = timetable, weather, nodes, operations
        nodes.made, nodes.ended = self._made, self._ended
        for what in ("accepted", "tried", "expired", "suspended", "deleted", "reset"):
            timetable.on(f"request {what}", getattr(self, f"_{what}"))

    def all(self) -> list[Any]:
        """Every one."""
        return self._table.values()

    def CreateQueuedResource(self, request: Any) -> Any:
        place = place_of(request.parent)
        name = f"{place.name}/queuedResources/{request.queued_resource_id}"
        if not NAME.fullmatch(request.queued_resource_id):
            raise Refused(INVALID_ARGUMENT, f"Invalid queued resource id '{request.queued_resource_id}'")
        if name in self._table:
            raise Refused(ALREADY_EXISTS, f"Resource '{name}' already exists")
        wanted = cloud_tpu.QueuedResource(request.queued_resource)
        if not wanted.tpu.node_spec:
            raise Refused(INVALID_ARGUMENT, "tpu.node_spec must be specified.")
        spot = "spot" in wanted
        for spec in wanted.tpu.node_spec:
            spec.parent = spec.parent or request.parent
            for node_id in _ids(spec):
                accelerator = self._nodes.check(spec.parent, node_id, spec.node)
                self._nodes.check_quota(spec.parent, accelerator, spot)
        wanted.name, wanted.create_time = name, now()
        wanted.state = cloud_tpu.QueuedResourceState(
            state=State.CREATING, state_initiator=cloud_tpu.QueuedResourceState.StateInitiator.USER
        )
        self._table.put(name, wanted)
        operation = self._operations.begin(name, "create")
        self._timetable.after(ACCEPT_S, "request accepted", name, operation.name)
        policy = wanted.queueing_policy
        if "valid_until_duration" in policy:
            self._timetable.after(policy.valid_until_duration.total_seconds(), "request expired", name)
        elif "valid_until_time" in policy:
            self._timetable.at(policy.valid_until_time.timestamp(), "request expired", name)
        return operation

    def GetQueuedResource(self, request: Any) -> Any:
        return cloud_tpu.QueuedResource.pb(self._find(request.name))

    def ListQueuedResources(self, request: Any) -> Any:
        place = place_of(request.parent)
        unreachable: list[str] = []
        if place.zone == "-":
            unreachable = [f"projects/{place.project}/locations/{zone}" for zone in self._weather.unreachable()]
            prefix = f"projects/{place.project}/locations/"
        else:
            self._weather.reach(place.zone)
            prefix = f"{place.name}/"
        hidden = {zone for zone, faults in self._weather.faults().items() if {"hidden", "unreachable"} & set(faults)}
        found = [
            each for name, each in self._table.items() if name.startswith(prefix) and place_of(name).zone not in hidden
        ]
        start, size = int(request.page_token or 0), request.page_size or 1000
        answer = cloud_tpu.ListQueuedResourcesResponse(
            queued_resources=found[start : start + size],
            next_page_token=str(start + size) if start + size < len(found) else "",
            unreachable=unreachable,
        )
        return cloud_tpu.ListQueuedResourcesResponse.pb(answer)

    def DeleteQueuedResource(self, request: Any) -> Any:
        wanted = self._find(request.name)
        nodes = self._nodes_of(wanted)
        if nodes and not request.force and wanted.state.state not in WITHOUT_NODES:
            raise Refused(
                FAILED_PRECONDITION,
                f"Cannot delete '{wanted.name}' in state {State(wanted.state.state).name}: "
                "delete its nodes first, or use force.",
            )
        self._be(wanted, State.DELETING)
        for node in nodes:
            if node.state != NodeState.DELETING:
                self._nodes.remove(node.name)
        operation = self._operations.begin(wanted.name, "delete")
        self._timetable.after(DELETE_S, "request deleted", wanted.name, operation.name)
        return operation

    def ResetQueuedResource(self, request: Any) -> Any:
        wanted = self._find(request.name)
        if wanted.state.state != State.ACTIVE:
            raise Refused(FAILED_PRECONDITION, f"'{wanted.name}' can only be reset when it is ACTIVE.")
        for node in self._nodes_of(wanted):
            self._nodes.remove(node.name)
        operation = self._operations.begin(wanted.name, "reset")
        self._timetable.after(SUSPEND_S, "request reset", wanted.name, operation.name)
        return operation

    # What happens when its time has come.

    def _accepted(self, name: str, operation: str) -> None:
        if wanted := self._in(name, State.CREATING):
            self._be(wanted, State.WAITING_FOR_RESOURCES)
            self._operations.succeed(operation, cloud_tpu.QueuedResource.pb(wanted))
            self._timetable.after(WAIT_S, "request tried", name)

    def _tried(self, name: str) -> None:
        wanted = self._in(name, State.WAITING_FOR_RESOURCES)
        if wanted is None:
            return
        zones = {place_of(spec.parent).zone for spec in wanted.tpu.node_spec}
        if any(self._weather.has(zone, fault) for zone in zones for fault in ("stockout", "unreachable")):
            self._timetable.after(WAIT_S, "request tried", name)
            return
        spot = "spot" in wanted
        try:
            for spec in wanted.tpu.node_spec:
                for node_id in _ids(spec):
                    self._nodes.check(spec.parent, node_id, spec.node)
        except Refused as why:
            self._fail(wanted, why)
            return
        self._be(wanted, State.PROVISIONING)
        for spec in wanted.tpu.node_spec:
            for node_id in _ids(spec):
                node = cloud_tpu.Node(spec.node)
                node.scheduling_config.spot = spot
                self._nodes.make(spec.parent, node_id, node, name)

    def _made(self, name: str) -> None:
        wanted = self._in(name, State.PROVISIONING)
        if wanted and all(node.state == NodeState.READY for node in self._nodes_of(wanted)):
            self._be(wanted, State.ACTIVE)

    def _ended(self, name: str, why: str | None) -> None:
        wanted = self._table.get(name)
        if wanted is None or wanted.state.state in (State.DELETING, State.SUSPENDING, State.SUSPENDED, State.FAILED):
            return
        if why is not None:
            self._fail(wanted, Refused(RESOURCE_EXHAUSTED, why))
            return
        self._be(wanted, State.SUSPENDING)
        self._timetable.after(SUSPEND_S, "request suspended", name)

    def _suspended(self, name: str) -> None:
        if wanted := self._in(name, State.SUSPENDING):
            self._be(wanted, State.SUSPENDED)

    def _expired(self, name: str) -> None:
        wanted = self._table.get(name)
        if wanted and wanted.state.state in (State.CREATING, State.ACCEPTED, State.WAITING_FOR_RESOURCES):
            self._fail(
                wanted, Refused(DEADLINE_EXCEEDED, "The queued resource was not provisioned within its validity.")
            )

    def _deleted(self, name: str, operation: str) -> None:
        wanted = self._table.get(name)
        if wanted and self._nodes_of(wanted):  # they take their time
            self._timetable.after(DELETE_S, "request deleted", name, operation)
            return
        self._table.pop(name)
        self._operations.succeed(operation, empty_pb2.Empty())

    def _reset(self, name: str, operation: str) -> None:
        wanted = self._table.get(name)
        if wanted is None or wanted.state.state == State.DELETING:
            return
        if self._nodes_of(wanted):
            self._timetable.after(SUSPEND_S, "request reset", name, operation)
            return
        self._be(wanted, State.WAITING_FOR_RESOURCES)
        self._operations.succeed(operation, cloud_tpu.QueuedResource.pb(wanted))
        self._timetable.after(WAIT_S, "request tried", name)

    def _fail(self, wanted: Any, why: Refused) -> None:
        wanted.state = cloud_tpu.QueuedResourceState(
            state=State.FAILED,
            failed_data=cloud_tpu.QueuedResourceState.FailedData(
                error=status_pb2.Status(code=why.code, message=why.message)
            ),
            state_initiator=cloud_tpu.QueuedResourceState.StateInitiator.SERVICE,
        )
        self._table.put(wanted.name, wanted)

    def _be(self, wanted: Any, state: Any) -> None:
        by_user = state == State.DELETING
        initiator = cloud_tpu.QueuedResourceState.StateInitiator
        wanted.state = cloud_tpu.QueuedResourceState(
            state=state, state_initiator=initiator.USER if by_user else initiator.SERVICE
        )
        self._table.put(wanted.name, wanted)

    def _find(self, name: str) -> Any:
        self._weather.reach(place_of(name).zone)
        found = self._table.get(name)
        if found is None:
            raise not_found(name)
        return found

    def _in(self, name: str, state: Any) -> Any | None:
        found = self._table.get(name)
        return found if found is not None and found.state.state == state else None

    def _nodes_of(self, wanted: Any) -> list[Any]:
        names = [f"{spec.parent}/nodes/{node_id}" for spec in wanted.tpu.node_spec for node_id in _ids(spec)]
        found = (self._nodes.get(name) for name in names)
        return [node for node in found if node is not None and node.queued_resource == wanted.name]


def _ids(spec: Any) -> list[str]:
    """The nodes that a specification names."""
    if "multislice_params" in spec:
        return [f"{spec.multislice_params.node_id_prefix}-{n}" for n in range(spec.multislice_params.node_count)]
    return [spec.node_id]
