"""Convert VMs between our types and Compute Engine's messages."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.google.nodes import LOGIN, SCOPE, labels_of, parse_timestamp
from tpuswarm.cloud.protocol import Machine, State, VmSpec, Worker

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


def instance_from_spec(spec: VmSpec, project: str) -> dict[str, Any]:
    """Return the body of instances.insert."""
    image_project, _, family = spec.image.partition("/")
    disk: dict[str, Any] = {
        "sourceImage": f"projects/{image_project}/global/images/family/{family}",
        "diskSizeGb": str(spec.disk_gib),
        "labels": labels_of(spec),
    }
    if spec.disk_type:
        disk["diskType"] = f"zones/{spec.zone}/diskTypes/{spec.disk_type}"
    interface: dict[str, Any] = {"network": f"projects/{project}/global/networks/{spec.network}"}
    if spec.subnetwork:
        interface["subnetwork"] = f"projects/{project}/regions/{region_of(spec.zone)}/subnetworks/{spec.subnetwork}"
    if spec.external_ips:
        interface["accessConfigs"] = [{"name": "external-nat", "type": "ONE_TO_ONE_NAT"}]
    return {
        "name": spec.name,
        "machineType": f"zones/{spec.zone}/machineTypes/{spec.type}",
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
        "networkInterfaces": [interface],
        "canIpForward": spec.ip_forward,
        "scheduling": _scheduling(spec),
        "serviceAccounts": [{"email": spec.service_account or "default", "scopes": [SCOPE]}],
        "tags": {"items": list(spec.tags)},
        "labels": labels_of(spec),
        "metadata": to_metadata({**LOGIN, **spec.metadata}),
    }


def to_metadata(items: Mapping[str, str], fingerprint: str | None = None) -> dict[str, Any]:
    """Convert metadata; `fingerprint` belongs to the old metadata."""
    pairs = [{"key": key, "value": value} for key, value in items.items()]
    return {"items": pairs, **({"fingerprint": fingerprint} if fingerprint else {})}


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
        metadata={item["key"]: item.get("value", "") for item in instance.get("metadata", {}).get("items", ())},
        disk_gib=_boot_disk_gib(instance.get("disks", ())),
    )


def _scheduling(spec: VmSpec) -> dict[str, str]:
    scheduling = {"provisioningModel": "SPOT" if spec.spot else "STANDARD"}
    if spec.spot:
        scheduling["onHostMaintenance"] = "TERMINATE"
    if spec.ends is not None:
        scheduling["terminationTime"] = datetime.fromtimestamp(spec.ends, UTC).isoformat(timespec="seconds")
    if spec.spot or spec.ends is not None:
        # A preempted or expired machine is deleted with its disk, so that it costs nothing.
        scheduling["instanceTerminationAction"] = "DELETE"
    return scheduling


def _boot_disk_gib(disks: Iterable[Mapping[str, Any]]) -> int | None:
    return next((int(disk["diskSizeGb"]) for disk in disks if disk.get("boot") and "diskSizeGb" in disk), None)


def _workers(interfaces: Any) -> tuple[Worker, ...]:
    for first in interfaces:
        external = next((config.get("natIP") for config in first.get("accessConfigs", ())), None)
        return (Worker(first.get("networkIP"), external),)
    return ()
