"""Quotas that Compute Engine has for each region of a project: external addresses and machines."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.protocol import ADDRESSES, INSTANCES
from tpuswarm.cloud.rehearsal.common.records import Records, Table

DEFAULT_LIMITS = {ADDRESSES: 2300, INSTANCES: 24000}


class Held(NamedTuple):
    """A requested or existing machine, as the quotas count it."""

    zone: str
    hosts: int
    has_external: bool


class RegionQuotas:
    """The limits of each region, which are the same for all projects, and each project's usage."""

    def __init__(self, records: Records):
        self._limits: Table[int] = records.table("region quota")
        self.sources: list[Callable[[str], Iterable[Held]]] = []
        """Return the machines of a project."""

    def set_limit(self, region: str, quota: str, limit: int | None) -> None:
        """Set a limit; None restores the default."""
        if limit is None:
            self._limits.pop(f"{region} {quota}")
        else:
            self._limits.put(f"{region} {quota}", limit)

    def limits(self) -> dict[str, int]:
        """Return the limits that were set, by `REGION QUOTA`."""
        return dict(self._limits.items())

    def limit(self, region: str, quota: str) -> int:
        limit = self._limits.get(f"{region} {quota}")
        return DEFAULT_LIMITS[quota] if limit is None else limit

    def usage(self, project: str, region: str) -> dict[str, int]:
        held = [held for source in self.sources for held in source(project) if region_of(held.zone) == region]
        return {
            ADDRESSES: sum(machine.hosts for machine in held if machine.has_external),
            INSTANCES: sum(machine.hosts for machine in held),
        }

    def find_exhausted(self, project: str, wanted: Held) -> str | None:
        """Return a quota that has no room for another machine; None if all have."""
        region = region_of(wanted.zone)
        usage = self.usage(project, region)
        takes = {ADDRESSES: wanted.hosts if wanted.has_external else 0, INSTANCES: wanted.hosts}
        exhausted = (
            quota for quota, hosts in takes.items() if hosts and usage[quota] + hosts > self.limit(region, quota)
        )
        return next(exhausted, None)
