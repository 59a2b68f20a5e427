"""Convert VMs between our types and Compute Engine's messages."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.google.nodes import LOGIN, SCOPE, labels_of, parse_timestamp
from tpuswarm.cloud.protocol import Machine, State, VmSpec, Worker

if TYPE_CHECKING:
    from google.cloud import compute_v1

STATES: dict[str, State] = {
    "PENDING": "creating",
    "PROVISIONING": "creating",
    "STAGING": "creating",
    "RUNNING": "ready",
    "REPAIRING": "repairing",
    "PENDING_STOP": "stopping",
    "STOPPING": "stopping",
    "SUSPENDING": "stopping",
    "STOPPED": "stopped",
    "SUSPENDED": "stopped",
    "TERMINATED": "stopped",
    "DEPROVISIONING": "deleting",
}


def instance_from_spec(spec: VmSpec, project: str) -> "compute_v1.Instance":
    from google.cloud import compute_v1

    access = [compute_v1.AccessConfig(name="external-nat", type_="ONE_TO_ONE_NAT")] if spec.external_ips else []
    image_project, _, family = spec.image.partition("/")
    return compute_v1.Instance(
        name=spec.name,
        machine_type=f"zones/{spec.zone}/machineTypes/{spec.type}",
        disks=[
            compute_v1.AttachedDisk(
                boot=True,
                auto_delete=True,
                initialize_params=compute_v1.AttachedDiskInitializeParams(
                    source_image=f"projects/{image_project}/global/images/family/{family}",
                    disk_size_gb=spec.disk_gib,
                    labels=labels_of(spec),
                ),
            )
        ],
        network_interfaces=[
            compute_v1.NetworkInterface(
                network=f"projects/{project}/global/networks/{spec.network}",
                subnetwork=spec.subnetwork
                and f"projects/{project}/regions/{region_of(spec.zone)}/subnetworks/{spec.subnetwork}",
                access_configs=access,
            )
        ],
        can_ip_forward=spec.ip_forward,
        scheduling=_scheduling(spec),
        service_accounts=[compute_v1.ServiceAccount(email=spec.service_account or "default", scopes=[SCOPE])],
        tags=compute_v1.Tags(items=spec.tags),
        labels=labels_of(spec),
        metadata=to_metadata({**LOGIN, **spec.metadata}),
    )


def to_metadata(items: Mapping[str, str], fingerprint: str | None = None) -> "compute_v1.Metadata":
    """Convert metadata; `fingerprint` is that of the metadata to replace."""
    from google.cloud import compute_v1

    pairs = [compute_v1.Items(key=key, value=value) for key, value in items.items()]
    return compute_v1.Metadata(items=pairs, fingerprint=fingerprint)


def machine_from_instance(instance: Mapping[str, Any]) -> Machine:
    """Convert an instance from REST."""
    said, scheduling = instance.get("status", ""), instance.get("scheduling", {})
    spot = scheduling.get("provisioningModel") == "SPOT" or scheduling.get("preemptible", False)
    state = STATES.get(said, "repairing")
    if said in ("PROVISIONING", "STAGING") and "lastStopTimestamp" in instance:
        state = "starting"
    if spot and state == "stopped":  # users do not stop spot machines: it was preempted
        state = "dead"
    return Machine(
        name=instance["name"],
        zone=instance["zone"].rsplit("/", 1)[-1],
        kind="vm",
        type=instance["machineType"].rsplit("/", 1)[-1],
        state=state,
        said=said,
        why=instance.get("statusMessage", ""),
        how="spot" if spot else "on-demand",
        created=parse_timestamp(instance.get("creationTimestamp")),
        workers=_workers(instance.get("networkInterfaces", ())),
        labels=instance.get("labels", {}),
    )


def _scheduling(spec: VmSpec) -> "compute_v1.Scheduling":
    from google.cloud import compute_v1

    scheduling = compute_v1.Scheduling(provisioning_model="SPOT" if spec.spot else "STANDARD")
    if spec.spot:
        scheduling.on_host_maintenance = "TERMINATE"
    if spec.ends is not None:
        scheduling.termination_time = datetime.fromtimestamp(spec.ends, UTC).isoformat(timespec="seconds")
    if spec.spot or spec.ends is not None:
        # A preempted or expired machine is deleted with its disk, so that it costs nothing.
        scheduling.instance_termination_action = "DELETE"
    return scheduling


def _workers(interfaces: Any) -> tuple[Worker, ...]:
    for first in interfaces:
        external = next((config.get("natIP") for config in first.get("accessConfigs", ())), None)
        return (Worker(first.get("networkIP"), external),)
    return ()
