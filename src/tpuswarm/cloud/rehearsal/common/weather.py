"""What the cloud has and lets one have: stockouts, quotas, zones that are hidden or do not answer."""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from google.rpc import error_details_pb2

from tpuswarm.catalog import Accelerator
from tpuswarm.cloud.rehearsal.common.records import Records, Table
from tpuswarm.cloud.rehearsal.common.refused import PERMISSION_DENIED, RESOURCE_EXHAUSTED, UNAVAILABLE, Refused

ZONE_FAULTS = {
    "stockout": "has no capacity: creations fail a while after they began, queued requests wait",
    "vm-stockout": "has no capacity for plain VMs",
    "hidden": "may not be seen by this project",
    "unreachable": "does not answer: lists call it unreachable",
    "stuck": "creates machines that never become ready",
}
"""What may be wrong with a zone."""
QUOTA_NAMES = {"v2": "TPUV2s", "v3": "TPUV3s", "v4": "TPUV4s", "v5e": "TPUV5s", "v5p": "TPUV5P", "v6e": "TPUV6E"}
"""How the quotas of a generation begin."""


class Weather:
    """Settings of the cloud as a whole, by zone."""

    def __init__(self, records: Records):
        self._faults: Table[list[str]] = records.table("zone fault")
        self._quotas: Table[int] = records.table("quota")

    def set(self, zone: str, fault: str, wrong: bool) -> None:
        """Let a zone be so, or no longer."""
        faults = set(self._faults.get(zone) or ())
        (faults.add if wrong else faults.discard)(fault)
        self._faults.put(zone, sorted(faults))

    def faults(self) -> dict[str, list[str]]:
        """By zone."""
        return {zone: faults for zone, faults in self._faults.items() if faults}

    def has(self, zone: str, fault: str) -> bool:
        """Whether a zone is so."""
        return fault in (self._faults.get(zone) or ())

    def reach(self, zone: str) -> None:
        """Raises Refused for a zone that one may not see, or that does not answer."""
        if self.has(zone, "hidden"):
            raise Refused(PERMISSION_DENIED, f"Permission denied on 'locations/{zone}' (or it may not exist).")
        if self.has(zone, "unreachable"):
            raise Refused(UNAVAILABLE, f"The service is currently unavailable in {zone}.")

    def unreachable(self) -> list[str]:
        """Zones that do not answer."""
        return [zone for zone in self._faults if self.has(zone, "unreachable")]

    def set_quota(self, zone: str, generation: str | None, limit: int | None) -> None:
        """So much of a generation (None: of each one) at a time in a zone, counted as names of types count."""
        if limit is None:
            self._quotas.pop(f"{zone} {generation or '*'}")
        else:
            self._quotas.put(f"{zone} {generation or '*'}", limit)

    def quotas(self) -> dict[str, int]:
        """Limits that are set, by `ZONE GENERATION`."""
        return dict(self._quotas.items())

    def limits(self, zones: Mapping[str, Iterable[Accelerator]]) -> dict[str, dict[str, int]]:
        """By name of a quota: what it is in each zone; -1: no limit."""
        found: dict[str, dict[str, int]] = {}
        for zone, offered in zones.items():
            for each in offered:
                for spot in (False, True):
                    limit = self.quota(zone, each.generation.name)
                    found.setdefault(quota_name(each, spot), {})[zone] = -1 if limit is None else limit
        return found

    def quota(self, zone: str, generation: str) -> int | None:
        """None: no limit."""
        limit = self._quotas.get(f"{zone} {generation}")
        return self._quotas.get(f"{zone} *") if limit is None else limit

    def check_quota(self, zone: str, wanted: Accelerator, spot: bool, held: Iterable[tuple[Accelerator, bool]]) -> None:
        """Raises Refused if what is held in the zone and what is wanted are more than the project may have."""
        generation = wanted.generation.name
        limit = self.quota(zone, generation)
        name = quota_name(wanted, spot)
        used = sum(size(each) for each, its_spot in held if quota_name(each, its_spot) == name)
        if limit is None or used + size(wanted) <= limit:
            return
        text = f"Quota limit '{name}' has been exceeded. Limit: {limit} in zone {zone}."
        about = {"quota_limit": name, "quota_limit_value": str(limit), "zone": zone, "service": "tpu.googleapis.com"}
        raise Refused(
            RESOURCE_EXHAUSTED,
            text,
            error_details_pb2.QuotaFailure(
                violations=[error_details_pb2.QuotaFailure.Violation(subject=f"zone:{zone}", description=text)]
            ),
            error_details_pb2.ErrorInfo(reason="RATE_LIMIT_EXCEEDED", domain="googleapis.com", metadata=about),
        )


def size(accelerator: Accelerator) -> int:
    """What quotas count: cores or chips, as in the type's name."""
    return accelerator.cores if accelerator.generation.name_counts == "cores" else accelerator.chips


def quota_name(accelerator: Accelerator, spot: bool) -> str:
    """TPUV2sPreemptiblePodPerProjectPerZoneForTPUAPI: v2 and v3 have quotas of their own for pods."""
    generation = accelerator.generation.name
    pod = "Pod" if generation in ("v2", "v3") and accelerator.hosts > 1 else ""
    litepod = "Litepod" if generation == "v5e" else ""
    preemptible = "Preemptible" if spot else ""
    return f"{QUOTA_NAMES[generation]}{preemptible}{litepod}{pod}PerProjectPerZoneForTPUAPI"


def no_capacity(zone: str) -> Refused:
    """Code 8 without QuotaFailure. https://github.com/hashicorp/terraform-provider-google/issues/21243"""
    return Refused(
        RESOURCE_EXHAUSTED,
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
        f"offered (see https://cloud.google.com/tpu/docs/regions) [EID: 0x{uuid.uuid4().hex[:15]}]",
    )


def billing_disabled(project: str) -> Refused:
    """What a project without a billing account is answered."""
    about = {"consumer": f"projects/{project}", "service": "compute.googleapis.com"}
    return Refused(
        PERMISSION_DENIED,
        f"This API method requires billing to be enabled. Please enable billing on project #{project} by visiting "
        f"https://console.developers.google.com/billing/enable?project={project} then retry.",
        error_details_pb2.ErrorInfo(reason="BILLING_DISABLED", domain="googleapis.com", metadata=about),
    )


def service_disabled(project: str, service: str, title: str) -> Refused:
    """What an API answers that is not enabled in the project."""
    about: dict[str, Any] = {"consumer": f"projects/{project}", "service": service}
    return Refused(
        PERMISSION_DENIED,
        f"{title} has not been used in project {project} before or it is disabled. Enable it by visiting "
        f"https://console.developers.google.com/apis/api/{service}/overview?project={project} then retry.",
        error_details_pb2.ErrorInfo(reason="SERVICE_DISABLED", domain="googleapis.com", metadata=about),
    )
