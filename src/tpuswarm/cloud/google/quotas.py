"""How many TPUs a project may have, by generation, kind and place, from the Cloud Quotas API."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tpuswarm.catalog import Accelerator, find
from tpuswarm.catalog.prices import region_of

QUOTA_ID = re.compile(r"TPU(V2s|V3s|V4s|V5s|V5P|V6E)(\w*)PerProjectPer(Zone|Region)ForTPUAPI")
"""Ids of TPU quotas; the middle has Preemptible, Pod, Litepod and Serving in any order."""
GENERATIONS = {"V2s": "v2", "V3s": "v3", "V4s": "v4", "V5s": "v5e", "V5P": "v5p", "V6E": "v6e"}


class Quota(NamedTuple):
    """One quota: cores (chips for v5e and v6e) in a place."""

    id: str
    limits: Mapping[str, int]
    """By zone or by region."""


class Allowance(NamedTuple):
    """How much of a TPU kind a zone may hold, in the units of type names, and the quota's id."""

    limit: int
    quota: str


def quotas_from_infos(infos: Iterable[Mapping[str, Any]]) -> tuple[Quota, ...]:
    """Read the TPU quotas among REST's `quotaInfos`.

    https://cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos
    """
    return tuple(
        Quota(info["quotaId"], dict(_limits(info.get("dimensionsInfos", ()))))
        for info in infos
        if QUOTA_ID.fullmatch(info.get("quotaId", ""))
    )


def allowance(quotas: Iterable[Quota], type_: str, spot: bool, zone: str) -> Allowance | None:
    """Return the tighter one of a zone's and its region's quota for `type_`; None if no quota covers it."""
    found: dict[str, Allowance] = {}
    for quota in quotas:
        kind = QUOTA_ID.fullmatch(quota.id)
        if kind is None or not _is_for(kind, find(type_), spot):
            continue
        limit = quota.limits.get(zone if kind[3] == "Zone" else region_of(zone))
        if limit is not None:
            found[kind[3]] = Allowance(limit, quota.id)
    return min(found.values(), default=None)


def quota_units(type_: str) -> int:
    """Return how much of its quota one TPU takes: the number in its name."""
    accelerator = find(type_)
    return accelerator.cores if accelerator.generation.name_counts == "cores" else accelerator.chips


def _is_for(kind: re.Match[str], accelerator: Accelerator, spot: bool) -> bool:
    generation = accelerator.generation.name
    if GENERATIONS[kind[1]] != generation or ("Preemptible" in kind[2]) != spot:
        return False
    if ("Serving" in kind[2]) != accelerator.is_for_serving:
        return False
    return generation not in ("v2", "v3") or ("Pod" in kind[2]) == (accelerator.hosts > 1)


def _limits(dimensions: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, int]]:
    for info in dimensions:
        value = int(info.get("details", {}).get("value", 0))
        limit = value if value >= 0 else 10**9  # -1 means unlimited
        named = info.get("dimensions", {})
        places = [named[key] for key in ("zone", "region") if key in named] or info.get("applicableLocations", ())
        yield from ((place, limit) for place in places)
