"""Convert VMs and TPUs of one host between our types and Compute Engine's messages.

https://docs.cloud.google.com/compute/docs/tpus/create-tpu-vm-instance
https://docs.cloud.google.com/compute/docs/reference/rest/v1/instances/insert
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tpuswarm.catalog import accelerator_of_machine, find
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.google.nodes import LOGIN, SCOPE, labels_of, parse_timestamp
from tpuswarm.cloud.protocol import How, Machine, Spec, State, TpuSpec, VmSpec, Worker

if TYPE_CHECKING:
    from tpuswarm.cloud.google.access import Access

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
COMPUTE_HOST, PAGE_SIZE = "compute.googleapis.com", 500
TPU_DISK_GIB = 100
"""The boot disk of a TPU, as the TPU API makes it (https://cloud.google.com/tpu/docs/setup-persistent-disk). Without a
size, Compute Engine takes the image's, 10 GB."""
MODELS: dict[str, How] = {"SPOT": "spot", "RESERVATION_BOUND": "reserved", "FLEX_START": "flex-start"}
"""Values of scheduling.provisioningModel; others are on demand."""
MAX_WAIT_S, MAX_RUN_S = 2 * 3600.0, 7 * 86_400.0
"""A flex-start request waits as PENDING for so long at most, and what it gets runs for so long at most; then Compute
Engine deletes it (https://docs.cloud.google.com/compute/docs/instances/about-flex-start-vms)."""


def list_aggregated(access: "Access", kind: str) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """List all resources of a kind from REST, and the zones that do not answer."""
    url = access.url(COMPUTE_HOST, f"compute/v1/projects/{access.project}/aggregated/{kind}")
    found: list[dict[str, Any]] = []
    unreachable: set[str] = set()
    for page in access.get_pages(f"listing {kind}", url, maxResults=str(PAGE_SIZE), returnPartialSuccess="true"):
        unreachable |= {zone.rsplit("/", 1)[-1] for zone in page.get("unreachables", ())}
        for scope, listed in page.get("items", {}).items():
            if listed.get("warning", {}).get("code") == "UNREACHABLE":
                unreachable.add(scope.rsplit("/", 1)[-1])
            found += listed.get(kind, ())
    return found, frozenset(unreachable)


def instance_from_spec(spec: Spec, project: str) -> dict[str, Any]:
    """Return the body of instances.insert."""
    place = f"zones/{spec.zone}"
    disks = [{"boot": True, "autoDelete": True, "initializeParams": _boot_disk(spec)}]
    if isinstance(spec, TpuSpec):
        disks += [
            {
                "source": f"projects/{project}/{place}/disks/{disk.name}",
                "mode": "READ_ONLY" if disk.read_only else "READ_WRITE",
            }
            for disk in spec.disks
        ]
    interface: dict[str, Any] = {"network": f"projects/{project}/global/networks/{spec.network}"}
    if spec.subnetwork:
        interface["subnetwork"] = f"projects/{project}/regions/{region_of(spec.zone)}/subnetworks/{spec.subnetwork}"
    if spec.external_ips:
        interface["accessConfigs"] = [{"name": "external-nat", "type": "ONE_TO_ONE_NAT"}]
    # The TPU API gives all hosts of a TPU its name by this key.
    named = {"instance-id": spec.name} if isinstance(spec, TpuSpec) else {}
    body = {
        "name": spec.name,
        "machineType": f"{place}/machineTypes/{machine_type_of(spec)}",
        "disks": disks,
        "networkInterfaces": [interface],
        "canIpForward": isinstance(spec, VmSpec) and spec.ip_forward,
        "scheduling": _scheduling(spec),
        "serviceAccounts": [{"email": spec.service_account or "default", "scopes": [SCOPE]}],
        "tags": {"items": list(spec.tags)},
        "labels": labels_of(spec),
        "metadata": to_metadata({**LOGIN, **named, **spec.metadata}),
    }
    if isinstance(spec, TpuSpec) and spec.how == "flex-start":
        body["reservationAffinity"] = {"consumeReservationType": "NO_RESERVATION"}
        body["params"] = {"requestValidForDuration": {"seconds": str(wait_seconds(spec))}}
    if isinstance(spec, TpuSpec) and spec.reservation:
        body["reservationAffinity"] = {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [spec.reservation],
        }
    return body


def wait_seconds(spec: TpuSpec) -> int:
    return round(min(spec.wait_s or MAX_WAIT_S, MAX_WAIT_S))


def run_seconds(spec: TpuSpec) -> int:
    return round(spec.max_run_s or MAX_RUN_S)


def machine_type_of(spec: Spec) -> str:
    """Return the machine type of a VM, or of each host of a TPU."""
    return spec.type if isinstance(spec, VmSpec) else find(spec.type).machine_type or spec.type


def _boot_disk(spec: Spec) -> dict[str, Any]:
    image_project, _, family = (spec.image if isinstance(spec, VmSpec) else spec.runtime).partition("/")
    disk: dict[str, Any] = {
        "sourceImage": f"projects/{image_project}/global/images/family/{family}",
        "diskSizeGb": str(spec.disk_gib if isinstance(spec, VmSpec) else TPU_DISK_GIB),
        "labels": labels_of(spec),
    }
    # TPUs take the disk type that their series has by default: v6e supports Hyperdisk only, v5p Persistent Disk.
    if isinstance(spec, VmSpec) and spec.disk_type:
        disk["diskType"] = f"zones/{spec.zone}/diskTypes/{spec.disk_type}"
    return disk


def to_metadata(items: Mapping[str, str], fingerprint: str | None = None) -> dict[str, Any]:
    """Convert metadata; `fingerprint` belongs to the old metadata."""
    pairs = [{"key": key, "value": value} for key, value in items.items()]
    return {"items": pairs, **({"fingerprint": fingerprint} if fingerprint else {})}


def machine_from_instance(instance: Mapping[str, Any]) -> Machine:
    """Convert an instance from REST."""
    said, scheduling = instance.get("status", ""), instance.get("scheduling", {})
    how = how_of(scheduling)
    machine_type = instance["machineType"].rsplit("/", 1)[-1]
    tpu = accelerator_of_machine(machine_type)
    state = STATES.get(said, "repairing")
    if said in ("PROVISIONING", "STAGING") and "lastStopTimestamp" in instance:
        state = "starting"
    if said == "PENDING" and how == "flex-start":
        state = "waiting"
    if how == "spot" and state == "stopped":  # users do not stop spot machines: it was preempted
        state = "dead"
    return Machine(
        name=instance["name"],
        zone=instance["zone"].rsplit("/", 1)[-1],
        kind="tpu" if tpu else "vm",
        type=tpu.name if tpu else machine_type,
        state=state,
        said=said,
        why=instance.get("statusMessage", ""),
        how=how,
        api="compute",
        created=parse_timestamp(instance.get("creationTimestamp")),
        workers=_workers(instance.get("networkInterfaces", ())),
        labels=instance.get("labels", {}),
        metadata={item["key"]: item.get("value", "") for item in instance.get("metadata", {}).get("items", ())},
        disk_gib=_boot_disk_gib(instance.get("disks", ())),
    )


def how_of(scheduling: Mapping[str, Any]) -> How:
    return "spot" if scheduling.get("preemptible") else MODELS.get(scheduling.get("provisioningModel", ""), "on-demand")


def _scheduling(spec: Spec) -> dict[str, Any]:
    scheduling: dict[str, Any] = {
        "provisioningModel": next((name for name, how in MODELS.items() if how == spec.how), "STANDARD")
    }
    ends = spec.ends if isinstance(spec, VmSpec) else None
    if spec.how == "spot" or isinstance(spec, TpuSpec):  # TPUs cannot migrate while they run
        scheduling["onHostMaintenance"] = "TERMINATE"
    if ends is not None:
        scheduling["terminationTime"] = datetime.fromtimestamp(ends, UTC).isoformat(timespec="seconds")
    if isinstance(spec, TpuSpec) and spec.how == "flex-start":
        scheduling["maxRunDuration"] = {"seconds": str(run_seconds(spec))}
    if spec.how in ("spot", "reserved", "flex-start") or ends is not None:
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
