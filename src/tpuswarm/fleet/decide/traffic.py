"""Compute the cost of a training's traffic in the last 24 hours from the bytes that members sent and received."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tpuswarm.catalog import network
from tpuswarm.config.units import GIB
from tpuswarm.fleet.decide.money import HOUR_S

MAX_AGE_HOURS = 24


@dataclass(frozen=True)
class Traffic:
    """The traffic of the fleet's runs, one run after the other."""

    run: str = ""
    """The URL of the latest run."""
    at: float = 0.0
    """The time of the last reading, Unix seconds."""
    carried: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each member at that time, both directions."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """The last known zone of each member."""
    hours: Mapping[int, float] = field(default_factory=dict)
    """Dollars by hour since 1970."""

    def last_day(self, now: float) -> float:
        """Return the dollars of the last 24 hours, plus at most one hour."""
        return sum(self._recent_hours(now).values())

    def drops_below_at(self, limit: float, now: float) -> float:
        """Return when the last 24 hours will have cost less than `limit` dollars, without further traffic."""
        hours, then = self._recent_hours(now), now
        remaining = sum(hours.values())
        for hour in sorted(hours):
            if remaining < limit:
                break
            remaining -= hours[hour]
            then = (hour + MAX_AGE_HOURS + 1) * HOUR_S
        return then

    def _recent_hours(self, now: float) -> dict[int, float]:
        return {hour: paid for hour, paid in self.hours.items() if hour >= now // HOUR_S - MAX_AGE_HOURS}


def add_traffic(
    traffic: Traffic, run: str, carried: Mapping[str, int], zones: Mapping[str, str], head: str, now: float
) -> Traffic:
    """Add the traffic since the last reading; the first reading of a run costs nothing.

    `carried`: bytes of each member since the run began; `zones`: of members on current machines; `head`: its zone.
    """
    same_run = run == traffic.run
    all_zones = {**(traffic.zones if same_run else {}), **zones}
    paid = 0.0
    for member, total in carried.items() if same_run else ():
        before = traffic.carried.get(member, 0)
        new = total - before if total >= before else total  # a member that was replaced counts from 0
        paid += new / GIB * price_per_gib(all_zones.get(member), head) if new else 0.0
    hours = traffic._recent_hours(now)
    for hour, share in _split_by_hour(traffic.at, now) if paid else ():
        if hour >= now // HOUR_S - MAX_AGE_HOURS:
            hours[hour] = hours.get(hour, 0.0) + paid * share
    members = {**(traffic.carried if same_run else {}), **carried}
    return Traffic(run, now, members, {name: zone for name, zone in all_zones.items() if name in members}, hours)


def _split_by_hour(since: float, now: float) -> Iterator[tuple[int, float]]:
    """Yield the hours between two readings, each with its share of the time."""
    if now <= since:
        yield int(now // HOUR_S), 1.0
        return
    for hour in range(int(max(since, now - (MAX_AGE_HOURS + 2) * HOUR_S) // HOUR_S), int(now // HOUR_S) + 1):
        yield hour, (min(now, (hour + 1) * HOUR_S) - max(since, hour * HOUR_S)) / (now - since)


def price_per_gib(member: str | None, head: str) -> float:
    """Return dollars per GiB between a member's and the head's zone, half in each direction; unknown prices are 0.

    A member that was never on a machine of the fleet (None) is on the internet: only the head's sending costs.
    """
    if member is None:
        return _transfer_price("internet", head) / 2
    relation = network.relation_of(member, head)
    return (_transfer_price(relation, member) + _transfer_price(relation, head)) / 2


def _transfer_price(relation: network.Relation, zone: str) -> float:
    price = network.transfer_price(relation, zone)
    return 0.0 if price is None else float(price.value)
