"""What is wrong with a fleet in the cloud, apart from its hosts: who keeps it, and what costs and is of no use."""

from collections.abc import Iterator

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.config.shown import age
from tpuswarm.doctor.check import Wrong
from tpuswarm.fleet.core.money import Rate, machine_price
from tpuswarm.fleet.keeping.document import Document
from tpuswarm.fleet.view import HELD, rows

WAITS_S = 24 * 3600.0
"""Seconds after which a queued request has waited long."""
UNSET = frozenset({"waiting", "stopped", "dead", "deleting"})
"""States in which a machine costs nothing, or only its disk."""
HEALTH = "health"
WHY = {
    "keeper": "without one nothing that is lost is replaced, no limit on cost is enforced, and nothing comes down by "
    "itself",
    "orphan": "nobody wants it any more, and it costs until somebody deletes it",
    "waits": "a queue is no promise: another zone or another way may have room today",
    HEALTH: "a machine that the cloud calls unhealthy fails sooner or later, and takes its slice with it",
}
"""Of each check."""


def of_fleet(document: Document, listing: Listing, now: float) -> Iterator[tuple[str, str, Wrong]]:
    """Of whom, which check, and what is wrong. now: Unix seconds."""
    desired = document.desired
    ours = [each for each in listing.machines if each.fleet == desired.fleet]
    cost = [each for each in ours if each.state not in UNSET]
    lease = document.lease
    if cost and (lease is None or now - lease.at > 2 * HELD):
        rate = Rate()
        for row in rows(desired, listing, (), now):
            if row.state not in UNSET:
                rate = rate.plus(row.hourly)
        since = "" if lease is None else f": the last one, on {lease.host}, was seen {age(now - lease.at)} ago"
        machines = f"{len(cost)} machine{'s' * (len(cost) > 1)}"
        what = f"{machines} cost {rate.hour} an hour, and no keeper runs{since}"
        yield document.name, "keeper", Wrong(what, "`tpuswarm keep`, or `tpuswarm down`")
    pools = {each.name for each in desired.pools}
    for each in ours:
        if each.pool not in pools:
            yield each.name, "orphan", Wrong(f"{_costs(each)}, and no pool {each.pool} is wanted any more", _away(each))
        elif each.state == "waiting" and each.created and now - each.created > WAITS_S:
            waited = age(now - each.created)
            mend = f"`tpuswarm down {each.name}`, and other zones or `how` for pool {each.pool} in swarm.toml"
            yield each.name, "waits", Wrong(f"its request has waited in {each.zone} for {waited}", mend)
        elif each.state == "dead" and each.request:
            why = f": {each.why}" if each.why else ""
            yield each.name, "waits", Wrong(f"its request has come to nothing ({each.said}){why}", _away(each))
        elif wrong := health(each):
            yield each.name, HEALTH, wrong


def health(machine: Machine) -> Wrong | None:
    """What the cloud says of a machine's health, where that is bad."""
    if machine.healthy is not False:
        return None
    what = f"the cloud calls it unhealthy: {machine.why or 'it does not say why'}"
    return Wrong(what, f"{_away(machine)}: a keeper, or `tpuswarm up`, makes it again")


def _costs(machine: Machine) -> str:
    price = machine_price(machine)
    return f"a {machine.type} in {machine.zone}" + (f" that costs ${price:,.2f} an hour" if price else "")


def _away(machine: Machine) -> str:
    return f"`tpuswarm down {machine.name}`"
