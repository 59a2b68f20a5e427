"""TPUs among the instances: what zones offer, what quota allows, and their metadata."""

from collections.abc import Iterable
from functools import cache

from tpuswarm.catalog import Accelerator, accelerator_of_machine, accelerators
from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults
from tpuswarm.cloud.rehearsal.compute.resources import BASE, Resource

FAMILIES = {"v5p": "CT5P", "v6e": "CT6E", "tpu7x": "TPU7X"}
"""The dimension tpu_family of Compute Engine's quota, as a public project of August 2026 shows CT6E; the others by
analogy."""


@cache
def list_offers() -> dict[str, list[str]]:
    """Return the machine types of TPUs by zone, for types that the catalogue calls open or sold."""
    offers: dict[str, set[str]] = {}
    for tpu in accelerators():
        for zone in (*tpu.zones("open"), *tpu.zones("sold")):
            if tpu.machine_type:
                offers.setdefault(zone, set()).add(tpu.machine_type)
    return {zone: sorted(machine_types) for zone, machine_types in sorted(offers.items())}


def tpu_of(instance: Resource) -> Accelerator | None:
    """Return the TPU of an instance, or of a request for one; None if it has none."""
    return accelerator_of_machine(instance["machineType"].rsplit("/", 1)[-1])


def find_exhausted_quota(
    zone_faults: ZoneFaults, zone: str, wanted: Resource, existing: Iterable[Resource], count: int = 1
) -> tuple[str, int] | None:
    """Return name and limit of the quota that `count` more instances would exceed; None if they fit.

    On demand and flex-start share one quota, spot has another; neither is the TPU API's.
    """
    tpu = tpu_of(wanted)
    limit = zone_faults.limit(zone, tpu.generation.name) if tpu else None
    if tpu is None or limit is None:
        return None
    same = (instance for instance in existing if is_spot(instance) == is_spot(wanted))
    used = sum(other.chips for instance in same if (other := tpu_of(instance)) and other.generation == tpu.generation)
    if used + count * tpu.chips <= limit:
        return None
    if is_spot(wanted):
        return f"PREEMPTIBLE-TPU-{tpu.generation.name.upper()}-per-project-zone", limit
    return "TPUS-PER-TPU-FAMILY-per-project-region", limit


def quota_message(name: str, limit: int, zone: str) -> str:
    return f"Quota '{name}' exceeded.  Limit: {limit:.1f} in zone {zone}."


def stockout_message(project: str, zone: str) -> str:
    return (
        f"The zone 'projects/{project}/zones/{zone}' does not have enough resources available to fulfill the request. "
        "Try a different zone, or try again later."
    )


def no_machine_type(zone: str, project: str, name: str) -> str:
    """Return Compute Engine's sentence for a machine type that a zone lacks.

    https://github.com/GoogleCloudPlatform/bank-of-anthos/issues/1234
    """
    url = f"{BASE}projects/{project}/zones/{zone}/machineTypes/{name}"
    field = f"Invalid value for field 'resource.machineType': '{url}'."
    return f"{field} Machine type with name '{name}' does not exist in zone '{zone}'."


def tpu_attributes(tpu: Accelerator, host: RehearsedHost, workers: list[RehearsedHost], zone: str) -> dict[str, str]:
    """Return the metadata that Compute Engine adds to the hosts of a TPU.

    A public log of July 2026 has tpu-env of a v6e slice. It has the workers by their names, which lead nowhere here.
    """
    env = {
        "TPU_ACCELERATOR_TYPE": tpu.name,
        "TOPOLOGY": "x".join(map(str, tpu.topology)),
        "TPU_WORKER_ID": str(host.number),
        "CHIPS_PER_HOST_BOUNDS": ",".join(map(str, (*tpu.host_topology, 1)[:3])),
        "ZONE": zone,
    }
    return {
        "accelerator-type": tpu.api_name or tpu.name,
        "agent-worker-number": str(host.number),
        "tpu-env": "".join(f"{key}: '{value}'\n" for key, value in env.items()),
        "worker-network-endpoints": ",".join(worker.internal for worker in workers),
    }


def is_flex_start(instance: Resource) -> bool:
    return (instance.get("scheduling") or {}).get("provisioningModel") == "FLEX_START"


def is_spot(instance: Resource) -> bool:
    scheduling = instance.get("scheduling") or {}
    return scheduling.get("provisioningModel") == "SPOT" or bool(scheduling.get("preemptible"))
