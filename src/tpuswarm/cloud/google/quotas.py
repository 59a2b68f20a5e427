"""How many TPUs a project may have, by API, generation, kind and place, from the Cloud Quotas API."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tpuswarm.catalog import Accelerator, Api, find
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.protocol import How

SERVICES: dict[Api, str] = {"tpu": "tpu.googleapis.com", "compute": "compute.googleapis.com"}
QUOTA_ID = re.compile(r"TPU(V2s|V3s|V4s|V5s|V5P|V6E)(\w*)PerProjectPer(Zone|Region)ForTPUAPI")
"""Ids of TPU quotas; the middle has Preemptible, Pod, Litepod and Serving in any order."""
GENERATIONS = {"V2s": "v2", "V3s": "v3", "V4s": "v4", "V5s": "v5e", "V5P": "v5p", "V6E": "v6e"}
FAMILY_ID = "TPUS-PER-TPU-FAMILY-per-project-region"
FAMILIES = {"CT6E": "v6e"}
COMPUTE_ID = re.compile(rf"(PREEMPTIBLE-)?TPU-(V5P|V6E)-per-project-(zone|region)|{FAMILY_ID}")
"""Ids of Compute Engine's quotas of chips, as a public project of August 2026 has them. v6e on demand has none of its
own but the one of its family. Those of TPU7x are not known."""


class Quota(NamedTuple):
    """One quota in a place: cores of the TPU API (chips for v5e and v6e), chips of Compute Engine."""

    id: str
    limits: Mapping[str, int]
    """By zone or by region."""
    family: str | None = None
    """The TPU family that the quota is for."""


class Allowance(NamedTuple):
    """How much of a TPU kind a place may hold, in the units of type names, and the quota's id."""

    limit: int
    quota: str
    place: str
    """A zone, or the region whose zones share it."""


def quotas_from_infos(infos: Iterable[Mapping[str, Any]]) -> tuple[Quota, ...]:
    """Read the TPU quotas among REST's `quotaInfos`.

    https://cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos
    """
    quotas = []
    for info in infos:
        id_, dimensions = info.get("quotaId", ""), info.get("dimensionsInfos", ())
        if QUOTA_ID.fullmatch(id_):
            quotas.append(Quota(id_, dict(_limits(dimensions))))
        elif id_ == FAMILY_ID:
            for family in FAMILIES:
                own = [one for one in dimensions if one.get("dimensions", {}).get("tpu_family") == family]
                quotas.append(Quota(id_, dict(_limits(_stated(own))), family))
        elif COMPUTE_ID.fullmatch(id_):
            quotas.append(Quota(id_, dict(_limits(_stated(dimensions)))))
    return tuple(quotas)


def _stated(dimensions: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out places without a value: some of them allow TPUs in Compute Engine, and some do not."""
    return [one for one in dimensions if "value" in one.get("details", {})]


def allowance(quotas: Sequence[Quota], type_: str, how: How, zone: str, api: Api = "tpu") -> Allowance | None:
    """Return the tighter one of a zone's and its region's quota for `type_`; None if it is unknown.

    A flex-start machine takes quota of spot ones if there is some, otherwise of those on demand:
    https://docs.cloud.google.com/compute/docs/instances/provisioning-models
    """
    tpu, covers = find(type_), _is_for if api == "tpu" else _is_compute_quota_for

    def tightest(spot: bool) -> Allowance | None:
        found = []
        for quota in (quota for quota in quotas if covers(quota, tpu, spot)):
            if place := next((place for place in (zone, region_of(zone)) if place in quota.limits), None):
                found.append(Allowance(quota.limits[place], quota.id, place))
        return min(found, default=None)

    if how == "flex-start":
        of_spot, on_demand = tightest(True), tightest(False)
        return max(of_spot, on_demand) if of_spot and on_demand else None
    return tightest(how == "spot")


def quota_units(type_: str, api: Api = "tpu") -> int:
    """Return how much of its quota one TPU takes: the number in its name, or its chips in Compute Engine."""
    accelerator = find(type_)
    counts_cores = api == "tpu" and accelerator.generation.name_counts == "cores"
    return accelerator.cores if counts_cores else accelerator.chips


def _is_for(quota: Quota, accelerator: Accelerator, spot: bool) -> bool:
    kind, generation = QUOTA_ID.fullmatch(quota.id), accelerator.generation.name
    if kind is None or GENERATIONS[kind[1]] != generation or ("Preemptible" in kind[2]) != spot:
        return False
    if ("Serving" in kind[2]) != accelerator.is_for_serving:
        return False
    return generation not in ("v2", "v3") or ("Pod" in kind[2]) == (accelerator.hosts > 1)


def _is_compute_quota_for(quota: Quota, accelerator: Accelerator, spot: bool) -> bool:
    kind, generation = COMPUTE_ID.fullmatch(quota.id), accelerator.generation.name
    if kind is None or quota.family:
        return not spot and FAMILIES.get(quota.family or "") == generation
    return GENERATIONS[kind[2]] == generation and bool(kind[1]) == spot


def _limits(dimensions: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, int]]:
    for info in dimensions:
        value = int(info.get("details", {}).get("value", 0))
        limit = value if value >= 0 else 10**9  # -1 means unlimited
        named = info.get("dimensions", {})
        places = [named[key] for key in ("zone", "region") if key in named] or info.get("applicableLocations", ())
        yield from ((place, limit) for place in places)
