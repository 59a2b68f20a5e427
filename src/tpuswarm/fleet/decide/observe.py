"""Update the fleet's state from a listing and from the cloud's answers, and report what happened."""

from collections.abc import Iterable
from dataclasses import replace

from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import (
    CloudError,
    Denied,
    Invalid,
    NoCapacity,
    NoQuota,
    NotFound,
    NotSignedIn,
    Taken,
    Unreachable,
)
from tpuswarm.cloud.protocol import REGION_QUOTAS, Listing, Machine, Spec, TpuSpec
from tpuswarm.fleet.decide.actions import ActionResult, CloudAnswer, Create, CreateResult, Delete, Event, Start, Stop
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import (
    CreateRequest,
    FleetState,
    RegionLimit,
    SeenMachine,
    ZoneBackoff,
    machine_backoff_key,
    machine_key,
    spec_backoff_key,
    spec_key,
)
from tpuswarm.fleet.decide.limits import machine_quota, spec_quota
from tpuswarm.fleet.decide.region_quotas import count_hosts, region_key, spec_hosts

UNLISTED_TIMEOUT_S, OPERATION_TIMEOUT_S = 300.0, 3600.0
"""A creation has failed if no listing shows the machine after UNLISTED_TIMEOUT_S; after OPERATION_TIMEOUT_S if its
operation still runs."""
MIN_LIFETIME_S = 120.0
"""A machine taken away sooner than this counts as a failed creation."""
MAX_LOSSES, LOSS_WINDOW_S = 3, 180.0
"""A zone that takes away so many machines within this time backs off."""
ENDED_STATES = ("PREEMPTED", "TERMINATED")
"""Google's states of machines that ran once."""
TAKEN_NAME_RETRY_S = 3600.0
"""When to retry a name that exists according to the cloud, though no listing shows it."""


def observe(
    state: FleetState, desired: Desired, listing: Listing, answers: Iterable[CloudAnswer], now: float
) -> tuple[FleetState, tuple[Event, ...]]:
    """Return the state at `now` (Unix seconds) and the new events. The answers came before the listing."""
    observer = _Observer(state, desired, listing, now)
    for answer in answers:
        if isinstance(answer, ActionResult):
            observer.add_action_result(answer)
        else:
            observer.add_create_result(answer)
    if state.revision != desired.revision:
        observer.forgive_failures()  # the user has asked again
    observer.add_listing()
    return observer.result(), tuple(observer.events)


