"""TPUs among the instances: what zones offer, what quota allows, and their metadata."""

from collections.abc import Iterable
from functools import cache

from tpuswarm.catalog import Accelerator, accelerator_of_machine, accelerators
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.common.zone_faults import ZoneFaults
from tpuswarm.cloud.rehearsal.compute.resources import BASE, Resource

GENERATIONS_WITH_QUOTA = ("v5p", "v6e")
"""Those of TPU7x are not known."""
Dimensions = tuple[tuple[str, str], ...]


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

    Flex-start takes quota of spot machines (and at Google that of those on demand where there is none); neither is the
    TPU API's.
    """
    tpu = tpu_of(wanted)
    limit = zone_faults.limit(zone, tpu.generation.name) if tpu else None
    if tpu is None or limit is None:
        return None
    same = (instance for instance in existing if _takes_spot_quota(instance) == _takes_spot_quota(wanted))
    used = sum(other.chips for instance in same if (other := tpu_of(instance)) and other.generation == tpu.generation)
    if used + count * tpu.chips <= limit:
        return None
    name, _ = _quota(tpu.generation.name, _takes_spot_quota(wanted), zone)
    return name.removesuffix("-per-project-region").replace("-", "_"), limit


def list_quotas(zone_faults: ZoneFaults) -> dict[str, dict[Dimensions, int]]:
    """Return the limits that were set, by id of the quota and place; at Google all zones of a region share one."""
    limits: dict[str, dict[Dimensions, int]] = {}
    for zone in list_offers():
        for generation in GENERATIONS_WITH_QUOTA:
            if (limit := zone_faults.limit(zone, generation)) is not None:
                for is_spot in (False, True):
                    id_, dimensions = _quota(generation, is_spot, zone)
                    limits.setdefault(id_, {})[dimensions] = limit
    return limits


def _quota(generation: str, is_spot: bool, zone: str) -> tuple[str, Dimensions]:
    """Return id and dimensions of a quota, as a public project of August 2026 has them for v5p and v6e."""
    region = ("region", region_of(zone))
    if generation != "v5p" and not is_spot:
        return "TPUS-PER-TPU-FAMILY-per-project-region", (region, ("tpu_family", f"CT{generation[1:].upper()}"))
    return f"{'PREEMPTIBLE-' * is_spot}TPU-{generation.upper()}-per-project-region", (region,)


def _takes_spot_quota(instance: Resource) -> bool:
    return is_spot(instance) or is_flex_start(instance)


def quota_message(name: str, limit: int, zone: str) -> str:
    """Return Compute Engine's sentence, as public logs of 2026 have it for v6e on demand."""
    return f"Quota '{name}' exceeded.  Limit: {limit:.1f} in region {region_of(zone)}."


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
