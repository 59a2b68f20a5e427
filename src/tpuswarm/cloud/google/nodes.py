"""TPUs between our types and the messages of the TPU API, v2. Values in, values out."""

import datetime
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tpuswarm.catalog import Accelerator, find
from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.google.answers import of_status
from tpuswarm.cloud.google.failures import judge
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, How, Machine, Spec, State, TpuSpec, Worker
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from google.cloud import tpu_v2

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
"""What a machine's service account may be used for: everything that its roles allow. A narrower scope keeps a machine
from its bucket however many roles the account has."""
GUEST_ATTRIBUTES = {"enable-guest-attributes": "TRUE"}
"""Metadata without which a machine cannot write down its SSH host keys."""
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
REQUEST_STATES: dict[str, State] = {
    "CREATING": "waiting",
    "ACCEPTED": "waiting",
    "WAITING_FOR_RESOURCES": "waiting",
    "PROVISIONING": "creating",
    "DELETING": "deleting",
}
"""Of a queued resource that has no node. All others are dead: FAILED and SUSPENDED never go on, and ACTIVE without a
node has lost it."""


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
        metadata={**GUEST_ATTRIBUTES, **spec.metadata},
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


def of_node(node: "tpu_v2.Node") -> Machine:
    """A node as a machine of ours."""
    zone, name = _place(node.name)
    state = STATES.get(node.state.name, "repairing")
    health = node.health.name
    said = [node.health_description, *(each.details or each.symptom_type.name for each in node.symptoms)]
    return Machine(
        name=name,
        zone=zone,
        kind="tpu",
        type=_type(node),
        state=state,
        said=node.state.name,
        why="; ".join(each for each in said if each),
        healthy=None if state != "ready" or health == "HEALTH_UNSPECIFIED" else health == "HEALTHY",
        how=_how(node.scheduling_config, bool(node.queued_resource)),
        created=_seconds(node.create_time),
        workers=tuple(
            Worker(each.ip_address or None, each.access_config.external_ip or None) for each in node.network_endpoints
        ),
        labels=dict(node.labels),
        request=node.queued_resource.rsplit("/", 1)[-1] or None,
    )


def of_requests(
    requests: Iterable["tpu_v2.QueuedResource"], nodes: Iterable[Machine], unreachable: frozenset[str], project: str
) -> list[Machine]:
    """The machines of queued resources that have no node among `nodes`.

    Those of a zone whose nodes are unknown (`unreachable`) are left out: whether they have one is not known either.
    """
    known = {(each.zone, each.name) for each in nodes}
    found = (each for request in requests for each in _of_request(request, project))
    return [each for each in found if (each.zone, each.name) not in known and each.zone not in unreachable]


def _of_request(request: "tpu_v2.QueuedResource", project: str) -> Iterable[Machine]:
    zone, name = _place(request.name)
    said = request.state.state.name
    error: CloudError | None = None
    why = ""
    if request.state.failed_data.error.code:
        error = judge(of_status(request.state.failed_data.error), f"{name} in {zone}", project)
        why = request.state.failed_data.error.message
    elif said in ("SUSPENDING", "SUSPENDED"):
        why = f"suspended by the {'user' if request.state.state_initiator.name == 'USER' else 'cloud'}"
    elif said == "ACTIVE":
        why = "its node is gone"
    for asked in request.tpu.node_spec:
        spot = "spot" in request or asked.node.scheduling_config.spot
        how: How = "spot" if spot else "reserved" if request.reservation_name else "queued"
        yield Machine(
            name=asked.node_id or asked.multislice_params.node_id_prefix or name,
            zone=zone,
            kind="tpu",
            type=_type(asked.node),
            state=REQUEST_STATES.get(said, "dead"),
            said=said,
            why=why,
            how=how,
            created=_seconds(request.create_time),
            labels=dict(asked.node.labels),
            request=name,
            error=error,
        )


def accelerator_of(machine: Machine) -> Accelerator | None:
    """What the catalogue knows of its type; None: nothing."""
    try:
        return find(machine.type)
    except InputError:
        return None


def _type(node: "tpu_v2.Node") -> str:
    config = node.accelerator_config
    said = node.accelerator_type or f"{config.type_.name.lower()}:{config.topology}"
    try:
        return find(said).name
    except InputError:
        return said


def _how(scheduling: "tpu_v2.SchedulingConfig", queued: bool) -> How:
    if scheduling.spot or scheduling.preemptible:
        return "spot"
    if scheduling.reserved:
        return "reserved"
    return "queued" if queued else "on-demand"


def _place(name: str) -> tuple[str, str]:
    """Zone and name of projects/P/locations/ZONE/nodes/NAME."""
    parts = name.split("/")
    return parts[3], parts[5]


def _seconds(moment: Any) -> float:
    return moment.timestamp() if isinstance(moment, datetime.datetime) else 0.0
