"""Convert TPUs between our types and the messages of the TPU API v2."""

import datetime
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tpuswarm.catalog import Accelerator, find
from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.google.answers import answer_from_json_status
from tpuswarm.cloud.google.failures import cloud_error_for
from tpuswarm.cloud.protocol import (
    ENV_VARS,
    ENV_VARS_NEW,
    FLEET_LABEL,
    POOL_LABEL,
    How,
    Machine,
    Spec,
    State,
    TpuSpec,
    Worker,
)
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from google.cloud import tpu_v2

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
"""Lets a machine use all roles of its service account. A narrower scope would lock it out of its bucket."""
LOGIN = {"enable-guest-attributes": "TRUE", "enable-oslogin": "FALSE"}
"""Metadata that SSH needs: the machine publishes its host keys as guest attributes and accepts keys from metadata,
which OS Login would prevent. The machine's value wins over the project's
(https://cloud.google.com/compute/docs/oslogin/set-up-oslogin)."""
STATES: dict[str, State] = {
    "CREATING": "creating",
    "READY": "ready",
    "RESTARTING": "repairing",
    "REIMAGING": "repairing",
    "REPAIRING": "repairing",
    "DELETING": "deleting",
    "STOPPING": "stopping",
    "STOPPED": "stopped",
    "STARTING": "starting",
    "PREEMPTED": "dead",
    "TERMINATED": "dead",
}
"""Any other state (HIDING, HIDDEN, UNHIDING, UNKNOWN, new ones) counts as `repairing`, which has a deadline."""
MAINTENANCE = "UNHEALTHY_MAINTENANCE"
"""A health of READY nodes: "will resume running once rescheduled" (Node.Health)."""
REQUEST_STATES: dict[str, State] = {
    "CREATING": "waiting",
    "ACCEPTED": "waiting",
    "WAITING_FOR_RESOURCES": "waiting",
    "PROVISIONING": "creating",
    "DELETING": "deleting",
    "SUSPENDING": "dead",
    "SUSPENDED": "dead",
    "FAILED": "dead",
    "ACTIVE": "dead",
}
"""States of a queued resource without a node. SUSPENDED and FAILED are final. ACTIVE means that the node is gone,
because the provider lists requests before nodes. Any other state counts as `repairing`."""


def labels_of(spec: Spec) -> dict[str, str]:
    return {**spec.labels, FLEET_LABEL: spec.fleet, POOL_LABEL: spec.pool}


def node_from_spec(spec: TpuSpec, project: str) -> "tpu_v2.Node":
    from google.cloud import tpu_v2

    mode = tpu_v2.AttachedDisk.DiskMode
    place = f"projects/{project}/zones/{spec.zone}"
    return tpu_v2.Node(
        # A type and a configuration (type, topology) exclude each other.
        accelerator_type=find(spec.type).api_name,
        runtime_version=spec.runtime,
        network_config=tpu_v2.NetworkConfig(
            network=spec.network, subnetwork=spec.subnetwork, enable_external_ips=spec.external_ips
        ),
        scheduling_config=tpu_v2.SchedulingConfig(spot=spec.how == "spot" and not spec.is_queued),
        service_account=tpu_v2.ServiceAccount(email=spec.service_account, scope=[SCOPE]),
        data_disks=[
            tpu_v2.AttachedDisk(
                source_disk=f"{place}/disks/{disk.name}", mode=mode.READ_ONLY if disk.read_only else mode.READ_WRITE
            )
            for disk in spec.disks
        ],
        tags=spec.tags,
        labels=labels_of(spec),
        metadata={**LOGIN, **spec.metadata},
    )


def request_from_spec(spec: TpuSpec, project: str) -> "tpu_v2.QueuedResource":
    """Return a queued resource for one node of the same name."""
    from google.cloud import tpu_v2
    from google.protobuf.duration_pb2 import Duration

    parts = tpu_v2.QueuedResource
    parent = f"projects/{project}/locations/{spec.zone}"
    node_spec = parts.Tpu.NodeSpec(parent=parent, node_id=spec.name, node=node_from_spec(spec, project))
    request = parts(tpu=parts.Tpu(node_spec=[node_spec]))
    if spec.how == "spot":
        request.spot = parts.Spot()
    if spec.how == "reserved":
        request.reservation_name = f"{parent}/reservations/{spec.reservation or '-'}"
    if spec.wait_s is not None:
        request.queueing_policy = parts.QueueingPolicy(valid_until_duration=Duration(seconds=round(spec.wait_s)))
    return request


