"""Faults and quotas of zones, and the errors that they cause."""

import uuid
from collections.abc import Iterable, Mapping

from google.rpc import error_details_pb2

from tpuswarm.catalog import Accelerator
from tpuswarm.cloud.rehearsal.common.api import PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNAVAILABLE, Refused
from tpuswarm.cloud.rehearsal.common.records import Records, Table

ZONE_FAULTS = {
    "stockout": "has no capacity: creations fail a while after they began, queued requests wait",
    "vm-stockout": "has no capacity for plain VMs",
    "hidden": "may not be seen by this project",
    "unreachable": "does not answer: lists call it unreachable",
    "stuck": "creates machines that never become ready",
}
QUOTA_PREFIXES = {"v2": "TPUV2s", "v3": "TPUV3s", "v4": "TPUV4s", "v5e": "TPUV5s", "v5p": "TPUV5P", "v6e": "TPUV6E"}


class ZoneFaults:
    """Faults and quotas by zone."""

    def __init__(self, records: Records):
        self._faults: Table[list[str]] = records.table("zone fault")
        self._quotas: Table[int] = records.table("quota")

    def set_fault(self, zone: str, fault: str, is_planted: bool) -> None:
        faults = set(self._faults.get(zone) or ())
        (faults.add if is_planted else faults.discard)(fault)
        self._faults.put(zone, sorted(faults))

    def faults(self) -> dict[str, list[str]]:
        return {zone: faults for zone, faults in self._faults.items() if faults}

    def has_fault(self, zone: str, *faults: str) -> bool:
        return not set(faults).isdisjoint(self._faults.get(zone) or ())

    def check_reachable(self, zone: str) -> None:
        """Raise Refused if a zone is hidden or does not answer."""
        if self.has_fault(zone, "hidden"):
            raise Refused(PERMISSION_DENIED, f"Permission denied on 'locations/{zone}' (or it may not exist).")
        if self.has_fault(zone, "unreachable"):
            raise Refused(UNAVAILABLE, f"The service is currently unavailable in {zone}.")

    def unreachable_zones(self) -> list[str]:
        return [zone for zone in self._faults if self.has_fault(zone, "unreachable")]

    def set_quota(self, zone: str, generation: str | None, limit: int | None) -> None:
        """Limit a generation (None: each one) in a zone, in cores or chips as in names of TPU types. None: no limit.

        `v5e-serving` is the part of v5e that Google counts apart from `v5e`.
        """
        key = f"{zone} {generation or '*'}"
        if limit is None:
            self._quotas.pop(key)
        else:
            self._quotas.put(key, limit)

    def quotas(self) -> dict[str, int]:
        return dict(self._quotas.items())

    def quota_infos(
        self, offers: Mapping[str, Iterable[Accelerator]]
    ) -> dict[str, dict[tuple[tuple[str, str], ...], int]]:
        """Return the TPU API's limit of each zone by name of the quota; -1: no limit."""
        limits: dict[str, dict[tuple[tuple[str, str], ...], int]] = {}
        for zone, accelerators in offers.items():
            for accelerator in accelerators:
                limit = self._quota(zone, accelerator)
                for is_spot in (False, True):
                    of_zone = limits.setdefault(_quota_name(accelerator, is_spot), {})
                    of_zone[("zone", zone),] = -1 if limit is None else limit
        return limits

    def _quota(self, zone: str, accelerator: Accelerator) -> int | None:
        generation = accelerator.generation.name
        return self.limit(zone, *([f"{generation}-serving"] if accelerator.is_for_serving else []), generation)

    def limit(self, zone: str, *names: str) -> int | None:
        """Return the first limit that was set in a zone, for these names or for all."""
        limits = (self._quotas.get(f"{zone} {name}") for name in (*names, "*"))
        return next((limit for limit in limits if limit is not None), None)

    def check_quota(
        self, zone: str, requested: Accelerator, is_spot: bool, held: Iterable[tuple[Accelerator, bool]]
    ) -> None:
        """Raise Refused if `requested` on top of `held` (accelerator, is_spot) exceeds the zone's quota."""
        limit = self._quota(zone, requested)
        quota = _quota_name(requested, is_spot)
        used = sum(_quota_units(accelerator) for accelerator, spot in held if _quota_name(accelerator, spot) == quota)
        if limit is None or used + _quota_units(requested) <= limit:
            return
        text = f"Quota limit '{quota}' has been exceeded. Limit: {limit} in zone {zone}."
        metadata = {
            "quota_limit": quota,
            "quota_limit_value": str(limit),
            "zone": zone,
            "service": "tpu.googleapis.com",
        }
        raise Refused(
            RESOURCE_EXHAUSTED,
            text,
            error_details_pb2.QuotaFailure(
                violations=[error_details_pb2.QuotaFailure.Violation(subject=f"zone:{zone}", description=text)]
            ),
            error_details_pb2.ErrorInfo(reason="RATE_LIMIT_EXCEEDED", domain="googleapis.com", metadata=metadata),
        )


def _quota_units(accelerator: Accelerator) -> int:
    return accelerator.cores if accelerator.generation.name_counts == "cores" else accelerator.chips


def _quota_name(accelerator: Accelerator, is_spot: bool) -> str:
    """Return e.g. TPUV2sPreemptiblePodPerProjectPerZoneForTPUAPI: pods of v2 and v3 have quotas of their own.

    So have single hosts of v5e: public logs of 2026 have TPUV5sPreemptibleLitepodServingPerProjectPerZoneForTPUAPI.
    """
    generation = accelerator.generation.name
    pod = "Pod" if generation in ("v2", "v3") and accelerator.hosts > 1 else ""
    litepod = "Litepod" if generation == "v5e" else ""
    serving = "Serving" if accelerator.is_for_serving else ""
    preemptible = "Preemptible" if is_spot else ""
    return f"{QUOTA_PREFIXES[generation]}{preemptible}{litepod}{serving}{pod}PerProjectPerZoneForTPUAPI"


def no_capacity(zone: str) -> Refused:
    """Return a stockout: code 8 without QuotaFailure.

    https://github.com/hashicorp/terraform-provider-google/issues/21243
    """
    return Refused(
        RESOURCE_EXHAUSTED,
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
        f"offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x{uuid.uuid4().hex[:15]}]",
    )


def region_quota_exhausted(quota: str) -> Refused:
    """Return the TPU API's refusal for a quota of Compute Engine, as in public logs of 2026."""
    return Refused(RESOURCE_EXHAUSTED, f"You have reached {quota} limit. [EID: 0x{uuid.uuid4().hex[:15]}]")


def billing_disabled(project: str) -> Refused:
    metadata = {"consumer": f"projects/{project}", "service": "compute.googleapis.com"}
    return Refused(
        PERMISSION_DENIED,
        f"This API method requires billing to be enabled. Please enable billing on project #{project} by visiting "
        f"https://console.developers.google.com/billing/enable?project={project} then retry.",
        error_details_pb2.ErrorInfo(reason="BILLING_DISABLED", domain="googleapis.com", metadata=metadata),
    )


def service_disabled(project: str, service: str, title: str) -> Refused:
    metadata = {"consumer": f"projects/{project}", "service": service}
    return Refused(
        PERMISSION_DENIED,
        f"{title} has not been used in project {project} before or it is disabled. Enable it by visiting "
        f"https://console.developers.google.com/apis/api/{service}/overview?project={project} then retry.",
        error_details_pb2.ErrorInfo(reason="SERVICE_DISABLED", domain="googleapis.com", metadata=metadata),
    )
