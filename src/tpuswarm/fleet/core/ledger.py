"""What a fleet has cost so far, from what was seen of it and the catalogue's prices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpuswarm.cloud.protocol import TpuSpec
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.memory import Observed
from tpuswarm.fleet.core.money import HOUR, covered, machine_price, spec_price


@dataclass(frozen=True)
class Spent:
    """Of one pool."""

    dollars: float = 0.0
    hours: float = 0.0
    """Machine-hours in all."""
    free_hours: float = 0.0
    """Of these, under a grant."""
    unknown_hours: float = 0.0
    """Of these, at a price that nobody says."""


@dataclass(frozen=True)
class Ledger:
    """Of all pools."""

    pools: Mapping[str, Spent] = field(default_factory=dict)
    at: float = 0.0
    """Up to when, Unix seconds."""

    @property
    def dollars(self) -> float:
        """In all, as far as prices are known."""
        return sum(each.dollars for each in self.pools.values())


def charge(ledger: Ledger, desired: Desired, observed: Observed, now: float) -> Ledger:
    """With the time since the last look, for every machine that is there now."""
    there = [each for each in observed.machines if each.state in ("ready", "repairing", "starting", "stopping")]
    free, _ = covered(there, desired.grants, now)
    with_disks = {each.name: spec_price(each.spec) for each in desired.pools if not isinstance(each.spec, TpuSpec)}
    sums: dict[str, list[float]] = {}
    for machine in there:
        if machine.fleet != desired.fleet:
            continue
        hours = max(0.0, now - max(machine.created or now, ledger.at)) / HOUR
        pool = machine.pool or ""
        price = with_disks.get(pool, machine_price(machine))
        mine = sums.setdefault(pool, [0.0, 0.0, 0.0, 0.0])
        mine[1] += hours
        if (machine.zone, machine.name) in free:
            mine[2] += hours
        elif price is None:
            mine[3] += hours
        else:
            mine[0] += price * hours
    pools = dict(ledger.pools)
    for pool, (paid, all_, free_hours, unknown) in sums.items():
        before = pools.get(pool, Spent())
        pools[pool] = Spent(
            before.dollars + paid, before.hours + all_, before.free_hours + free_hours, before.unknown_hours + unknown
        )
    return Ledger(pools, now)
