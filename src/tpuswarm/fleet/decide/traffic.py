"""What a fleet's training has cost in traffic in the last 24 hours, from the bytes that its members have carried."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tpuswarm.catalog import network
from tpuswarm.config.units import GIB
from tpuswarm.fleet.decide.money import HOUR_S

DAY_HOURS = 24
"""Hours."""


@dataclass(frozen=True)
class Traffic:
    """Of one run after the other."""

    run: str = ""
    """The URL of the last one."""
    at: float = 0.0
    """When it was looked at last, Unix seconds."""
    carried: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each of its members then, both ways."""
    zones: Mapping[str, str] = field(default_factory=dict)
    """Where each of them was seen last."""
    hours: Mapping[int, float] = field(default_factory=dict)
    """Dollars by hour since 1970; hours without any are left out."""

    def day(self, now: float) -> float:
        """Dollars of the last 24 hours, at most one hour more. now: Unix seconds."""
        return sum(self._of_day(now).values())

    def falls(self, limit: float, now: float) -> float:
        """When the last 24 hours will have cost less than so many dollars, if nothing more is carried; Unix seconds."""
        hours, then = self._of_day(now), now
        left = sum(hours.values())
        for hour in sorted(hours):
            if left < limit:
                break
            left -= hours[hour]
            then = (hour + DAY_HOURS + 1) * HOUR_S
        return then

    def _of_day(self, now: float) -> dict[int, float]:
        return {hour: paid for hour, paid in self.hours.items() if hour >= now // HOUR_S - DAY_HOURS}


def add_traffic(
    traffic: Traffic, run: str, carried: Mapping[str, int], zones: Mapping[str, str], head: str, now: float
) -> Traffic:
    """With what was carried since the last look; a run that is looked at for the first time counts from then on.

    carried: bytes of each member, of the whole run; zones: of members whose machines are seen now; head: its zone.
    """
    known = {**(traffic.zones if run == traffic.run else {}), **zones}
    paid = 0.0
    for member, all_ in carried.items() if run == traffic.run else ():
        before = traffic.carried.get(member, 0)
        new = all_ - before if all_ >= before else all_  # a run that was begun anew in its place counts from 0 again
        paid += new / GIB * price_per_gib(known.get(member), head) if new else 0.0
    hours = traffic._of_day(now)
    for hour, share in _shares(traffic.at, now) if paid else ():
        if hour >= now // HOUR_S - DAY_HOURS:
            hours[hour] = hours.get(hour, 0.0) + paid * share
    seen = {**(traffic.carried if run == traffic.run else {}), **carried}
    return Traffic(run, now, seen, {each: zone for each, zone in known.items() if each in seen}, hours)


def _shares(since: float, now: float) -> Iterator[tuple[int, float]]:
    """The hours since the last look, and the share of that time in each: nobody knows better when it was carried."""
    if now <= since:
        yield int(now // HOUR_S), 1.0
        return
    for hour in range(int(max(since, now - (DAY_HOURS + 2) * HOUR_S) // HOUR_S), int(now // HOUR_S) + 1):
        yield hour, (min(now, (hour + 1) * HOUR_S) - max(since, hour * HOUR_S)) / (now - since)


def price_per_gib(member: str | None, head: str) -> float:
    """Dollars for a GiB between a member in this zone and a head in that one, half of it each way; unknown ones are 0.

    A member that was never seen on a machine of the fleet (None) is on the internet: what the head sends there is paid.
    """
    if member is None:
        return _dollars("internet", head) / 2
    how = network.relation_of(member, head)
    return (_dollars(how, member) + _dollars(how, head)) / 2


def _dollars(how: network.Relation, place: str) -> float:
    price = network.transfer_price(how, place)
    return 0.0 if price is None else float(price.value)
