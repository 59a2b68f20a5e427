"""What a look and the answers to what was asked add to a memory, and what happened according to them."""

from collections.abc import Iterable
from dataclasses import replace

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
from tpuswarm.cloud.protocol import Listing, Machine, Spec, TpuSpec
from tpuswarm.fleet.decide.actions import ActionResult, CloudAnswer, Create, CreateResult, Delete, Event, Start, Stop
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.limits import machine_quota, spec_quota
from tpuswarm.fleet.decide.state import (
    CreateRequest,
    FleetState,
    SeenMachine,
    ZoneBackoff,
    backoff_key,
    machine_key,
    spec_backoff_key,
    spec_key,
)

LISTED_WITHIN_S, OPERATION_TIMEOUT_S = 300.0, 3600.0
"""Seconds after which a creation that is in no list has come to nothing; the second while its operation runs."""
MIN_LIFETIME_S = 120.0
"""Seconds: what is taken away sooner after it was ready was never really to be had."""
MAX_LOSSES, LOSS_WINDOW_S = 3, 180.0
"""Machines that a zone takes away within so many seconds: it has less room, and others are asked first."""
ENDED_STATES = ("PREEMPTED", "TERMINATED")
"""How the cloud calls what was there once."""
TAKEN_NAME_RETRY_S = 3600.0
"""Seconds for which a name is not tried again that is taken by what no list shows."""


def observe(
    memory: FleetState, desired: Desired, listing: Listing, answers: Iterable[CloudAnswer], now: float
) -> tuple[FleetState, tuple[Event, ...]]:
    """The memory after a look at `now` (Unix seconds) and after these answers, which came before it; what happened."""
    change = _Observer(memory, desired, listing, now)
    for answer in answers:
        if isinstance(answer, ActionResult):
            change.called(answer)
        else:
            change.ended(answer)
    if memory.revision != desired.revision:  # somebody has asked again, after all that was answered
        change.forgive()
    change.look()
    return change.result(), tuple(change.events)


