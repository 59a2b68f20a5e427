"""Decide which machines to create, delete, stop and start.

A plan deletes a healthy machine only if the user no longer wants it, and never one without the fleet's id.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from tpuswarm.catalog import find
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.protocol import REMAINS, Machine, Spec
from tpuswarm.fleet.decide.actions import Action, Create, Delete, Plan, Start, Stop, Wait
from tpuswarm.fleet.decide.desired import Desired, PoolSpec
from tpuswarm.fleet.decide.fleet_state import (
    Observed,
    ZoneBackoff,
    backoff_key,
    machine_backoff_key,
    machine_key,
    spec_backoff_key,
)
from tpuswarm.fleet.decide.limits import Limits, Refusal, machine_quota, spec_quota
from tpuswarm.fleet.decide.money import DELETE_MARGIN_S, HOUR_S, QuotaKey, format_dollars, machine_price
from tpuswarm.fleet.decide.names import by_number, free_names
from tpuswarm.fleet.decide.region_quotas import count_hosts, host_count, spec_hosts
from tpuswarm.fleet.decide.settings import explain_outdated, plan_disks

BOOT_TIMEOUT_S = 1800.0
"""Twice this from 64 hosts, three times from 256."""
REPAIR_TIMEOUT_S = 1800.0
UNHEALTHY_GRACE_S = 900.0
QUEUE_TIMEOUT_S = 4 * HOUR_S
LONG_REPAIR_TIMEOUT_S = 4 * HOUR_S
"""For machines that are not spot, as such capacity may take days to come back, and for unhealthy machines that run a
job: a guest agent that does not answer says little about the job."""
DELETE_RETRY_S, DELETE_OVERDUE_S, REMAINS_RETRY_S = 120.0, 600.0, 2.0
"""An overdue deletion no longer holds up the successor."""
REFUSAL_WINDOW_S, REFUSAL_MARGIN = 45.0, 1.5
"""A request that is not refused within this time, or within REFUSAL_MARGIN times what the zone took for its last
refusal, has probably found capacity. Google refuses after seconds, or after half an hour in CREATING."""
CREATES_PER_SUCCESS = 10
"""After a failure, one machine is requested at a time; each that finds capacity allows this many more at once."""
MAX_REPLACEMENTS, MAX_FAILED_SETUPS, REPLACEMENT_WINDOW_S = 3, 2, 24 * HOUR_S
"""Replacements per zone and day: of unhealthy machines, and of machines that cannot be set up."""


def make_plan(desired: Desired, observed: Observed, now: float) -> Plan:
    """Return what to do at `now` (Unix seconds)."""
    if desired.down is not None:
        calls = observed.state.last_call
        deletable = _deletable(desired, observed)
        due = (m for m in deletable if now - calls.get(machine_key(m), -DELETE_OVERDUE_S) >= _delete_interval_s(m))
        return Plan(tuple(Delete(machine, desired.down) for machine in due))
    if why := _reason_to_end(desired, observed, now):
        return Plan((), end=why)
    return _Planner(desired, observed, now).plan()


def list_remaining(desired: Desired, observed: Observed) -> list[str]:
    """List what may still cost money: machines, open creations, and zones that do not answer."""
    state, listing = observed.state, observed.listing
    listed = {machine_key(machine) for machine in desired.own(listing.machines)}
    requested = {key for key in state.requests if key not in listed}
    unknown = {key for key, seen in state.seen.items() if seen.machine.zone in listing.unreachable}
    silent = (set(desired.zones) & listing.unreachable) - state.unused_zones
    unseen = {f"{zone}, which does not answer" for zone in silent}
    return sorted(listed | requested | unknown | unseen)


def _deletable(desired: Desired, observed: Observed) -> list[Machine]:
    """List the machines to delete now: the keeper's own machine last."""
    own = desired.own(observed.listing.machines)
    keepers = [machine for machine in own if machine.pool == desired.kept_on]
    only_keeper_left = {machine_key(machine) for machine in keepers}.issuperset(list_remaining(desired, observed))
    return own if only_keeper_left else [machine for machine in own if machine not in keepers]


