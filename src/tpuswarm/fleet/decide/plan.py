"""What to do next about a fleet: a function of what is wanted, what there is, and the time.

It deletes nothing that is healthy, but for what is no longer wanted, and nothing that does not carry the fleet's id.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from tpuswarm.catalog import find
from tpuswarm.cloud.protocol import Machine
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.actions import Action, Create, Delete, Plan, Start, Stop, Wait
from tpuswarm.fleet.decide.desired import Desired, PoolSpec
from tpuswarm.fleet.decide.limits import Limits, Refusal, machine_quota, spec_quota
from tpuswarm.fleet.decide.money import DELETE_MARGIN_S, HOUR_S, QuotaKey, format_dollars, machine_price
from tpuswarm.fleet.decide.names import by_number, free_names
from tpuswarm.fleet.decide.state import Observed, ZoneBackoff, backoff_key, machine_key, spec_backoff_key

BOOT_TIMEOUT_S, REPAIR_TIMEOUT_S, UNHEALTHY_GRACE_S, QUEUE_TIMEOUT_S = 1800.0, 1800.0, 900.0, 4 * HOUR_S
"""Seconds that a machine may take to be ready (several times that for the largest slices), to be repaired, to be called
healthy again, and, while it waits in a queue, before the next zone is asked."""
LONG_REPAIR_TIMEOUT_S = 4 * HOUR_S
"""The same for the repair of what is not spot, as such capacity may take days to come again, and for a machine that is
called unhealthy while a job runs on it: a guest agent that does not answer says little about the job."""
DELETE_RETRY_S, DELETE_OVERDUE_S = 120.0, 600.0
"""Seconds after which the same is asked of a machine again, and after which a deletion no longer holds up its
successor."""
CREATES_PER_SUCCESS, REFUSAL_WINDOW_S = 10, 45.0
"""Where the last try has failed, one machine is asked for at a time; once it has not been refused for so many seconds,
there seems to be room again, and so many more are asked for at once for each such machine."""
MAX_REPLACEMENTS, REPLACEMENT_WINDOW_S = 3, 24 * HOUR_S
"""Machines of a zone that are replaced for their health, and within which time; after that it is left to a person."""
MAX_FAILED_SETUPS = 2
"""The same of machines that cannot be set up."""


def make_plan(desired: Desired, observed: Observed, now: float) -> Plan:
    """What to do at `now` (Unix seconds)."""
    if desired.down is not None:
        sent = observed.memory.sent
        due = (
            each
            for each in _to_go(desired, observed)
            if now - sent.get(machine_key(each), -DELETE_OVERDUE_S) >= _again(each)
        )
        return Plan(tuple(Delete(each, desired.down) for each in due))
    if why := _end(desired, observed, now):
        return Plan((), end=why)
    return _Planner(desired, observed, now).plan()


def list_remaining(desired: Desired, observed: Observed) -> list[str]:
    """What may still cost money of a fleet that comes down: machines, creations under way, zones that do not answer."""
    memory, listing = observed.memory, observed.listing
    listed = {machine_key(each) for each in listing.machines if each.fleet == desired.fleet}
    asked = {key for key in memory.asked if key not in listed}
    unknown = {key for key, each in memory.seen.items() if each.machine.zone in listing.unreachable}
    unseen = {f"{zone}, which does not answer" for zone in set(desired.zones) & listing.unreachable}
    return sorted(listed | asked | unknown | unseen)


def _to_go(desired: Desired, observed: Observed) -> list[Machine]:
    """What can be deleted now of a fleet that comes down: its keeper's own machine goes when nothing else is left."""
    ours = [each for each in observed.listing.machines if each.fleet == desired.fleet]
    own = [each for each in ours if each.pool == desired.kept_on]
    alone = {machine_key(each) for each in own}.issuperset(list_remaining(desired, observed))
    return ours if alone else [each for each in ours if each not in own]


