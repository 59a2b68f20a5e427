"""What is wrong with a fleet in the cloud, apart from its hosts: who keeps it, and what costs and is of no use."""

from collections.abc import Iterator

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.config.formatting import format_age
from tpuswarm.doctor.check import Wrong
from tpuswarm.fleet.activity import list_missing
from tpuswarm.fleet.decide.money import machine_price
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.view import STALE_LEASE_S, machine_rows, running_rate

WAITS_S = 24 * 3600.0
"""Seconds after which a queued request has waited long."""
UNSET = frozenset({"waiting", "stopped", "dead", "deleting"})
"""States in which a machine costs nothing, or only its disk."""
HEALTH, SYMPTOM, REACH = "health", "symptom", "reach"
WHY = {
    "keeper": "without one nothing that is lost is replaced, no limit on cost is enforced, and nothing comes down by "
    "itself",
    "orphan": "nobody wants it any more, and it costs until somebody deletes it",
    "waits": "a queue is no promise: another zone or another way may have room today",
    HEALTH: "a machine that the cloud calls unhealthy fails sooner or later, and takes its slice with it",
    SYMPTOM: "the cloud has noticed what ends programs, or soon will, though it calls the machine healthy",
    REACH: "what cannot be reached cannot be looked at, and a slice does not start without all of its workers",
}
"""Of each check."""


def of_fleet(document: Document, listing: Listing, now: float) -> Iterator[tuple[str, str, Wrong]]:
    """Of whom, which check, and what is wrong. now: Unix seconds."""
    desired = document.desired
    ours = desired.own(listing.machines)
    cost = [each for each in ours if each.state not in UNSET]
    lease = document.lease
    if cost and (lease is None or now - lease.at > 2 * STALE_LEASE_S):
        rate = running_rate(machine_rows(desired, listing, (), now))
        since = "" if lease is None else f": the last one, on {lease.host}, was seen {format_age(now - lease.at)} ago"
        machines = f"{len(cost)} machine{'s' * (len(cost) > 1)}"
        what = f"{machines} cost {rate.hour} an hour, and no keeper runs{since}"
        yield document.name, "keeper", Wrong(what, "`tpuswarm keep`, or `tpuswarm down`")
    pools = {each.name for each in desired.pools}
    for each in ours:
        if each.pool not in pools:
            yield each.name, "orphan", Wrong(f"{_costs(each)}, and no pool {each.pool} is wanted any more", _away(each))
        elif each.state == "waiting" and each.created and now - each.created > WAITS_S:
            waited = format_age(now - each.created)
            mend = f"`tpuswarm down {each.name}`, and other zones or `how` for pool {each.pool} in swarm.toml"
            yield each.name, "waits", Wrong(f"its request has waited in {each.zone} for {waited}", mend)
        elif each.state == "dead" and each.request:
            why = f": {each.why}" if each.why else ""
            yield each.name, "waits", Wrong(f"its request has come to nothing ({each.said}){why}", _away(each))
        else:
            for check, wrong in health(each):
                yield each.name, check, wrong


def health(machine: Machine) -> Iterator[tuple[str, Wrong]]:
    """What the cloud says of a machine, where that is bad; which check that is."""
    again = f"{_away(machine)}: a keeper, or `tpuswarm up`, makes it again"
    if machine.healthy is False:
        yield HEALTH, Wrong(f"the cloud calls it unhealthy: {machine.why or 'it does not say why'}", again)
    elif machine.state == "ready" and machine.symptoms:
        mend = f"without memory: fewer data workers, or a larger host; else, where it fails, {again}"
        yield SYMPTOM, Wrong(f"the cloud reports of it {'; '.join(machine.symptoms)}", mend)


def lacking(document: Document, listing: Listing, where: str, now: float) -> Iterator[tuple[str, Wrong]]:
    """Pools of which machines are wanted and neither there nor asked for, and what of them; where: POOL or `all`."""
    ours = document.desired.own(listing.machines)
    dark = {each.name for each in document.desired.pools if not listing.unreachable.isdisjoint(each.zones)}
    for each in list_missing(document.desired, ours, sorted(document.events), now):
        if where in (ALL, each.pool) and each.pool not in dark:  # there, nobody knows
            yield each.pool, Wrong(each.why, "`tpuswarm up`, or a keeper (`tpuswarm keep`), makes it again")


def _costs(machine: Machine) -> str:
    price = machine_price(machine)
    return f"a {machine.type} in {machine.zone}" + (f" that costs ${price:,.2f} an hour" if price else "")


def _away(machine: Machine) -> str:
    return f"`tpuswarm down {machine.name}`"