def _reason_to_end(desired: Desired, observed: Observed, now: float) -> str | None:
    when, work, total = desired.down_when, observed.work, desired.budget.total
    if when and when.at is not None and now >= when.at:
        return "down_when: its date has come"
    if when and when.done and work.done:
        return "down_when: the work is done"
    if when and when.idle_s is not None and work.busy_at is not None and now - work.busy_at >= when.idle_s:
        return f"down_when: nothing has run for {when.idle_s / 60:g} min"
    if total is not None:
        deletion_cost = Limits(desired, observed, (), now).rate * DELETE_MARGIN_S / HOUR_S
        if observed.spent + deletion_cost >= total:
            return f"{format_dollars(observed.spent)} are spent, and the budget allows {format_dollars(total)}"
    return None


def _delete_interval_s(machine: Machine) -> float:
    if machine.said == REMAINS:
        return REMAINS_RETRY_S
    return DELETE_OVERDUE_S if machine.state == "deleting" else DELETE_RETRY_S


class _Planner:
    def __init__(self, desired: Desired, observed: Observed, now: float):
        self.desired, self.state, self.now = desired, observed.state, now
        self.busy, self.unusable = observed.busy, observed.work.unusable
        self.unreachable = observed.listing.unreachable
        self.actions: list[Action] = []
        self.waits: list[Wait] = []
        self.pools: dict[str, list[Machine]] = defaultdict(list)
        self.taken_names: dict[str, set[str]] = defaultdict(set)
        listed = set()
        for machine in observed.machines:
            listed.add(machine_key(machine))
            self.taken_names[machine.zone].add(machine.name)
            if machine.fleet == desired.fleet:
                self.pools[machine.pool or ""].append(machine)
        unlisted = {key: request.spec for key, request in self.state.requests.items() if key not in listed}
        self.unlisted = tuple(unlisted.values())
        for key in (*unlisted, *self.state.taken):
            zone, _, name = key.partition("/")
            self.taken_names[zone].add(name)
        self.limits = Limits(desired, observed, self.unlisted, now)
        self.quota_used: dict[QuotaKey, int] = defaultdict(int)
        self.creating: dict[str, int] = defaultdict(int)
        """Machines that are not ready yet, by backoff key."""
        alive = [
            machine
            for machines in self.pools.values()
            for machine in machines
            if machine.state not in ("dead", "deleting") and machine_key(machine) not in self.state.failed
        ]
        self.region_hosts = count_hosts(desired.pools, alive, self.unlisted)
        for machine in alive:
            self.quota_used[machine_quota(machine)] += 1
            self.creating[machine_backoff_key(machine)] += machine.state in ("creating", "waiting")
        for spec in self.unlisted:
            self.quota_used[spec_quota(spec)] += 1
            self.creating[spec_backoff_key(spec)] += 1
        self.succeeding: dict[str, int] = defaultdict(int)
        """Requests that have probably found capacity, by backoff key."""
        self.next_success: dict[str, float] = {}
        """When the next request will probably have found some."""
        for request in self.state.requests.values():
            key = spec_backoff_key(request.spec)
            refused_after_s = self.state.backoffs.get(key, ZoneBackoff()).refused_after_s
            window_end = request.at + max(REFUSAL_WINDOW_S, REFUSAL_MARGIN * refused_after_s)
            self.succeeding[key] += now >= window_end
            if now < window_end:
                self.next_success[key] = min(window_end, self.next_success.get(key, window_end))

    def plan(self) -> Plan:
        names = {pool.name for pool in self.desired.pools}
        for name, machines in self.pools.items():
            if name not in names:
                for machine in machines:
                    self._delete(machine, f"the fleet has no pool {name} now")
        for pool in self.desired.pools:
            missing, leftovers = self._plan_existing(pool)
            if missing > 0:
                self._plan_missing(pool, missing, leftovers)
        return Plan(tuple(self.actions), tuple(self.waits))

    # Existing machines.

    def _plan_existing(self, pool: PoolSpec) -> tuple[int, Counter[str]]:
        """Return how many machines are missing, and how many deleted ones still hold up successors, by zone."""
        alive: list[Machine] = []
        going = 0
        leftovers = Counter[str]()
        for machine in self.pools.get(pool.name, ()):
            if not self._delete_lost(pool, machine):
                alive.append(machine)
            elif self._has_ended(machine):
                leftovers[machine.zone] += self._holds_up_successor(machine)
            else:
                going += 1
        visible = [machine for machine in alive if machine.zone not in self.unreachable]
        if (surplus := len(visible) - pool.count) > 0:
            why = f"pool {pool.name} needs {pool.count:,} machines and has {len(visible):,}"
            for machine in sorted(visible, key=self._keep_priority)[:surplus]:
                self._delete(machine, why)
                alive.remove(machine)
        for machine in alive:
            self._stop_or_start(pool, machine)
        self.actions += [grow for grow in plan_disks(pool, alive) if self._may_call(grow.machine)]
        if outdated := explain_outdated(pool, alive):
            self.waits.append(outdated)
        if unpaid := [machine for machine in alive if self.limits.is_unpaid(machine)]:
            rate = format_dollars(sum(machine_price(machine) or 0.0 for machine in unpaid))
            why = f"no grant covers {len(unpaid):,} of its machines, which cost {rate} an hour: "
            why += "`tpuswarm up --paid` allows it, `tpuswarm down NAME` deletes one"
            self.waits.append(Wait(pool.name, 0, why, None))
        names = {machine.name for machine in alive}
        gone = [name for name, of in self.desired.paused.items() if of == pool.name and name not in names]
        if gone:
            why = f"{', '.join(gone)} was paused and no longer exists; `tpuswarm up` replaces it"
            self.waits.append(Wait(pool.name, len(gone), why, None))
        unlisted = sum(spec.pool == pool.name for spec in self.unlisted)
        return pool.count - len(alive) - going - len(gone) - unlisted, leftovers

    def _keep_priority(self, machine: Machine) -> tuple[bool, bool, bool, float, tuple[str, int]]:
        """Sort key: machines that are not ready go first, then idle, then unhealthy ones, then the youngest."""
        stem, number = by_number(machine.name)
        is_busy = machine.name in self.busy
        return machine.state == "ready", is_busy, machine.healthy is not False, -machine.created, (stem, -number)

    def _has_ended(self, machine: Machine) -> bool:
        """Whether a machine being deleted runs no longer; it may still hold its name and quota."""
        key = machine_key(machine)
        seen = self.state.seen.get(key)
        return machine.state == "dead" or key in self.state.failed or (seen is not None and seen.dead)

    def _holds_up_successor(self, machine: Machine) -> bool:
        key = machine_key(machine)
        began = self.state.deleting.get(key, self._since(key) if machine.zone in self.unreachable else self.now)
        return machine.state == "deleting" or self.now - began < DELETE_OVERDUE_S

    def _delete_lost(self, pool: PoolSpec, machine: Machine) -> bool:
        """Delete a machine that is lost, failed or unwanted; return whether it is."""
        key = machine_key(machine)
        if machine.state == "dead":
            said = "took it away" if machine.spot else "ended it"
            self._delete(machine, f"the cloud {said} ({machine.why or machine.said}); its remains are deleted")
        elif key in self.state.failed:
            self._delete(machine, f"its creation failed: {self.state.failed[key]}")
        elif machine.state == "deleting":
            if self.now - self._since(key) >= DELETE_OVERDUE_S:
                self._delete(machine, f"its deletion has taken more than {DELETE_OVERDUE_S / 60:.0f} min")
        elif key in self.state.deleting:
            self._delete(machine, "it still exists after its deletion")
        elif self.desired.dropped.get(machine.name) in self._creation_times(machine):
            self._delete(machine, "requested by `tpuswarm down`")
        elif self.limits.has_expired(machine):
            self._delete(machine, f"the grant of {machine.type} in {machine.zone} has expired")
        elif late := self._reason_late(pool, machine):
            pause_s = (pool.wait_s or QUEUE_TIMEOUT_S) if machine.state == "waiting" else 0.0
            self._delete(machine, late, "late", pause_s)
        elif self._is_unhealthy(machine) and self._may_replace(pool, machine, self._health(machine), MAX_REPLACEMENTS):
            minutes = self._health_timeout_s(machine) / 60
            why = f"it was not healthy for more than {minutes:.0f} min: {machine.why or machine.said}"
            self._delete(machine, why, "bad")
        elif self._is_unusable(machine) and self._may_replace(pool, machine, self._trouble(machine), MAX_FAILED_SETUPS):
            why = f"it could not be set up, though others could: {self.unusable[machine.name][1]}"
            self._delete(machine, why, "bad")
        else:
            return False
        return True

    def _creation_times(self, machine: Machine) -> tuple[float, float]:
        """The creation of the machine, and of the queued request behind it."""
        seen = self.state.seen.get(machine_key(machine))
        return machine.created, machine.created if seen is None else seen.born

    def _since(self, key: str) -> float:
        seen = self.state.seen.get(key)
        return self.now if seen is None else seen.since

    def _reason_late(self, pool: PoolSpec, machine: Machine) -> str | None:
        elapsed_s = self.now - self._since(machine_key(machine))
        if machine.state in ("creating", "starting"):
            timeout_s = BOOT_TIMEOUT_S * _boot_factor(machine.type)
            if elapsed_s > timeout_s:
                return f"it was not ready after {timeout_s / 60:.0f} min"
        if machine.state in ("repairing", "stopping"):
            timeout_s = REPAIR_TIMEOUT_S if machine.spot else LONG_REPAIR_TIMEOUT_S
            if elapsed_s > timeout_s:
                return f"it was {machine.said} for more than {timeout_s / 60:.0f} min"
        if machine.state == "waiting":
            timeout_s = QUEUE_TIMEOUT_S if pool.wait_s is None else pool.wait_s
            waits_forever = pool.wait_s is None and machine.zone == pool.zones[-1]
            if elapsed_s > timeout_s and not waits_forever:
                return f"it waited in the queue of {machine.zone} for more than {timeout_s / HOUR_S:g} h"
        return None

    def _health_timeout_s(self, machine: Machine) -> float:
        return LONG_REPAIR_TIMEOUT_S if machine.name in self.busy else UNHEALTHY_GRACE_S

    def _is_unhealthy(self, machine: Machine) -> bool:
        seen = self.state.seen.get(machine_key(machine))
        if machine.state != "ready" or machine.healthy is not False or seen is None or seen.unhealthy_since is None:
            return False
        return self.now - seen.unhealthy_since > self._health_timeout_s(machine)

    def _health(self, machine: Machine) -> str:
        return f"is not healthy ({machine.why or machine.said})"

    def _is_unusable(self, machine: Machine) -> bool:
        created, _ = self.unusable.get(machine.name, (None, ""))
        return machine.state == "ready" and machine.name not in self.busy and created == machine.created

    def _trouble(self, machine: Machine) -> str:
        return f"cannot be set up ({self.unusable[machine.name][1]})"

    def _may_replace(self, pool: PoolSpec, machine: Machine, trouble: str, limit: int) -> bool:
        """Whether a bad machine may be replaced; if not, tell the user why it stays."""
        if not machine.spot:
            why = f"{machine.name} {trouble} and stays because it is not spot"
            way_out = f"`tpuswarm down {machine.name}` and `tpuswarm up` replace it"
            self.waits.append(Wait(pool.name, 0, f"{why}: {way_out}", None))
            return False
        backoff = self.state.backoffs.get(machine_backoff_key(machine), ZoneBackoff())
        if sum(self.now - at < REPLACEMENT_WINDOW_S for at in backoff.replaced) < limit:
            return True
        why = f"{machine.name} {trouble} and stays: {limit} machines of {machine.zone} were replaced within a day"
        self.waits.append(Wait(pool.name, 0, why, None))
        return False

    def _stop_or_start(self, pool: PoolSpec, machine: Machine) -> None:
        if not self._may_call(machine):
            return
        paused = machine.name in self.desired.paused
        if paused and machine.state == "ready":
            self.actions.append(Stop(machine, "it is paused"))
        elif not paused and machine.state == "stopped":
            self.actions.append(Start(machine, f"pool {pool.name} needs it, and it is stopped"))

    def _may_call(self, machine: Machine) -> bool:
        """Whether the zone answers, and no change of the machine was requested just now."""
        last_call = self.state.last_call.get(machine_key(machine), -DELETE_RETRY_S)
        return machine.zone not in self.unreachable and self.now - last_call >= DELETE_RETRY_S

    def _delete(
        self, machine: Machine, why: str, blame: Literal["late", "bad"] | None = None, pause_s: float = 0.0
    ) -> None:
        """Plan a deletion, unless it was requested recently or the zone does not answer."""
        last_call = self.state.last_call.get(machine_key(machine), -DELETE_OVERDUE_S)
        if machine.zone not in self.unreachable and self.now - last_call >= _delete_interval_s(machine):
            self.actions.append(Delete(machine, why, blame, pause_s))

    # Missing machines.

    def _plan_missing(self, pool: PoolSpec, missing: int, leftovers: Counter[str]) -> None:
        if why := self.state.stopped.get(pool.name):
            self.waits.append(Wait(pool.name, missing, f"{why}; `tpuswarm up` tries again", None))
            return
        if unseen := sorted(set(self.desired.zones) & self.unreachable - self.state.answered - self.state.unused_zones):
            why = f"{unseen[0]} does not answer, so the fleet's machines there are unknown"
            self.waits.append(Wait(pool.name, missing, why, None))
            return
        has = pool.count - missing
        refusals: list[Refusal] = []
        for zone in pool.zones:
            names = self._free_names(pool, zone)
            quota = spec_quota(replace(pool.spec, zone=zone))
            key = backoff_key(zone, pool.type, pool.how, pool.spec.api)
            while missing > 0:
                refusal = self._refuse_zone(key, zone, quota)
                name = None if refusal else next(names, None)
                if refusal is None and name is None:
                    refusal = Refusal(f"{zone} has a machine named {pool.spec.name} already")
                spec = replace(pool.spec, name=name or "", zone=zone)
                refusal = refusal or self._refuse_region(spec) or self.limits.refusal(spec)
                if refusal is not None:
                    refusals.append(refusal)
                    break
                if missing <= leftovers[zone]:  # the successors come once these are gone
                    missing = 0
                    break
                detours = "".join(f"; {refusal.why}" for refusal in refusals)
                why = f"pool {pool.name} has {has} of {pool.count}{detours}"
                self.actions.append(Create(self.limits.reserve(spec), why))
                missing, has = missing - 1, has + 1
                self.creating[key] += 1
                self.quota_used[quota] += 1
                self.region_hosts.update(spec_hosts(spec))
        if missing:
            until = min((refusal.until for refusal in refusals if refusal.until is not None), default=None)
            why = "; ".join(dict.fromkeys(refusal.why for refusal in refusals))
            self.waits.append(Wait(pool.name, missing, why, until))

    def _free_names(self, pool: PoolSpec, zone: str) -> Iterator[str]:
        taken = self.taken_names[zone]
        if pool.spec.name:
            yield from {pool.spec.name} - taken
            return
        for name in free_names(find(pool.type).generation.name, zone, taken):
            taken.add(name)
            yield name

    def _refuse_zone(self, key: str, zone: str, quota: QuotaKey) -> Refusal | None:
        """Return why nothing more is created in a zone now; None if it may be."""
        backoff = self.state.backoffs.get(key, ZoneBackoff())
        if zone in self.unreachable:
            return Refusal(f"{zone} does not answer")
        if backoff.quota_limit is not None and self.quota_used[quota] >= backoff.quota_limit:
            return Refusal(f"{zone}: {backoff.why}; `tpuswarm up` tries again")
        if self.now < backoff.not_before:
            return Refusal(f"{zone}: {backoff.why}", backoff.not_before)
        succeeding = self.succeeding[key]
        at_once = CREATES_PER_SUCCESS * succeeding or 1
        if backoff.failures and self.creating[key] - succeeding >= at_once:
            why = f"{zone}: {backoff.why}; {at_once} at a time until one succeeds"
            return Refusal(why, self.next_success.get(key))
        return None

    def _refuse_region(self, spec: Spec) -> Refusal | None:
        """Return which quota of the region has no room for the machine; None if all may have."""
        for key, hosts in spec_hosts(spec).items():
            limit = self.state.region_limits.get(key)
            if limit is not None and self.region_hosts[key] + hosts > limit.hosts:
                return Refusal(f"{region_of(spec.zone)}: {limit.why}; `tpuswarm up` tries again")
        return None


def _boot_factor(type_: str) -> int:
    hosts = host_count(type_)
    return 1 if hosts < 64 else 2 if hosts < 256 else 3
