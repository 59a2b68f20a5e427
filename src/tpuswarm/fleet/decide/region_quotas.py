"""Count what machines take of the quotas that Compute Engine has for each region."""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

from tpuswarm.catalog import find
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.protocol import INSTANCES, REGION_QUOTAS, Machine, Spec
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import PoolSpec


def region_key(zone: str, quota: str) -> str:
    """Return the key of a quota, such as us-central1/IN_USE_ADDRESSES."""
    return f"{region_of(zone)}/{quota}"


def host_count(type_: str) -> int:
    """Return how many hosts a machine has; 1 for a VM and for a type that the catalogue does not know."""
    try:
        return find(type_).hosts
    except InputError:
        return 1


def count_hosts(pools: Iterable[PoolSpec], machines: Iterable[Machine], specs: Iterable[Spec]) -> Counter[str]:
    """Return how many hosts of existing and requested machines each quota counts, by its key."""
    internal = {pool.name for pool in pools if not pool.spec.external_ips}
    counts = Counter[str]()
    for machine in machines:
        has_external = machine.pool not in internal
        counts.update(_hosts_by_key(machine.zone, machine.type, has_external))
    for spec in specs:
        counts.update(spec_hosts(spec))
    return counts


def spec_hosts(spec: Spec) -> Mapping[str, int]:
    """Return how many hosts of a machine each quota counts, by its key."""
    return _hosts_by_key(spec.zone, spec.type, spec.external_ips)


@cache
def _hosts_by_key(zone: str, type_: str, has_external: bool) -> Mapping[str, int]:
    quotas = REGION_QUOTAS if has_external else (INSTANCES,)
    return {region_key(zone, quota): host_count(type_) for quota in quotas}
