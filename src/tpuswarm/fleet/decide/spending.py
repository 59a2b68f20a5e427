"""What a fleet has cost so far, from what was seen of it and the catalogue's prices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpuswarm.cloud.protocol import Machine, TpuSpec
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.money import HOUR_S, covered_machines, machine_price, spec_price
from tpuswarm.fleet.decide.state import Observed, machine_key

BILLED_STATES = ("ready", "repairing", "starting", "stopping")
"""States in which a machine is paid for."""

MAX_UNSEEN_S = HOUR_S
"""Seconds for which what has gone counts at most, from the last look that showed it (else from its creation)."""


@dataclass(frozen=True)
class PoolSpending:
    """Of one pool."""

    dollars: float = 0.0
    hours: float = 0.0
    """Machine-hours in all."""
    free_hours: float = 0.0
    """Of these, under a grant."""
    unknown_hours: float = 0.0
    """Of these, at a price that nobody says."""


@dataclass(frozen=True)
class Spending:
    """Of all pools."""

    pools: Mapping[str, PoolSpending] = field(default_factory=dict)
    at: float = 0.0
    """Up to when, Unix seconds."""

    @property
    def dollars(self) -> float:
        """In all, as far as prices are known."""
        return sum(each.dollars for each in self.pools.values())


def charge(ledger: Spending, desired: Desired, observed: Observed, now: float) -> Spending:
    """With the time since the last look, for every machine that is there now, or has gone since then.

    Until when it was there nobody says, so what has gone counts until now, but for no more than UNSEEN after the last
    look: hours that nobody saw end no fleet.
    """
    there = [each for each in observed.machines if each.state in BILLED_STATES or _has_gone(each, observed, now)]
    free, _ = covered_machines(there, desired.grants, now)
    with_disks = {each.name: spec_price(each.spec) for each in desired.pools if not isinstance(each.spec, TpuSpec)}
    sums: dict[str, list[float]] = {}
    for machine in there:
        if machine.fleet != desired.fleet:
            continue
        # Where our clock is behind the cloud's, since when a machine is there is known by our own last look alone.
        since = max(machine.created or now, ledger.at) if machine.created <= now else ledger.at or now
        until = min(now, since + MAX_UNSEEN_S) if machine.state == "dead" else now
        hours = max(0.0, until - since) / HOUR_S
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
        before = pools.get(pool, PoolSpending())
        pools[pool] = PoolSpending(
            before.dollars + paid, before.hours + all_, before.free_hours + free_hours, before.unknown_hours + unknown
        )
    return Spending(pools, now)


def _has_gone(machine: Machine, observed: Observed, now: float) -> bool:
    """Whether this look is the first that shows it dead, though it was ready once."""
    seen = observed.memory.seen.get(machine_key(machine))
    return machine.state == "dead" and seen is not None and seen.ready_at is not None and seen.since >= now
