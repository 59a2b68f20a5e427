"""TPUs between our types and the messages of the TPU API, v2. Values in, values out."""

import datetime
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tpuswarm.catalog import Accelerator, find
from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.google.answers import of_json_status
from tpuswarm.cloud.google.failures import judge
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
"""What a machine's service account may be used for: everything that its roles allow. A narrower scope keeps a machine
from its bucket however many roles the account has."""
LOGIN = {"enable-guest-attributes": "TRUE", "enable-oslogin": "FALSE"}
"""Metadata without which nobody gets in: a machine writes down its SSH host keys as guest attributes, and takes who may
log in from its metadata only where OS Login is off, which a whole project may have on; a machine's own value wins
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
"""Anything else (HIDING, HIDDEN, UNHIDING, UNKNOWN, what comes later) is taken for `repairing`: it has a deadline."""
MAINTENANCE = "UNHEALTHY_MAINTENANCE"
"""A health of nodes that are READY: "will resume running once rescheduled", says the API's Node.Health."""
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
"""Of a queued resource that has no node. SUSPENDED and FAILED never go on, and ACTIVE without a node has lost it: the
provider lists requests before nodes. Anything else is taken for `repairing`, as with nodes."""


def labels_of(spec: Spec) -> dict[str, str]:
    """All labels of what is made for `spec`."""
    return {**spec.labels, FLEET_LABEL: spec.fleet, POOL_LABEL: spec.pool}


def to_node(spec: TpuSpec, project: str) -> "tpu_v2.Node":
    """The node to be created for `spec`."""
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
        scheduling_config=tpu_v2.SchedulingConfig(spot=spec.how == "spot"),
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


def to_request(spec: TpuSpec, project: str) -> "tpu_v2.QueuedResource":
    """The queued resource that asks for one node, of the same name."""
    from google.cloud import tpu_v2
    from google.protobuf.duration_pb2 import Duration

    parts = tpu_v2.QueuedResource
    parent = f"projects/{project}/locations/{spec.zone}"
    asked = parts.Tpu.NodeSpec(parent=parent, node_id=spec.name, node=to_node(spec, project))
    request = parts(tpu=parts.Tpu(node_spec=[asked]))
    if spec.how == "reserved":
        request.reservation_name = f"{parent}/reservations/{spec.reservation or '-'}"
    if spec.wait_s is not None:
        request.queueing_policy = parts.QueueingPolicy(valid_until_duration=Duration(seconds=round(spec.wait_s)))
    return request


def of_node(node: Mapping[str, Any]) -> Machine:
    """A node, as REST writes it, as a machine of ours."""
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
        why="; ".join(each for each in (node.get("healthDescription", ""), *symptoms) if each),
        symptoms=symptoms,
        healthy=None if state != "ready" or health == "HEALTH_UNSPECIFIED" else health == "HEALTHY",
        how=_how(node.get("schedulingConfig", {}), request is not None),
        created=seconds(node.get("createTime")),
        workers=tuple(
            Worker(each.get("ipAddress") or None, each.get("accessConfig", {}).get("externalIp") or None)
            for each in node.get("networkEndpoints", ())
        ),
        labels=node.get("labels", {}),
        runtime_env=None if metadata.get(ENV_VARS_NEW) == "TRUE" else metadata.get(ENV_VARS, ""),
        request=request,
    )


def of_requests(
    requests: Iterable[Mapping[str, Any]], nodes: Iterable[Machine], unreachable: frozenset[str], project: str
) -> list[Machine]:
    """The machines of queued resources, as REST writes them, that have no node among `nodes`.

    Those of a zone whose nodes are unknown (`unreachable`) are left out: whether they have one is not known either.
    """
    known = {(each.zone, each.name) for each in nodes}
    found = (each for request in requests for each in _of_request(request, project))
    return [each for each in found if (each.zone, each.name) not in known and each.zone not in unreachable]


def _of_request(request: Mapping[str, Any], project: str) -> Iterable[Machine]:
    zone, name = _place(request["name"])
    state = request.get("state", {})
    said = state.get("state", "STATE_UNSPECIFIED")
    error: CloudError | None = None
    why = ""
    if failure := state.get("failedData", {}).get("error"):
        error = judge(of_json_status(failure), f"{name} in {zone}", project)
        why = failure.get("message", "")
    elif said in ("SUSPENDING", "SUSPENDED"):
        why = f"suspended by the {'user' if state.get('stateInitiator') == 'USER' else 'cloud'}"
    elif said == "ACTIVE":
        why = "its node is gone"
    for asked in request.get("tpu", {}).get("nodeSpec", ()):
        node = asked.get("node", {})
        spot = "spot" in request or node.get("schedulingConfig", {}).get("spot", False)
        how: How = "spot" if spot else "reserved" if request.get("reservationName") else "queued"
        yield Machine(
            name=asked.get("nodeId") or asked.get("multisliceParams", {}).get("nodeIdPrefix") or name,
            zone=zone,
            kind="tpu",
            type=_type(node),
            state=REQUEST_STATES.get(said, "repairing"),
            said=said,
            why=why,
            how=how,
            created=seconds(request.get("createTime")),
            labels=node.get("labels", {}),
            request=name,
            error=error,
        )


def accelerator_of(machine: Machine) -> Accelerator | None:
    """What the catalogue knows of its type; None: nothing."""
    try:
        return find(machine.type)
    except InputError:
        return None


def _symptom(said: Mapping[str, Any]) -> str:
    """What, where and when: MESH_BUILD_FAIL on worker 3 at 2026-11-22T12:00:00Z: details."""
    kind, worker, at = (said.get(each, "") for each in ("symptomType", "workerId", "createTime"))
    what = kind + (f" on worker {worker}" if worker else "") + (f" at {at}" if at else "")
    return ": ".join(each.strip() for each in (what, said.get("details", "")) if each)


def _type(node: Mapping[str, Any]) -> str:
    config = node.get("acceleratorConfig", {})
    said = node.get("acceleratorType") or f"{config.get('type', '').lower()}:{config.get('topology', '')}"
    try:
        return find(said).name
    except InputError:
        return said


def _how(scheduling: Mapping[str, Any], queued: bool) -> How:
    if scheduling.get("spot") or scheduling.get("preemptible"):
        return "spot"
    if scheduling.get("reserved"):
        return "reserved"
    return "queued" if queued else "on-demand"


def _place(name: str) -> tuple[str, str]:
    """Zone and name of projects/P/locations/ZONE/nodes/NAME."""
    parts = name.split("/")
    return parts[3], parts[5]


def seconds(stamp: str | None) -> float:
    """Unix seconds of a moment, as REST writes it; 0: it says none."""
    return datetime.datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
