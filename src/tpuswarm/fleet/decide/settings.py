"""Compare existing machines with the settings that their pool has now."""

from collections import Counter
from collections.abc import Iterable, Iterator

from tpuswarm.cloud.protocol import ENV_VARS, SSH_KEYS, Machine, TpuSpec
from tpuswarm.fleet.decide.actions import Grow, Wait
from tpuswarm.fleet.decide.desired import PoolSpec

CHANGEABLE_KEYS = (SSH_KEYS, ENV_VARS)
"""Metadata that existing machines get without being created again."""


def plan_disks(pool: PoolSpec, machines: Iterable[Machine]) -> Iterator[Grow]:
    """Grow the disks of VMs that are smaller than the file asks for."""
    if isinstance(pool.spec, TpuSpec):
        return
    wanted = pool.spec.disk_gib
    for machine in machines:
        if machine.disk_gib is not None and machine.disk_gib < wanted and machine.state in ("ready", "stopped"):
            why = f"the file asks for {wanted} GiB and it has {machine.disk_gib}; its file system grows when it reboots"
            yield Grow(machine, wanted, why)


def explain_outdated(pool: PoolSpec, machines: Iterable[Machine]) -> Wait | None:
    """Say which settings of existing machines differ from the file's, which only new machines get."""
    kept = Counter[str]()
    names: list[str] = []
    for machine in machines:
        if settings := list(_outdated(pool, machine)):
            names.append(machine.name)
            kept.update(settings)
    if not names:
        return None
    have = f"{names[0]} still has" if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more still have"
    way_out = f"only a new machine gets what the file says: `tpuswarm down {names[0]}` and `tpuswarm up` replace it"
    return Wait(pool.name, 0, f"{have} {', '.join(kept)}; {way_out}", None)


def _outdated(pool: PoolSpec, machine: Machine) -> Iterator[str]:
    spec = pool.spec
    if isinstance(spec, TpuSpec) and machine.runtime not in (None, spec.runtime):
        yield f"the runtime {machine.runtime}"
    if machine.metadata is not None:
        for key, value in spec.metadata.items():
            if key not in CHANGEABLE_KEYS and machine.metadata.get(key) != value:
                yield f"other metadata {key}"
    if not isinstance(spec, TpuSpec) and machine.disk_gib is not None and machine.disk_gib > spec.disk_gib:
        yield f"a disk of {machine.disk_gib} GiB"