def machine_from_node(node: Mapping[str, Any]) -> Machine:
    """Convert a node from REST."""
    zone, name = _place(node["name"])
    said, health = node.get("state", "STATE_UNSPECIFIED"), node.get("health", "HEALTH_UNSPECIFIED")
    state = STATES.get(said, "repairing")
    if state == "ready" and health == MAINTENANCE:
        state, said = "repairing", MAINTENANCE
    symptoms = tuple(filter(None, map(_symptom, node.get("symptoms", ()))))
    request = node.get("queuedResource", "").rsplit("/", 1)[-1] or None
    metadata = node.get("metadata", {})
    return Machine(
        name=name,
        zone=zone,
        kind="tpu",
        type=_type(node),
        state=state,
        said=said,
        why="; ".join(filter(None, (node.get("healthDescription", ""), *symptoms))),
        symptoms=symptoms,
        healthy=None if state != "ready" or health == "HEALTH_UNSPECIFIED" else health == "HEALTHY",
        how=_how(node.get("schedulingConfig", {}), request is not None),
        created=parse_timestamp(node.get("createTime")),
        workers=tuple(
            Worker(endpoint.get("ipAddress") or None, endpoint.get("accessConfig", {}).get("externalIp") or None)
            for endpoint in node.get("networkEndpoints", ())
        ),
        labels=node.get("labels", {}),
        runtime=node.get("runtimeVersion"),
        metadata=metadata,
        runtime_env=None if metadata.get(ENV_VARS_NEW) == "TRUE" else metadata.get(ENV_VARS, ""),
        request=request,
    )


def machines_from_requests(
    requests: Iterable[Mapping[str, Any]], nodes: Iterable[Machine], unreachable: frozenset[str], project: str
) -> list[Machine]:
    """Convert queued resources from REST that have no node among `nodes`.

    Skips zones whose nodes are unknown (`unreachable`).
    """
    known = {(node.zone, node.name) for node in nodes}
    machines = (machine for request in requests for machine in _machines_from_request(request, project))
    return [
        machine for machine in machines if (machine.zone, machine.name) not in known and machine.zone not in unreachable
    ]


def _machines_from_request(request: Mapping[str, Any], project: str) -> Iterable[Machine]:
    zone, name = _place(request["name"])
    state = request.get("state", {})
    said = state.get("state", "STATE_UNSPECIFIED")
    error: CloudError | None = None
    why = ""
    if failure := state.get("failedData", {}).get("error"):
        error = cloud_error_for(answer_from_json_status(failure), f"{name} in {zone}", project)
        why = failure.get("message", "")
    elif said in ("SUSPENDING", "SUSPENDED"):
        why = f"suspended by the {'user' if state.get('stateInitiator') == 'USER' else 'cloud'}"
    elif said == "ACTIVE":
        why = "its node is gone"
    for node_spec in request.get("tpu", {}).get("nodeSpec", ()):
        node = node_spec.get("node", {})
        spot = "spot" in request or node.get("schedulingConfig", {}).get("spot", False)
        how: How = "spot" if spot else "reserved" if request.get("reservationName") else "queued"
        yield Machine(
            name=node_spec.get("nodeId") or node_spec.get("multisliceParams", {}).get("nodeIdPrefix") or name,
            zone=zone,
            kind="tpu",
            type=_type(node),
            state=REQUEST_STATES.get(said, "repairing"),
            said=said,
            why=why,
            how=how,
            created=parse_timestamp(request.get("createTime")),
            labels=node.get("labels", {}),
            request=name,
            error=error,
        )


def accelerator_of(machine: Machine | Spec) -> Accelerator | None:
    """Return the catalogue's entry for its type, or None."""
    try:
        return find(machine.type)
    except InputError:
        return None


def _symptom(symptom: Mapping[str, Any]) -> str:
    """Format a symptom: MESH_BUILD_FAIL on worker 3 at 2026-11-22T12:00:00Z: details."""
    kind, worker, at = (symptom.get(key, "") for key in ("symptomType", "workerId", "createTime"))
    summary = kind + (f" on worker {worker}" if worker else "") + (f" at {at}" if at else "")
    return ": ".join(text.strip() for text in (summary, symptom.get("details", "")) if text)


def _type(node: Mapping[str, Any]) -> str:
    config = node.get("acceleratorConfig", {})
    name = node.get("acceleratorType") or f"{config.get('type', '').lower()}:{config.get('topology', '')}"
    try:
        return find(name).name
    except InputError:
        return name


def _how(scheduling: Mapping[str, Any], queued: bool) -> How:
    if scheduling.get("spot") or scheduling.get("preemptible"):
        return "spot"
    if scheduling.get("reserved"):
        return "reserved"
    return "queued" if queued else "on-demand"


def _place(name: str) -> tuple[str, str]:
    """Return zone and name from projects/P/locations/ZONE/nodes/NAME."""
    parts = name.split("/")
    return parts[3], parts[5]


def parse_timestamp(stamp: str | None) -> float:
    """Return Unix seconds of a REST timestamp; 0 if there is none."""
    return datetime.datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
