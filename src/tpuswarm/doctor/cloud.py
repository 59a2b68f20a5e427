"""Check a fleet in the cloud: its keeper, useless machines, missing machines, unhealthy machines."""

from collections.abc import Iterator

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.config.formatting import format_age
from tpuswarm.doctor.finding import Finding
from tpuswarm.fleet.activity import list_missing
from tpuswarm.fleet.decide.job_failures import find_failures
from tpuswarm.fleet.decide.limits import FREE_STATES
from tpuswarm.fleet.decide.money import machine_price
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.store.document import Document, is_holder_alive
from tpuswarm.fleet.view import STALE_LEASE_S, machine_rows, running_rate

LONG_WAIT_S = 24 * 3600.0
REACH = "reach"
RECREATE = "`tpuswarm up`, or a keeper (`tpuswarm keep`), recreates it"
WHY = {
    "keeper": "without a keeper nothing replaces lost machines, enforces the budget or shuts down by itself",
    "orphan": "nothing uses it, and it costs until you delete it",
    "waits": "a queue is no promise: another zone or `how` may have capacity today",
    "health": "a machine that the cloud calls unhealthy fails sooner or later, and takes its slice with it",
    "job": "its machines cost money and do nothing",
    "symptom": "the cloud reports something that ends programs, although it calls the machine healthy",
    REACH: "an unreachable host cannot be checked, and a slice needs all workers to start",
}


def _finding(subject: str, check: str, problem: str, advice: str) -> Finding:
    return Finding(subject, check, problem, WHY[check], advice)


def check_fleet(document: Document, listing: Listing, now: float) -> Iterator[Finding]:
    """Check the keeper and all machines of a fleet at Unix time `now`."""
    desired, lease = document.desired, document.lease
    machines = desired.own(listing.machines)
    billed = [machine for machine in machines if machine.state not in FREE_STATES]
    is_kept = lease is not None and now - lease.at <= 2 * STALE_LEASE_S and is_holder_alive(lease) is not False
    if billed and not is_kept:
        rate = running_rate(machine_rows(desired, listing, (), now))
        last = "" if lease is None else f"; the last one, on {lease.host}, was seen {format_age(now - lease.at)} ago"
        count = f"{len(billed)} machine{'s' * (len(billed) > 1)}"
        problem = f"{count} cost{'s' * (len(billed) == 1)} {rate.hour} an hour, and no keeper runs{last}"
        yield _finding(document.name, "keeper", problem, "`tpuswarm keep`, or `tpuswarm down`")
    pools = {pool.name for pool in desired.pools}
    for machine in machines:
        delete = f"`tpuswarm down {machine.name}`"
        if machine.pool not in pools:
            price = machine_price(machine)
            costs = f" for ${price:,.2f} an hour" if price else ""
            problem = f"a {machine.type} in {machine.zone}{costs}, but swarm.toml has no pool {machine.pool} any more"
            yield _finding(machine.name, "orphan", problem, delete)
        elif machine.state == "waiting" and machine.created and now - machine.created > LONG_WAIT_S:
            problem = f"its request has waited in {machine.zone} for {format_age(now - machine.created)}"
            advice = f"{delete}, and other zones or `how` for pool {machine.pool} in swarm.toml"
            yield _finding(machine.name, "waits", problem, advice)
        elif machine.state == "dead" and machine.request:
            reason = f": {machine.why}" if machine.why else ""
            yield _finding(machine.name, "waits", f"its request failed ({machine.said}){reason}", delete)
        else:
            yield from check_health(machine)


def check_jobs(document: Document, where: str = ALL) -> Iterator[Finding]:
    """Report jobs that fail again and again; `where`: NAME, NAME/2, POOL or `all`."""
    for failure in find_failures(document.jobs):
        job, assignment = failure.job, failure.assignment
        if where in (ALL, assignment.pool) or where.partition("/")[0] == assignment.machine:
            again = "it runs again by itself" if assignment.is_open else "then start it again"
            advice = f"fix what `tpuswarm logs {job.name}` shows; {again}. `tpuswarm down` ends the costs"
            yield _finding(assignment.machine or assignment.pool, "job", failure.says, advice)


def check_health(machine: Machine) -> Iterator[Finding]:
    """Report bad health and symptoms from the cloud."""
    replace = f"`tpuswarm down {machine.name}`: a keeper, or `tpuswarm up`, recreates it"
    if machine.healthy is False:
        problem = f"the cloud calls it unhealthy: {machine.why or 'no reason given'}"
        yield _finding(machine.name, "health", problem, replace)
    elif machine.state == "ready" and machine.symptoms:
        advice = f"if it lacks memory: fewer data workers, or a larger host; if programs fail there, {replace}"
        yield _finding(machine.name, "symptom", f"the cloud reports {'; '.join(machine.symptoms)}", advice)


def check_missing(document: Document, listing: Listing, where: str, now: float) -> Iterator[Finding]:
    """Report pools (`where`: POOL or `all`) that lack machines, except in zones that do not answer."""
    machines = document.desired.own(listing.machines)
    unknown = {pool.name for pool in document.desired.pools if not listing.unreachable.isdisjoint(pool.zones)}
    for missing in list_missing(document, machines, sorted(document.events), now):
        if where in (ALL, missing.pool) and missing.pool not in unknown:
            yield _finding(missing.pool, REACH, missing.why, RECREATE)


def unreachable(host: str, reason: str, advice: str = f"`tpuswarm list` shows its machine; {RECREATE}") -> Finding:
    """Report a host that cannot be checked."""
    return _finding(host, REACH, reason, advice)
