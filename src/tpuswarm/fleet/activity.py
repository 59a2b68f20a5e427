"""Combine machines, jobs and swarm members into an overview of the fleet."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.config.formatting import format_age
from tpuswarm.fleet.decide.actions import Event, Wait
from tpuswarm.fleet.decide.desired import PoolSpec
from tpuswarm.fleet.decide.jobs import all_assignments
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.store.document import Document

if TYPE_CHECKING:
    from tpuswarm.swarm.views.status import MemberStatus

LOSS_EVENTS = ("preempted", "lost", "gone")
ActivityKind = Literal["missing", "not ready", "lost", "joining", "training", "head", "idle"]
ACTIVITY_ORDER: Sequence[ActivityKind] = ("missing", "not ready", "lost", "joining", "head", "idle", "training")
MEMBER_ACTIVITIES: Mapping[str, ActivityKind] = {
    "alive": "training", "evaluating": "training", "joining": "joining", "lost": "lost",
}  # fmt: skip
"""By the state of a member."""


@dataclass(frozen=True)
class MachineActivity:
    pool: str
    machine: str
    """Empty for missing machines; for a member outside the fleet, its id."""
    kind: ActivityKind
    why: str
    member: "MemberStatus | None" = None


def list_activities(
    document: Document,
    listing: Listing,
    events: Iterable[Event],
    members: "Sequence[MemberStatus] | None",
    now: float,
) -> list[MachineActivity]:
    """List all machines, problems first. `members`: from the swarm's head; None without a head."""
    desired, events = document.desired, sorted(events)
    own = sorted(desired.own(listing.machines), key=lambda machine: by_number(machine.name))
    by_id = None if members is None else {member.id: member for member in members}
    found = []
    for machine in own:
        member = (by_id or {}).get(f"j-{machine.name}")
        kind, why = _kind_and_reason(machine, document, events, by_id is not None, member, now)
        found.append(MachineActivity(machine.pool or "", machine.name, kind, why, member))
    found += list_missing(document, [machine for machine in own if machine.state != "dead"], events, now)
    own_members = {f"j-{machine.name}" for machine in own}
    own_members |= {f"j-{event.machine}" for event in events if event.kind in LOSS_EVENTS}
    for member in members or ():
        if member.id not in own_members and member.state != "left":
            why = f"{member.state}, on a machine outside the fleet"
            found.append(MachineActivity("", member.id, MEMBER_ACTIVITIES[member.state], why, member))
    return sorted(found, key=lambda activity: ACTIVITY_ORDER.index(activity.kind))


def list_missing(
    document: Document, existing: Sequence[Machine], events: Sequence[Event], now: float
) -> list[MachineActivity]:
    found = []
    for pool in () if document.desired.down else document.desired.pools:
        if (missing := pool.count - sum(machine.pool == pool.name for machine in existing)) > 0:
            wait = next((wait for wait in document.waits if wait.pool == pool.name and wait.missing), None)
            found.append(MachineActivity(pool.name, "", "missing", _why_missing(pool, missing, wait, events, now)))
    return found


def _why_missing(pool: PoolSpec, count: int, wait: Wait | None, events: Sequence[Event], now: float) -> str:
    own = [event for event in events if event.pool == pool.name]
    last_ready = max((number for number, event in enumerate(own) if event.kind == "ready"), default=-1)
    since = own[last_ready + 1 :]
    reasons = []
    if losses := [event for event in since if event.kind in ("preempted", "lost")]:
        reasons.append(f"{losses[-1].machine} was {losses[-1].kind} {format_age(now - losses[-1].at)} ago")
    if wait is not None:
        reasons.append(wait.why)
        if wait.until is not None:
            reasons.append(f"next try in {format_age(wait.until - now)}" if wait.until > now else "next try now")
    elif refusals := [event for event in since if event.kind == "refused"]:
        reasons.append(f"waiting since {format_age(now - refusals[0].at)}: {refusals[-1].text}")
    if not reasons:
        reasons.append(f"requested in {', '.join(pool.zones)}")
    return f"{count} {pool.type} missing: {'; '.join(reasons)}"


def _kind_and_reason(
    machine: Machine,
    document: Document,
    events: Sequence[Event],
    has_head: bool,
    member: "MemberStatus | None",
    now: float,
) -> tuple[ActivityKind, str]:
    if machine.state != "ready":
        since = next((event.at for event in reversed(events) if event.machine == machine.name), machine.created)
        return "not ready", machine.state_word + (f" since {format_age(now - since)}" if since else "")
    if machine.healthy is False:
        return "not ready", f"unhealthy: {machine.why}" if machine.why else "unhealthy"
    from tpuswarm.fleet.training import AGGREGATORS, is_head, is_member

    assigned = [pair for pair in all_assignments(document.jobs) if pair[1].machine == machine.name]
    head = next((assignment for job, assignment in assigned if is_head(job)), None)
    mine = next((assignment for job, assignment in assigned if is_member(job)), None)
    if mine is None:
        if head is None:
            servers = [assignment for job, assignment in assigned if job.name.startswith(AGGREGATORS)]
            if not servers:
                return "idle", "ready"
            is_running = servers[0].phase == "running"
            return "head", "aggregators" if is_running else f"aggregators: {servers[0].phase}, {servers[0].why}"
        if head.phase != "running":
            return "head", f"the head: {head.phase}, {head.why}"
        if head.error:
            return "head", f"the head; its last run failed: {head.error}"
        has_keeper = document.lease is not None and document.lease.host == machine.name
        return "head", "the head and the keeper" if has_keeper else "the head"
    also = "; the head too" if head is not None else ""
    if mine.phase == "waiting":
        return "not ready", mine.why + also
    if mine.phase != "running":
        return "idle" if mine.phase in ("done", "stopped") else "not ready", f"{mine.phase}: {mine.why}{also}"
    if mine.error:
        also = f"; its last run failed: {mine.error}{also}"
    if not has_head:
        return "joining", f"waiting for the head{also}"
    if member is None or member.state in ("joining", "left"):
        return "joining", f"joining{also}"
    if member.state == "lost":
        return "lost", f"the swarm has lost it; {mine.why}{also}"
    what = "training" if member.state == "alive" else "evaluating"
    return "training", f"{what}{', lost before' * (mine.lost > 0)}{also}"


def count_activities(activities: Sequence[MachineActivity]) -> str:
    """`3 training, 1 joining`."""
    counts = {kind: sum(activity.kind == kind for activity in activities) for kind in ACTIVITY_ORDER}
    return ", ".join(f"{counts[kind]:,} {kind}" for kind in reversed(ACTIVITY_ORDER) if counts[kind] and kind != "head")
