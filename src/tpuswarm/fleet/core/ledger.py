"""What a fleet has cost so far, from what was seen of it and the catalogue's prices."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
    pools = dict(ledger.pools)
    there = [each for each in observed.machines if each.state in ("ready", "repairing", "starting", "stopping")]
    free, _ = covered(there, desired.grants, now)
    with_disks = {each.name: spec_price(each.spec) for each in desired.pools if not isinstance(each.spec, TpuSpec)}
    for machine in there:
        if machine.fleet != desired.fleet:
            continue
        hours = max(0.0, now - max(machine.created or now, ledger.at)) / HOUR
        pool = machine.pool or ""
        before = pools.get(pool, Spent())
        after = replace(before, hours=before.hours + hours)
        price = with_disks.get(pool, machine_price(machine))
        if (machine.zone, machine.name) in free:
            after = replace(after, free_hours=after.free_hours + hours)
        elif price is None:
            after = replace(after, unknown_hours=after.unknown_hours + hours)
        else:
            after = replace(after, dollars=after.dollars + price * hours)
        pools[pool] = after
    return Ledger(pools, now)
