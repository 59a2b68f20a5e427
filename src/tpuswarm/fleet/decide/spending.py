"""Add up the cost of a fleet from observed machines and catalogue prices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpuswarm.cloud.protocol import Machine
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import Observed, machine_key
from tpuswarm.fleet.decide.money import HOUR_S, covered_machines, machine_price

BILLED_STATES = ("ready", "repairing", "starting", "stopping")

MAX_UNSEEN_S = HOUR_S
"""A machine that has gone is charged for at most this long after it was last observed (or created)."""


@dataclass(frozen=True)
class PoolSpending:
    dollars: float = 0.0
    hours: float = 0.0
    """All machine-hours."""
    free_hours: float = 0.0
    """Machine-hours under a grant."""
    unknown_hours: float = 0.0
    """Machine-hours at an unknown price."""


@dataclass(frozen=True)
class Spending:
    pools: Mapping[str, PoolSpending] = field(default_factory=dict)
    at: float = 0.0
    """Charged up to this time, Unix seconds."""

    @property
    def dollars(self) -> float:
        """The total at known prices."""
        return sum(pool.dollars for pool in self.pools.values())


def charge(spending: Spending, desired: Desired, observed: Observed, now: float) -> Spending:
    """Charge the time since the last observation for existing machines, and for those that have gone since then.

    A machine that has gone is charged until now, but at most for MAX_UNSEEN_S: unobserved hours must not exhaust the
    budget.
    """
    billed = [m for m in observed.machines if m.state in BILLED_STATES or _has_just_gone(m, observed, now)]
    free, _ = covered_machines(billed, desired.grants, now)
    pools = dict(spending.pools)
    for machine in billed:
        if machine.fleet != desired.fleet:
            continue
        # If our clock is behind the cloud's, only our last observation tells since when the machine exists.
        since = max(machine.created or now, spending.at) if machine.created <= now else spending.at or now
        until = min(now, since + MAX_UNSEEN_S) if machine.state == "dead" else now
        hours = max(0.0, until - since) / HOUR_S
        name = machine.pool or ""
        price = machine_price(machine)
        is_free = (machine.zone, machine.name) in free
        before = pools.get(name, PoolSpending())
        pools[name] = PoolSpending(
            before.dollars + (0.0 if is_free or price is None else price * hours),
            before.hours + hours,
            before.free_hours + (hours if is_free else 0.0),
            before.unknown_hours + (hours if price is None and not is_free else 0.0),
        )
    return Spending(pools, now)


def _has_just_gone(machine: Machine, observed: Observed, now: float) -> bool:
    """Whether this observation is the first to find a machine dead that was ready before."""
    seen = observed.state.seen.get(machine_key(machine))
    return machine.state == "dead" and seen is not None and seen.ready_at is not None and seen.since >= now