class _Observer:
    def __init__(self, state: FleetState, desired: Desired, listing: Listing, now: float):
        self.now, self.desired, self.listing = now, desired, listing
        self.seen, self.requests = dict(state.seen), dict(state.requests)
        self.deleting, self.last_call, self.failed = dict(state.deleting), dict(state.last_call), dict(state.failed)
        self.taken = {key: at for key, at in state.taken.items() if now - at < TAKEN_NAME_RETRY_S}
        self.backoffs, self.stopped = dict(state.backoffs), dict(state.stopped)
        self.region_limits = dict(state.region_limits)
        self.answered = state.answered | (frozenset(desired.zones) - listing.unreachable)
        self.own = {machine_key(machine): machine for machine in desired.own(listing.machines)}
        self.events: list[Event] = []

    def result(self) -> FleetState:
        return FleetState(
            self.seen, self.requests, self.deleting, self.last_call, self.failed, self.taken, self.backoffs,
            self.region_limits, self.stopped, self.answered, self.desired.revision,
        )  # fmt: skip

    def _report(self, subject: Machine | Spec, kind: str, text: str) -> None:
        self.events.append(Event(self.now, subject.pool or "", subject.name, kind, text))

    def forgive_failures(self) -> None:
        self.stopped.clear()
        self.region_limits.clear()
        self.last_call = {key: at for key, at in self.last_call.items() if key in self.deleting}
        self.backoffs = {
            key: replace(backoff, quota_limit=None, not_before=0.0, replaced=())
            for key, backoff in self.backoffs.items()
        }

    # Answers.

    def add_action_result(self, result: ActionResult) -> None:
        action, error = result.action, result.error
        if isinstance(action, Create):
            self._add_creation(action, result)
            return
        machine, key = action.machine, machine_key(action.machine)
        self.last_call[key] = self.now
        if isinstance(action, Delete):
            if error is None or isinstance(error, NotFound):
                if key not in self.deleting and action.blame:
                    self._blame_zone(machine, action)
                self.deleting.setdefault(key, self.now)
                self._report(machine, "deleting", action.why)
            elif not isinstance(error, Unreachable):
                self._report(machine, "refused", f"it cannot be deleted: {error.with_code}")
            return
        verb = "stopping" if isinstance(action, Stop) else "starting" if isinstance(action, Start) else "growing"
        if error is None:
            self._report(machine, verb, action.why)
        elif not isinstance(error, Unreachable):
            self._report(machine, "refused", f"{verb} it failed: {error.with_code}")
        if isinstance(action, Start) and isinstance(error, NoCapacity | NoQuota):
            self._back_off(machine_backoff_key(machine), str(error))

    def _add_creation(self, action: Create, result: ActionResult) -> None:
        spec, key, error = action.spec, spec_key(action.spec), result.error
        if error is None:
            self.requests[key] = CreateRequest(spec, self.now, result.operation)
            self._report(spec, "asked", action.why)
        elif isinstance(error, Unreachable):  # the creation may have begun
            self.requests[key] = CreateRequest(spec, self.now, result.operation)
            self._back_off(spec_backoff_key(spec), str(error))
            self._report(spec, "refused", f"the cloud did not answer: {error}")
        else:
            self._add_refusal(spec, key, error)

    def add_create_result(self, result: CreateResult) -> None:
        request = self.requests.get(result.key)
        if request is None:
            return
        if result.error is None:
            self.requests[result.key] = replace(request, operation=None)
            return
        del self.requests[result.key]
        self.failed[result.key] = str(result.error)
        self._add_refusal(request.spec, result.key, result.error)
        if isinstance(result.error, NoCapacity):
            key = spec_backoff_key(request.spec)
            self.backoffs[key] = replace(self.backoffs[key], refused_after_s=self.now - request.at)

    def _add_refusal(self, spec: Spec, key: str, error: CloudError) -> None:
        why, backoff_key = str(error), spec_backoff_key(spec)
        self._report(spec, "refused", error.with_code)
        if isinstance(error, NoQuota) and not self._quota_may_be_freed(spec, error.limit):
            if error.limit in REGION_QUOTAS:
                self._limit_region(spec, error.limit, key, why)
            else:
                backoff = self.backoffs.get(backoff_key, ZoneBackoff())
                self.backoffs[backoff_key] = replace(backoff, quota_limit=self._quota_used(spec, key), why=why)
        elif isinstance(error, Taken):
            self.taken[key] = self.now
        elif isinstance(error, Denied) and not isinstance(error, NotSignedIn) and self._has_other_zones(spec):
            self.backoffs[backoff_key] = replace(self.backoffs.get(backoff_key, ZoneBackoff()), quota_limit=0, why=why)
        elif isinstance(error, Denied | Invalid) and not isinstance(error, NotSignedIn):
            self.stopped[spec.pool] = why
        elif isinstance(error, NoCapacity):  # the cloud's message is long, and the event has it
            self._back_off(backoff_key, f"no capacity for {spec.type} now")
        else:
            self._back_off(backoff_key, why)

    def _has_other_zones(self, spec: Spec) -> bool:
        return any(pool.name == spec.pool and len(pool.zones) > 1 for pool in self.desired.pools)

    def _back_off(self, key: str, why: str, pause_s: float = 0.0) -> None:
        backoff = self.backoffs.get(key, ZoneBackoff())
        self.backoffs[key] = backoff.after_failure(f"{self.desired.fleet}/{key}", self.now, why, pause_s)

    def _blame_zone(self, machine: Machine, action: Delete) -> None:
        key = machine_backoff_key(machine)
        self._back_off(key, action.why, action.pause_s)
        if action.blame == "bad":
            backoff = self.backoffs[key]
            self.backoffs[key] = replace(backoff, replaced=(*backoff.replaced, self.now))

    def _same_quota(self, spec: Spec) -> list[Machine]:
        quota = spec_quota(spec)
        in_zone = (machine for machine in self.own.values() if machine.zone == spec.zone)
        return [machine for machine in in_zone if machine_quota(machine) == quota]

    def _quota_may_be_freed(self, spec: Spec, limit: str | None) -> bool:
        """Whether another machine of ours that is being deleted may still hold the quota."""
        region = region_of(spec.zone)
        in_region = (machine for machine in self.own.values() if region_of(machine.zone) == region)
        return any(
            machine.state in ("dead", "deleting") or machine_key(machine) in {**self.deleting, **self.failed}
            for machine in (in_region if limit in REGION_QUOTAS else self._same_quota(spec))
            if machine_key(machine) != spec_key(spec)
        )

    def _limit_region(self, spec: Spec, quota: str, key: str, why: str) -> None:
        """Remember that the quota of the region has no room for this machine beside the others."""
        others = [machine for other, machine in self.own.items() if other != key]
        unlisted = [it.spec for other, it in self.requests.items() if other != key and other not in self.own]
        counts = count_hosts(self.desired.pools, others, unlisted)
        quota_key = region_key(spec.zone, quota)
        self.region_limits[quota_key] = RegionLimit(counts[quota_key] + spec_hosts(spec)[quota_key] - 1, why)

    def _quota_used(self, spec: Spec, key: str) -> int:
        listed = {machine_key(machine) for machine in self._same_quota(spec)}
        backoff_key = spec_backoff_key(spec)
        requested = {other for other, it in self.requests.items() if spec_backoff_key(it.spec) == backoff_key}
        return len((listed | requested) - {key})

    # The listing.

    def add_listing(self) -> None:
        before = self.seen
        self.seen = {}
        for key, machine in self.own.items():
            self.seen[key] = self._see(before.get(key), machine, key)
        for key, seen in before.items():
            if key not in self.own:
                if seen.machine.zone in self.listing.unreachable:
                    self.seen[key] = seen  # unknown, not gone
                else:
                    self._miss(seen, key)
        for key, request in list(self.requests.items()):
            is_lost = key not in self.own and request.spec.zone not in self.listing.unreachable
            timeout_s = OPERATION_TIMEOUT_S if request.operation else UNLISTED_TIMEOUT_S
            if is_lost and self.now - request.at > timeout_s:
                del self.requests[key]
                self._back_off(spec_backoff_key(request.spec), "a creation came to nothing")
                self._report(request.spec, "refused", "the cloud accepted the creation but never listed the machine")
        for entries in (self.deleting, self.last_call, self.failed):
            for key in [key for key in entries if key not in self.seen]:
                del entries[key]

    def _see(self, seen: SeenMachine | None, machine: Machine, key: str) -> SeenMachine:
        is_new = seen is None or _is_another(seen.machine, machine)
        request = self.requests.get(key)
        if seen is None or is_new:
            seen = SeenMachine(machine, self.now, born=machine.created)
            self.deleting.pop(key, None)
            self.failed.pop(key, None)
        same_state = seen.machine.state == machine.state
        ready_at, unhealthy_since = seen.ready_at, None
        created_before = 0 < machine.created <= self.now
        if is_new and not request and machine.said in ENDED_STATES and created_before:
            ready_at = machine.created  # it ran unobserved
        if machine.state == "ready":
            self.requests.pop(key, None)
            self.failed.pop(key, None)
            if ready_at is None and is_new and not request:  # it was ready before the first observation
                ready_at = machine.created if created_before else self.now
            elif ready_at is None:
                ready_at = self.now
                self._add_ready(machine, request.at if request else self.now)
            elif not same_state:
                was = f"after {_duration(self.now - seen.since)} of {seen.machine.said}"
                self._report(machine, "ready", f"it is ready again, {was}")
            if seen.unhealthy_since is not None and machine.healthy is not False:
                self._report(
                    machine, "healthy", f"it is healthy again, after {_duration(self.now - seen.unhealthy_since)}"
                )
            if machine.healthy is False:
                unhealthy_since = self.now if seen.unhealthy_since is None else seen.unhealthy_since
                if seen.unhealthy_since is None:
                    self._report(machine, "unhealthy", machine.why or "the cloud calls it unhealthy")
        elif not same_state:
            self._report_state(seen, machine)
        if machine.state == "dead" and (seen.machine.state != "dead" or seen.since == self.now):
            self.requests.pop(key, None)
            self._add_death(replace(seen, ready_at=ready_at), machine, machine.why or machine.said)
        old = seen.machine
        is_bare = old.metadata is None and old.error is None
        is_same = is_bare and old == machine and old.runtime_env == machine.runtime_env
        stored = old if is_same else replace(machine, error=None, metadata=None)  # most are the same: a copy costs more
        is_dead = machine.state == "dead" or (seen.dead and machine.state == "deleting")
        since = seen.since if same_state else self.now
        return SeenMachine(stored, since, ready_at, unhealthy_since, is_dead, seen.born or machine.created)

    def _add_ready(self, machine: Machine, requested_at: float) -> None:
        key = machine_backoff_key(machine)
        if (backoff := self.backoffs.get(key)) and backoff.failures and requested_at > backoff.failed_at:
            self.backoffs[key] = replace(backoff, failures=0, not_before=0.0)
        elapsed_s = self.now - machine.created
        after = f" after {_duration(elapsed_s)}" if 0 < elapsed_s < 86_400 else ""
        self._report(machine, "ready", f"it is ready{after}")

    def _report_state(self, seen: SeenMachine, machine: Machine) -> None:
        if machine.state in ("repairing", "stopped", "starting"):
            why = f": {machine.why}" if machine.why else ""
            self._report(machine, machine.state, f"the cloud reports {machine.said}{why}")
        elif machine.state == "deleting" and not self._is_wanted_gone(machine):
            kind = "preempted" if machine.spot and seen.ready_at is not None else "lost"
            self._report(machine, kind, "somebody else deletes it")

    def _add_death(self, seen: SeenMachine, machine: Machine, why: str) -> None:
        key = machine_key(machine)
        if self._is_wanted_gone(machine) or key in self.failed:
            return
        lifetime_s = None if seen.ready_at is None else self.now - seen.ready_at
        backoff_key = machine_backoff_key(machine)
        if lifetime_s is None and machine.error is not None:
            how = machine.how
            spec = TpuSpec(machine.name, machine.zone, machine.type, how, self.desired.fleet, machine.pool or "", "")
            self._add_refusal(spec, key, machine.error)
            return
        if lifetime_s is None:
            self._back_off(backoff_key, why)
            self._report(machine, "refused", f"it ended before it was ready: {why}")
            return
        if lifetime_s < MIN_LIFETIME_S:
            self._back_off(backoff_key, f"taken away after {lifetime_s:.0f} s")
        elif machine.spot:
            self._add_loss(backoff_key)
        kind = "preempted" if machine.spot else "lost"
        self._report(machine, kind, f"the cloud took it away after {_duration(lifetime_s)}: {why}")

    def _add_loss(self, key: str) -> None:
        backoff = self.backoffs.get(key, ZoneBackoff())
        lost = tuple(at for at in (*backoff.lost, self.now) if self.now - at < LOSS_WINDOW_S)[-MAX_LOSSES:]
        self.backoffs[key] = replace(backoff, lost=lost)
        if len(lost) == MAX_LOSSES:
            self._back_off(key, f"{MAX_LOSSES} machines or more were taken away within {LOSS_WINDOW_S / 60:.0f} min")

    def _miss(self, seen: SeenMachine, key: str) -> None:
        machine = seen.machine
        self.requests.pop(key, None)
        if machine.state not in ("dead", "deleting"):
            self._add_death(seen, machine, "the cloud does not list it now")
        if self._is_wanted_gone(machine):
            self._report(machine, "gone", "it is deleted")

    def _is_wanted_gone(self, machine: Machine) -> bool:
        # When everything comes down, another keeper may have deleted it.
        return machine_key(machine) in self.deleting or self.desired.down is not None


def _is_another(old: Machine, new: Machine) -> bool:
    """Whether a new machine has taken the name of an old one.

    A queued request and its node are the same machine with different creation times; a node may have none at first.
    """
    if old.created in (0.0, new.created):
        return False
    return new.request is None or new.request != old.request or old.state not in ("waiting", "creating")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:.1f} days"
