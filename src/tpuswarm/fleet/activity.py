"""What each machine of a fleet that trains is at, and why: its machines, its jobs and the swarm's members as one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.config.formatting import format_age
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired, PoolSpec
from tpuswarm.fleet.decide.jobs import Assignment, Job
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.training import is_head, is_member
from tpuswarm.swarm.views.status import MemberStatus

LOSS_EVENTS = ("preempted", "lost", "gone")
"""Kinds of events by which a machine goes."""
ActivityKind = Literal["missing", "not ready", "lost", "joining", "training", "head", "other"]
ACTIVITY_ORDER: Sequence[ActivityKind] = ("missing", "not ready", "lost", "joining", "head", "other", "training")
"""Those that need a look first."""


@dataclass(frozen=True)
class MachineActivity:
    """A machine that is there, or those of a pool that are not."""

    pool: str
    machine: str
    """Empty for those that are not there; of a member of no machine of the fleet its id."""
    kind: ActivityKind
    why: str
    """What it is at, in words."""
    member: MemberStatus | None = None


def list_activities(
    document: Document, listing: Listing, events: Iterable[Event], members: Sequence[MemberStatus] | None, now: float
) -> list[MachineActivity]:
    """All of them, those that need a look first.

    members: of the swarm, as its head says; None: it has no head at the moment. now: Unix seconds.
    """
    desired, said = document.desired, sorted(events)
    ours = sorted((one for one in listing.machines if one.fleet == desired.fleet), key=lambda one: by_number(one.name))
    known = None if members is None else {each.id: each for each in members}
    found = [_of_machine(each, document, said, known, now) for each in ours]
    found += list_missing(desired, [each for each in ours if each.state != "dead"], said, now)
    taken = {f"j-{each.name}" for each in ours}
    at_home = {each.machine for each in said if each.kind in LOSS_EVENTS}
    for each in members or ():
        if each.id not in taken and each.id.removeprefix("j-") not in at_home and each.state != "left":
            found.append(MachineActivity("", each.id, "other", f"{each.state}, on a machine of another's", each))
    return sorted(found, key=lambda each: ACTIVITY_ORDER.index(each.kind))


def list_missing(
    desired: Desired, there: Sequence[Machine], events: Sequence[Event], now: float
) -> list[MachineActivity]:
    """Of each pool those machines that are wanted and not there. events: by time; now: Unix seconds."""
    found = []
    for pool in () if desired.down else desired.pools:
        if (short := pool.count - sum(each.pool == pool.name for each in there)) > 0:
            found.append(MachineActivity(pool.name, "", "missing", _why_missing(pool, short, events, now)))
    return found


def _why_missing(pool: PoolSpec, count: int, events: Sequence[Event], now: float) -> str:
    """Why so many machines of a pool are not there, and since when."""
    mine = [each for each in events if each.pool == pool.name]
    full = max((number for number, each in enumerate(mine) if each.kind == "ready"), default=-1)
    since = mine[full + 1 :]
    words = []
    if lost := next((each for each in reversed(since) if each.kind in LOSS_EVENTS[:2]), None):
        words.append(f"{lost.machine} was {lost.kind} {format_age(now - lost.at)} ago")
    if refused := next((each for each in reversed(since) if each.kind == "refused"), None):
        first = next(each for each in since if each.kind == "refused")
        words.append(f"waiting since {format_age(now - first.at)}: {refused.text}")
    zones = ", ".join(pool.zones)
    return f"{count} {pool.type} not there: {'; '.join(words) or f'asked for in {zones}'}"


def _of_machine(
    machine: Machine,
    document: Document,
    events: Sequence[Event],
    members: Mapping[str, MemberStatus] | None,
    now: float,
) -> MachineActivity:
    pool, member = machine.pool or "", (members or {}).get(f"j-{machine.name}")

    def doing(kind: ActivityKind, why: str) -> MachineActivity:
        return MachineActivity(pool, machine.name, kind, why, member)

    since = next((each.at for each in reversed(events) if each.machine == machine.name), machine.created)
    if machine.state != "ready":
        return doing(
            "not ready", f"{machine.said.lower()} since {format_age(now - since)}" if since else machine.said.lower()
        )
    if machine.healthy is False:
        return doing("not ready", f"unhealthy: {machine.why}" if machine.why else "unhealthy")
    seats = dict(_seats(document.jobs, machine.name))
    head = next((each for job, each in seats.items() if is_head(job)), None)
    mine = next((each for job, each in seats.items() if is_member(job)), None)
    if mine is None:
        if head is None:
            return doing("other", "ready")
        keeps = bool(document.lease and document.lease.host == machine.name)
        runs = f"the head{', and keeps the fleet' * keeps}"
        return doing("head", runs if head.phase == "running" else f"the head: {head.phase}, {head.why}")
    also = "; the head too" if head is not None else ""
    if mine.phase != "running":
        kind: ActivityKind = "other" if mine.phase in ("done", "stopped") else "not ready"
        return doing(kind, f"{mine.why if mine.phase == 'waiting' else f'{mine.phase}: {mine.why}'}{also}")
    if members is None:
        return doing("joining", f"waiting for the head{also}")
    if member is None or member.state in ("joining", "left"):
        return doing("joining", f"joining{also}")
    if member.state == "lost":
        return doing("lost", f"the swarm has lost it; {mine.why}{also}")
    what = "training" if member.state == "alive" else "evaluating"
    return doing("training", f"{what}{', preempted before' * (mine.lost > 0)}{also}")


def _seats(jobs: Iterable[Job], machine: str) -> Iterable[tuple[Job, Assignment]]:
    for job in jobs:
        for seat in job.assignments:
            if seat.machine == machine:
                yield job, seat


def count_activities(found: Sequence[MachineActivity]) -> str:
    """In a line: `3 training, 1 joining`."""
    count: Mapping[ActivityKind, int] = {kind: sum(each.kind == kind for each in found) for kind in ACTIVITY_ORDER}
    return ", ".join(f"{count[kind]:,} {kind}" for kind in reversed(ACTIVITY_ORDER) if count[kind] and kind != "head")