def _end(desired: Desired, observed: Observed, now: float) -> str | None:
    """Why all of it is to come down from now on."""
    when, work, total = desired.down_when, observed.work, desired.budget.total
    if when and when.at is not None and now >= when.at:
        return "down_when: its date has come"
    if when and when.done and work.done:
        return "down_when: the work is done"
    if when and when.idle_s is not None and work.busy_at is not None and now - work.busy_at >= when.idle_s:
        return f"down_when: nothing has run for {when.idle_s / 60:g} min"
    if (
        total is not None
        and observed.spent + Limits(desired, observed, (), now).rate * DELETE_MARGIN_S / HOUR_S >= total
    ):
        return f"{format_dollars(observed.spent)} are spent of the budget's {format_dollars(total)} in all"
    return None


def _again(machine: Machine) -> float:
    """Seconds after which a deletion is asked for again."""
    return DELETE_OVERDUE_S if machine.state == "deleting" else DELETE_RETRY_S


class _Planner:
    """One plan for a fleet that is up."""

    def __init__(self, desired: Desired, observed: Observed, now: float):
        self.desired, self.memory, self.now = desired, observed.memory, now
        self.busy, self.spoilt = observed.busy, observed.work.spoilt
        self.away = observed.listing.unreachable
        self.actions: list[Action] = []
        self.waits: list[Wait] = []
        self.pools: dict[str, list[Machine]] = defaultdict(list)
        self.names: dict[str, set[str]] = defaultdict(set)
        """That are taken, by zone."""
        listed = set()
        for each in observed.machines:
            listed.add(machine_key(each))
            self.names[each.zone].add(each.name)
            if each.fleet == desired.fleet:
                self.pools[each.pool or ""].append(each)
        unlisted = {key: each.spec for key, each in self.memory.asked.items() if key not in listed}
        self.unlisted = tuple(unlisted.values())
        for key in (*unlisted, *self.memory.taken):
            zone, _, name = key.partition("/")
            self.names[zone].add(name)
        self.limits = Limits(desired, observed, self.unlisted, now)
        self.under_way: dict[str, int] = defaultdict(int)
        """Machines by the place in which they are not ready yet."""
        self.granted: dict[str, int] = defaultdict(int)
        """Of these, those that would have been refused by now if there were no room for them."""
        self.held: dict[QuotaKey, int] = defaultdict(int)
        """Machines by the quota on which they draw."""
        for each in (each for machines in self.pools.values() for each in machines):
            if each.state not in ("dead", "deleting") and machine_key(each) not in self.memory.failed:
                self.held[machine_quota(each)] += 1
                self.under_way[backoff_key(each.zone, each.type, each.how)] += each.state in ("creating", "waiting")
        for spec in self.unlisted:
            self.held[spec_quota(spec)] += 1
            self.under_way[spec_backoff_key(spec)] += 1

        self.grants: dict[str, float] = {}
        """When the next one of those will be."""
        for asked in self.memory.asked.values():
            at, since = spec_backoff_key(asked.spec), asked.at + REFUSAL_WINDOW_S
            self.granted[at] += now >= since
            if now < since:
                self.grants[at] = min(since, self.grants.get(at, since))

    def plan(self) -> Plan:
        wanted = {pool.name for pool in self.desired.pools}
        for name, machines in self.pools.items():
            if name not in wanted:
                for each in machines:
                    self._delete(each, f"there is no pool {name} any more")
        for pool in self.desired.pools:
            missing, remains = self._tend(pool)
            if missing > 0:
                self._create(pool, missing, remains)
        return Plan(tuple(self.actions), tuple(self.waits))

    # Machines that are there.

    def _tend(self, pool: PoolSpec) -> tuple[int, Counter[str]]:
        """What is to be done with its machines; how many are missing, and where something is left of how many."""
        alive: list[Machine] = []
        going = 0
        remains = Counter[str]()
        for each in self.pools.get(pool.name, ()):
            if not self._is_lost(pool, each):
                alive.append(each)
            elif self._is_harmless(each):
                remains[each.zone] += self._holds_up(each)
            else:
                going += 1
        seen = [each for each in alive if each.zone not in self.away]
        if (surplus := len(seen) - pool.count) > 0:
            why = f"pool {pool.name} is to have {pool.count:,}, and has {len(seen):,}"
            for each in sorted(seen, key=self._least_wanted)[:surplus]:
                self._delete(each, why)
                alive.remove(each)
        for each in alive:
            self._pause(pool, each)
        if unpaid := [each for each in alive if self.limits.is_unpaid(each)]:
            rate = format_dollars(sum(machine_price(each) or 0.0 for each in unpaid))
            why = f"{len(unpaid):,} of its machines cost {rate} an hour, as no grant covers them: `tpuswarm up --paid` "
            self.waits.append(Wait(pool.name, 0, f"{why}allows it, `tpuswarm down NAME` deletes one", None))
        there = {each.name for each in alive}
        paused = sum(of == pool.name and name not in there for name, of in self.desired.paused.items())
        unlisted = sum(spec.pool == pool.name for spec in self.unlisted)
        return pool.count - len(alive) - going - paused - unlisted, remains

    def _least_wanted(self, machine: Machine) -> tuple[bool, bool, bool, float, tuple[str, int]]:
        """To sort by: first goes what is not ready, then what is idle, then what is not healthy, then the youngest."""
        stem, number = by_number(machine.name)
        runs = machine.name in self.busy
        return machine.state == "ready", runs, machine.healthy is not False, -machine.created, (stem, -number)

    def _is_harmless(self, machine: Machine) -> bool:
        """Whether a machine on its way out is one no longer: at most it holds a name, and quota, in its zone."""
        seen = self.memory.seen.get(machine_key(machine))
        return machine.state == "dead" or machine_key(machine) in self.memory.failed or (seen is not None and seen.dead)

    def _holds_up(self, machine: Machine) -> bool:
        """Whether what is left of a machine holds up a successor in its zone."""
        key = machine_key(machine)
        began = self.memory.deleting.get(key, self._since(key) if machine.zone in self.away else self.now)
        return machine.state == "deleting" or self.now - began < DELETE_OVERDUE_S

    def _is_lost(self, pool: PoolSpec, machine: Machine) -> bool:
        """Whether a machine does not count any longer; if so, its deletion is asked for."""
        key = machine_key(machine)
        if machine.state == "dead":
            said = "took it away" if machine.spot else "ended it"
            self._delete(machine, f"the cloud {said} ({machine.why or machine.said}); what is left of it goes")
        elif key in self.memory.failed:
            self._delete(machine, f"its creation failed: {self.memory.failed[key]}")
        elif machine.state == "deleting":
            if self.now - self._since(key) >= DELETE_OVERDUE_S:
                self._delete(machine, f"it has been on its way out for more than {DELETE_OVERDUE_S / 60:.0f} min")
        elif key in self.memory.deleting:
            self._delete(machine, "it is still there, though it was deleted")
        elif self.desired.dropped.get(machine.name) in self._created(machine):
            self._delete(machine, "requested by `tpuswarm down`")
        elif self.limits.expired(machine):
            self._delete(machine, f"no grant covers a {machine.type} in {machine.zone} any more")
        elif late := self._late(pool, machine):
            pause = (pool.wait_s or QUEUE_TIMEOUT_S) if machine.state == "waiting" else 0.0
            self.actions += self._deletion(machine, late, "late", pause)
        elif self._is_bad(pool, machine):
            most = LONG_REPAIR_TIMEOUT_S if machine.name in self.busy else UNHEALTHY_GRACE_S
            why = f"it was not healthy for more than {most / 60:.0f} min: {machine.why or machine.said}"
            self.actions += self._deletion(machine, why, "bad")
        elif self._is_spoilt(pool, machine):
            why = f"it could not be set up, though others could: {self.spoilt[machine.name][1]}"
            self.actions += self._deletion(machine, why, "bad")
        else:
            return False
        return True

    def _created(self, machine: Machine) -> tuple[float, float]:
        """When it was created, and when the request was that it comes from, if it was seen."""
        seen = self.memory.seen.get(machine_key(machine))
        return machine.created, machine.created if seen is None else seen.born

    def _since(self, key: str) -> float:
        """Since when a machine is in its state."""
        seen = self.memory.seen.get(key)
        return self.now if seen is None else seen.since

    def _late(self, pool: PoolSpec, machine: Machine) -> str | None:
        """Why a machine is waited for no longer."""
        took = self.now - self._since(machine_key(machine))
        if machine.state in ("creating", "starting") and took > (most := BOOT_TIMEOUT_S * _slowness(machine.type)):
            return f"it was not ready after {most / 60:.0f} min"
        most = REPAIR_TIMEOUT_S if machine.spot else LONG_REPAIR_TIMEOUT_S
        if machine.state in ("repairing", "stopping") and took > most:
            return f"it was {machine.said} for more than {most / 60:.0f} min"
        if machine.state == "waiting":
            most = QUEUE_TIMEOUT_S if pool.wait_s is None else pool.wait_s
            in_last = pool.wait_s is None and machine.zone == pool.zones[-1]
            if took > most and not in_last:
                return f"it waited in the queue of {machine.zone} for more than {most / HOUR_S:g} h"
        return None

    def _is_bad(self, pool: PoolSpec, machine: Machine) -> bool:
        """Whether a machine is to be replaced for its health."""
        seen = self.memory.seen.get(machine_key(machine))
        if machine.state != "ready" or machine.healthy is not False or seen is None:
            return False
        most = LONG_REPAIR_TIMEOUT_S if machine.name in self.busy else UNHEALTHY_GRACE_S
        if seen.unhealthy_since is None or self.now - seen.unhealthy_since <= most:
            return False
        return self._is_replaced(pool, machine, f"is not healthy ({machine.why or machine.said})", MAX_REPLACEMENTS)

    def _is_spoilt(self, pool: PoolSpec, machine: Machine) -> bool:
        """Whether a machine is to be replaced because it cannot be set up, though others can."""
        created, why = self.spoilt.get(machine.name, (None, ""))
        if machine.state != "ready" or machine.name in self.busy or created != machine.created:
            return False
        return self._is_replaced(pool, machine, f"cannot be set up ({why})", MAX_FAILED_SETUPS)

    def _is_replaced(self, pool: PoolSpec, machine: Machine, what: str, most: int) -> bool:
        """Whether another machine is to take its place; where not, a person is told. most: so many within a day."""
        if not machine.spot:
            why = f"{machine.name} {what}, and left as it is, as it is not spot"
            again = f"{why}: `tpuswarm down {machine.name}` and `tpuswarm up` replace it"
            self.waits.append(Wait(pool.name, 0, again, None))
            return False
        place = self.memory.places.get(backoff_key(machine.zone, machine.type, machine.how), ZoneBackoff())
        if sum(self.now - at < REPLACEMENT_WINDOW_S for at in place.bad) < most:
            return True
        why = f"{machine.name} {what}, and left as it is: {most} of {machine.zone} were replaced within a day"
        self.waits.append(Wait(pool.name, 0, why, None))
        return False

    def _pause(self, pool: PoolSpec, machine: Machine) -> None:
        if (
            machine.zone in self.away
            or self.now - self.memory.sent.get(machine_key(machine), -DELETE_RETRY_S) < DELETE_RETRY_S
        ):
            return
        paused = machine.name in self.desired.paused
        if paused and machine.state == "ready":
            self.actions.append(Stop(machine, "it is paused"))
        elif not paused and machine.state == "stopped":
            self.actions.append(Start(machine, f"pool {pool.name} is to have it, and it is stopped"))

    def _delete(self, machine: Machine, why: str) -> None:
        self.actions += self._deletion(machine, why)

    def _deletion(
        self, machine: Machine, why: str, blame: Literal["late", "bad"] | None = None, pause: float = 0.0
    ) -> list[Delete]:
        """None where it was asked for a moment ago, or where nobody answers."""
        recent = machine.zone in self.away or self.now - self.memory.sent.get(
            machine_key(machine), -DELETE_OVERDUE_S
        ) < _again(machine)
        return [] if recent else [Delete(machine, why, blame, pause)]

    # Machines that are missing.

    def _create(self, pool: PoolSpec, missing: int, remains: Counter[str]) -> None:
        if said := self.memory.stopped.get(pool.name):
            self.waits.append(Wait(pool.name, missing, f"{said}; it is tried again after `tpuswarm up`", None))
            return
        if unseen := sorted(set(self.desired.zones) & self.away - self.memory.looked):
            why = f"{unseen[0]} does not answer, and what the fleet has there is not known"
            self.waits.append(Wait(pool.name, missing, why, None))
            return
        has = pool.count - missing
        refusals: list[Refusal] = []
        for zone in pool.zones:
            names = self._free(pool, zone)
            quota = spec_quota(replace(pool.spec, zone=zone))
            place = backoff_key(zone, pool.type, pool.how)
            while missing > 0:
                refusal = self._refusal(place, zone, quota)
                name = None if refusal else next(names, None)
                if refusal is None and name is None:
                    refusal = Refusal(f"{zone} has a machine of the name {pool.spec.name} already")
                spec = replace(pool.spec, name=name or "", zone=zone)
                refusal = refusal or self.limits.refusal(spec)
                if refusal is not None:
                    refusals.append(refusal)
                    break
                if missing <= remains[zone]:  # their successors come when they are gone
                    missing = 0
                    break
                said = "".join(f"; {each.why}" for each in refusals)
                self.actions.append(Create(self.limits.take(spec), f"pool {pool.name} has {has} of {pool.count}{said}"))
                missing, has = missing - 1, has + 1
                self.under_way[place] += 1
                self.held[quota] += 1
        if missing:
            until = min((each.until for each in refusals if each.until is not None), default=None)
            why = "; ".join(dict.fromkeys(each.why for each in refusals))
            self.waits.append(Wait(pool.name, missing, why, until))

    def _free(self, pool: PoolSpec, zone: str) -> Iterator[str]:
        """Names for new machines of a pool."""
        taken = self.names[zone]
        if pool.spec.name:
            yield from {pool.spec.name} - taken
            return
        for name in free_names(find(pool.type).generation.name, zone, taken):
            taken.add(name)
            yield name

    def _refusal(self, at: str, zone: str, quota: QuotaKey) -> Refusal | None:
        """Why nothing is tried in a zone."""
        place = self.memory.places.get(at, ZoneBackoff())
        if zone in self.away:
            return Refusal(f"{zone} does not answer")
        if place.held is not None and self.held[quota] >= place.held:
            return Refusal(f"{zone}: {place.said}; more is tried after `tpuswarm up`")
        if self.now < place.not_before:
            return Refusal(f"{zone}: {place.said}", place.not_before)
        granted = self.granted[at]
        if place.failures and self.under_way[at] - granted >= (most := CREATES_PER_SUCCESS * granted or 1):
            return Refusal(f"{zone}: {place.said}; {most} at a time until one is not refused", self.grants.get(at))
        return None


def _slowness(type_: str) -> int:
    """How many times the usual time a slice may take to boot: the largest take longest."""
    try:
        hosts = find(type_).hosts
    except InputError:  # a type that the catalogue does not know
        return 1
    return 1 if hosts < 64 else 2 if hosts < 256 else 3