class _Observer:
    """A memory while it changes."""

    def __init__(self, memory: FleetState, desired: Desired, listing: Listing, now: float):
        self.now, self.desired, self.listing = now, desired, listing
        self.seen, self.asked = dict(memory.seen), dict(memory.asked)
        self.deleting, self.sent, self.failed = dict(memory.deleting), dict(memory.sent), dict(memory.failed)
        self.taken = {key: at for key, at in memory.taken.items() if now - at < TAKEN_NAME_RETRY_S}
        self.places, self.stopped = dict(memory.places), dict(memory.stopped)
        self.looked = memory.looked | (frozenset(desired.zones) - listing.unreachable)
        self.mine = {machine_key(each): each for each in listing.machines if each.fleet == desired.fleet}
        self.events: list[Event] = []

    def result(self) -> FleetState:
        return FleetState(
            self.seen, self.asked, self.deleting, self.sent, self.failed, self.taken, self.places, self.stopped,
            self.looked, self.desired.revision,
        )  # fmt: skip

    def say(self, pool: str | None, machine: str, kind: str, text: str) -> None:
        self.events.append(Event(self.now, pool or "", machine, kind, text))

    def forgive(self) -> None:
        self.stopped.clear()
        self.places = {key: replace(each, held=None, not_before=0.0, bad=()) for key, each in self.places.items()}

    # What came of asking.

    def called(self, answer: ActionResult) -> None:
        action, error = answer.action, answer.error
        if isinstance(action, Create):
            self._created(action, answer)
            return
        machine, key = action.machine, machine_key(action.machine)
        self.sent[key] = self.now
        if isinstance(action, Delete):
            if error is None or isinstance(error, NotFound):
                if key not in self.deleting and action.blame:
                    self._blame(machine, action)
                self.deleting.setdefault(key, self.now)
                self.say(machine.pool, machine.name, "deleting", action.why)
            elif not isinstance(error, Unreachable):
                self.say(machine.pool, machine.name, "refused", f"it cannot be deleted: {error}")
        else:
            verb = "stopping" if isinstance(action, Stop) else "starting"
            if error is None:
                self.say(machine.pool, machine.name, verb, action.why)
            elif not isinstance(error, Unreachable):
                self.say(machine.pool, machine.name, "refused", f"{verb} it failed: {error}")
            if isinstance(action, Start) and isinstance(error, NoCapacity | NoQuota):
                self._fail(backoff_key(machine.zone, machine.type, machine.how), str(error))

    def _created(self, action: Create, answer: ActionResult) -> None:
        spec, key, error = action.spec, spec_key(action.spec), answer.error
        if error is None or isinstance(error, Unreachable):  # without an answer it may have begun
            self.asked[key] = CreateRequest(spec, self.now, answer.operation)
            if error is None:
                self.say(spec.pool, spec.name, "asked", action.why)
            else:
                self._fail(spec_backoff_key(spec), str(error))
                self.say(spec.pool, spec.name, "refused", f"the cloud did not answer: {error}")
            return
        self._refused(spec, key, error)

    def ended(self, answer: CreateResult) -> None:
        asked = self.asked.get(answer.key)
        if asked is None:
            return
        if answer.error is None:
            self.asked[answer.key] = replace(asked, operation=None)
            return
        del self.asked[answer.key]
        self.failed[answer.key] = str(answer.error)  # until it is in no list any more
        self._refused(asked.spec, answer.key, answer.error)

    def _refused(self, spec: Spec, key: str, error: CloudError) -> None:
        """A creation has failed: what that means for its zone, or its pool."""
        said, place = str(error), spec_backoff_key(spec)
        self.say(spec.pool, spec.name, "refused", said)
        if isinstance(error, NoQuota) and not self._remains(spec):
            self.places[place] = replace(self.places.get(place, ZoneBackoff()), held=self._held(spec, key), said=said)
        elif isinstance(error, Taken):
            self.taken[key] = self.now
        elif isinstance(error, Denied | Invalid) and not isinstance(error, NotSignedIn):
            self.stopped[spec.pool] = said
        elif isinstance(error, NoCapacity):  # the cloud's own words are long, and were said
            self._fail(place, f"no {spec.type} to be had now")
        else:
            self._fail(place, said)

    def _fail(self, place: str, said: str, pause: float = 0.0) -> None:
        self.places[place] = self.places.get(place, ZoneBackoff()).failed(
            f"{self.desired.fleet}/{place}", self.now, said, pause
        )

    def _blame(self, machine: Machine, action: Delete) -> None:
        place = backoff_key(machine.zone, machine.type, machine.how)
        self._fail(place, action.why, action.pause)
        if action.blame == "bad":
            before = self.places[place]
            self.places[place] = replace(before, bad=(*before.bad, self.now))

    def _alike(self, spec: Spec) -> list[Machine]:
        """Machines of ours that draw on the same quota."""
        wanted = spec_quota(spec)
        return [each for each in self.mine.values() if each.zone == spec.zone and machine_quota(each) == wanted]

    def _remains(self, spec: Spec) -> bool:
        """Whether something of ours may still hold quota there that is on its way out."""
        return any(
            each.state in ("dead", "deleting") or machine_key(each) in {**self.deleting, **self.failed}
            for each in self._alike(spec)
            if machine_key(each) != spec_key(spec)
        )

    def _held(self, spec: Spec, key: str) -> int:
        """How many machines the quota allowed, as far as this refusal tells."""
        listed = {machine_key(each) for each in self._alike(spec)}
        place = spec_backoff_key(spec)
        asked = {other for other, each in self.asked.items() if spec_backoff_key(each.spec) == place}
        return len((listed | asked) - {key})

    # What a look shows.

    def look(self) -> None:
        before = self.seen
        self.seen = {}
        for key, machine in self.mine.items():
            self.seen[key] = self._machine(before.get(key), machine, key)
        for key, old in before.items():
            if key not in self.mine:
                if old.machine.zone in self.listing.unreachable:
                    self.seen[key] = old  # unknown, not absent
                else:
                    self._absent(old, key)
        for key, asked in list(self.asked.items()):
            lost = key not in self.mine and asked.spec.zone not in self.listing.unreachable
            if lost and self.now - asked.at > (OPERATION_TIMEOUT_S if asked.operation else LISTED_WITHIN_S):
                del self.asked[key]
                self._fail(spec_backoff_key(asked.spec), "nothing came of a creation")
                self.say(asked.spec.pool, asked.spec.name, "refused", "the cloud began to create it, and lists nothing")
        known = self.seen.keys()
        for kept in (self.deleting, self.sent, self.failed):
            for key in [key for key in kept if key not in known]:
                del kept[key]

    def _machine(self, old: SeenMachine | None, machine: Machine, key: str) -> SeenMachine:
        first = old is None or _is_another(old.machine, machine)
        asked = self.asked.get(key)
        if old is None or first:
            old = SeenMachine(machine, self.now, born=machine.created)
            self.deleting.pop(key, None)
            self.failed.pop(key, None)
        same = old.machine.state == machine.state
        ready_at, unhealthy = old.ready_at, None
        if first and not asked and machine.said in ENDED_STATES and 0 < machine.created <= self.now:
            ready_at = machine.created  # nobody looked while it was there
        if machine.state == "ready":
            self.asked.pop(key, None)
            self.failed.pop(key, None)
            if ready_at is None and first and not asked:  # it was ready before we ever looked
                ready_at = machine.created if 0 < machine.created <= self.now else self.now
            elif ready_at is None:
                ready_at = self.now
                self._ready(machine, asked.at if asked else self.now)
            if machine.healthy is False:
                unhealthy = old.unhealthy_since if old.unhealthy_since is not None else self.now
                if old.unhealthy_since is None:
                    self.say(machine.pool, machine.name, "unhealthy", machine.why or "the cloud calls it unhealthy")
        elif not same:
            self._turned(old, machine)
        if machine.state == "dead" and (old.machine.state != "dead" or old.since == self.now):
            self.asked.pop(key, None)
            self._died(replace(old, ready_at=ready_at), machine, machine.why or machine.said)
        kept = machine if machine.error is None else replace(machine, error=None)
        dead = machine.state == "dead" or (old.dead and machine.state == "deleting")
        return SeenMachine(
            kept, old.since if same else self.now, ready_at, unhealthy, dead, old.born or machine.created
        )

    def _ready(self, machine: Machine, asked_at: float) -> None:
        place = backoff_key(machine.zone, machine.type, machine.how)
        if (before := self.places.get(place)) and before.failures and asked_at > before.failed_at:
            self.places[place] = replace(before, failures=0, not_before=0.0)
        taken = self.now - machine.created
        after = f" after {_span(taken)}" if 0 < taken < 86_400 else ""
        self.say(machine.pool, machine.name, "ready", f"it is ready{after}")

    def _turned(self, old: SeenMachine, machine: Machine) -> None:
        if machine.state in ("repairing", "stopped", "starting"):
            why = f": {machine.why}" if machine.why else ""
            self.say(machine.pool, machine.name, machine.state, f"the cloud calls it {machine.said}{why}")
        elif machine.state == "deleting" and not self._was_asked(machine):
            kind = "preempted" if machine.spot and old.ready_at is not None else "lost"
            self.say(machine.pool, machine.name, kind, "it is being deleted, and not by this fleet")

    def _died(self, old: SeenMachine, machine: Machine, said: str) -> None:
        """It is dead or absent, and was not before."""
        key = machine_key(machine)
        if self._was_asked(machine) or key in self.failed:
            return  # as asked, or said already
        lived = None if old.ready_at is None else self.now - old.ready_at
        if lived is None and machine.error is not None:
            how = machine.how
            spec = TpuSpec(machine.name, machine.zone, machine.type, how, self.desired.fleet, machine.pool or "", "")
            self._refused(spec, key, machine.error)
            return
        if lived is None:
            self._fail(backoff_key(machine.zone, machine.type, machine.how), said)
            self.say(machine.pool, machine.name, "refused", f"it went before it was ready: {said}")
            return
        place = backoff_key(machine.zone, machine.type, machine.how)
        if lived < MIN_LIFETIME_S:
            self._fail(place, f"taken away after {lived:.0f} s")
        elif machine.spot:
            self._lost(place)
        kind = "preempted" if machine.spot else "lost"
        self.say(machine.pool, machine.name, kind, f"the cloud took it away after {_span(lived)}: {said}")

    def _lost(self, place: str) -> None:
        before = self.places.get(place, ZoneBackoff())
        lost = (*(at for at in before.lost if self.now - at < LOSS_WINDOW_S), self.now)
        self.places[place] = replace(before, lost=lost)
        if len(lost) >= MAX_LOSSES:
            self._fail(place, f"{len(lost)} machines were taken away within {LOSS_WINDOW_S / 60:.0f} min")

    def _absent(self, old: SeenMachine, key: str) -> None:
        machine = old.machine
        self.asked.pop(key, None)
        if machine.state not in ("dead", "deleting"):
            self._died(old, machine, "it is in no list any more")
        if self._was_asked(machine):
            self.say(machine.pool, machine.name, "gone", "it is deleted")

    def _was_asked(self, machine: Machine) -> bool:
        """Whether the fleet wants it gone: when all comes down, whoever watches has not asked for it himself."""
        return machine_key(machine) in self.deleting or self.desired.down is not None


def _is_another(old: Machine, machine: Machine) -> bool:
    """Whether a machine only has the name of one that was there before.

    A request and the node that comes of it are one machine, though each has its own time of creation; a node may have
    none at first.
    """
    if old.created in (0.0, machine.created):
        return False
    return machine.request is None or machine.request != old.request or old.state not in ("waiting", "creating")


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:.1f} days"
