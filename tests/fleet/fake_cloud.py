"""An in-memory cloud whose clock and faults are under the test's control."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tpuswarm.catalog import find
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import Changed, CloudError, Invalid, NoCapacity, NoQuota, NotFound, Taken, Unreachable
from tpuswarm.cloud.protocol import (
    FLEET_LABEL,
    POOL_LABEL,
    REMAINS,
    Listing,
    Machine,
    Outcome,
    Spec,
    Stored,
    TpuSpec,
    Worker,
)
from tpuswarm.fleet.decide.limits import machine_quota, spec_quota

BOOT_S, STOP_S, REMAINS_S = 180.0, 60.0, 300.0
UNLIMITED = 10**9
START = 1_800_000_000.0

Key = tuple[str, str]
"""Zone and name of a machine."""


def _is_slice(machine: Machine) -> bool:
    return machine.kind == "tpu" and machine.api == "compute" and find(machine.type).hosts > 1


class Killed(BaseException):
    """The process is killed: nothing catches it."""


@dataclass
class KillSwitch:
    """Kill the process before or after the n-th side effect from now on."""

    remaining: int | None = None
    after: bool = False
    count: int = 0

    def effect(self, is_done: bool = False) -> None:
        self.count += not is_done
        if self.remaining is not None and is_done == self.after:
            self.remaining -= 1
            if self.remaining < 0:
                self.remaining = None
                raise Killed


@dataclass
class FakeBucket:
    kill_switch: KillSwitch
    objects: dict[str, Stored] = field(default_factory=dict)
    is_reachable: bool = True

    def read(self, path: str) -> Stored | None:
        self._connect()
        return self.objects.get(path)

    def write(self, path: str, data: bytes, generation: int) -> int:
        self._connect()
        self.kill_switch.effect()
        current = self.objects[path].generation if path in self.objects else 0
        if current != generation:
            raise Changed(f"{path} is generation {current}, not {generation}")
        self.objects[path] = Stored(data, current + 1)
        self.kill_switch.effect(is_done=True)
        return current + 1

    def _connect(self) -> None:
        if not self.is_reachable:
            raise Unreachable("the bucket does not answer")


class FakeCloud:
    """A project with machines and buckets; implements `Provider`."""

    project = "model"

    def __init__(self, now: float = START):
        self.now = now
        self.existing: dict[Key, Machine] = {}
        """Iterate over a copy: requests come from several threads."""
        self.transitions: dict[Key, float] = {}
        """When a machine's current transition ends."""
        self.operations: dict[str, Key | CloudError] = {}
        self.capacity: dict[str, int] = {}
        """The most machines in a zone; a missing zone is unlimited."""
        self.quota: dict[object, int] = {}
        self.addresses: dict[str, int] = {}
        """The most machines in a region; the operation fails beyond it."""
        self.refusal_s = 20.0
        """How long a creation runs that fails."""
        self.unreachable: set[str] = set()
        self.listing_lag_s = 0.0
        self.listed_from: dict[Key, float] = {}
        self.cut_short = 0
        """How many of the next creations of slices in Compute Engine are killed half way."""
        self.lost_responses = 0
        """How many of the next requests are carried out without a response."""
        self.refuses_late = True
        """Whether lack of capacity fails the operation rather than the request."""
        self.without_address: set[Key] = set()
        self.requests: list[str] = []
        self.deleted: list[Machine] = []
        """Machines as they were when their deletion was requested."""
        self.kill_switch = KillSwitch()
        self.buckets: dict[str, FakeBucket] = {}
        self.create_error: CloudError | None = None
        self._number = itertools.count()

    # The provider's interface.

    def machines(self, zones: Iterable[str]) -> Listing:
        self.requests.append("machines")
        self.advance(0)
        visible = [key for key in list(self.existing) if self.listed_from.get(key, 0.0) <= self.now]
        listed = tuple(self.existing[key] for key in visible if key[0] not in self.unreachable)
        return Listing(listed, frozenset(self.unreachable))

    def create(self, spec: Spec) -> str:
        self.requests.append(f"create {spec.name}")
        self.kill_switch.effect()
        key = (spec.zone, spec.name)
        if self.create_error is not None:
            raise self.create_error
        self._connect(spec.zone)
        if key in self.existing:
            raise Taken(f"{spec.name} exists already in {spec.zone}")
        if self._exceeds_quota(spec):
            raise NoQuota(f"quota of {spec.type} in {spec.zone} is used up", "TPUS")
        without_address = self._lacks_address(spec.zone)
        full = self._is_full(spec.zone)
        if full and not self.refuses_late and not self._is_queued(spec):
            raise NoCapacity(f"no more capacity in the zone {spec.zone}")
        operation = f"operation-{next(self._number)}"
        self.existing[key] = self._new_machine(spec)
        if self.cut_short and _is_slice(self.existing[key]):
            self.cut_short -= 1
            self.update(key, said=REMAINS)
            self.transitions[key] = self.now + REMAINS_S
            raise Unreachable("the process was killed before its last request")
        self.transitions[key] = self.now + (self.refusal_s if full or without_address else BOOT_S)
        if without_address:
            self.without_address.add(key)
        self.listed_from[key] = self.now + self.listing_lag_s
        self.operations[operation] = key
        self._respond()
        return operation

    def delete(self, machine: Machine) -> str:
        self.requests.append(f"delete {machine.name}")
        self.kill_switch.effect()
        key = (machine.zone, machine.name)
        self._connect(machine.zone)
        if key not in self.existing:
            raise NotFound(f"there is no {machine.name}")
        self.deleted.append(self.existing[key])
        if machine.said == REMAINS:
            del self.existing[key]
            self.transitions.pop(key, None)
        else:
            self._start_transition(key, "deleting")
        self._respond()
        return "deletion"

    def stop(self, machine: Machine) -> str:
        return self._switch(machine, "ready", "stopping")

    def start(self, machine: Machine) -> str:
        return self._switch(machine, "stopped", "starting")

    def grow_disk(self, machine: Machine, gib: int) -> str:
        self.update((machine.zone, machine.name), disk_gib=gib)
        return "growing"

    def outcome(self, operation: str) -> Outcome:
        self.requests.append("outcome")
        target = self.operations[operation]
        if isinstance(target, CloudError):
            return Outcome(True, target)
        machine = self.existing.get(target)
        return Outcome(machine is None or machine.state == "ready", None)

    def bucket(self, name: str) -> FakeBucket:
        return self.buckets.setdefault(name, FakeBucket(self.kill_switch))

    # Controls for tests.

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for key in [key for key, at in self.transitions.items() if at <= self.now]:
            machine = self.existing[key]
            del self.transitions[key]
            if machine.said == REMAINS:
                self.update(key, state="dead")
            elif key in self.without_address:
                self.without_address.remove(key)
                self._fail(key, NoQuota("You have reached IN_USE_ADDRESSES limit", "IN_USE_ADDRESSES"))
            elif machine.state == "creating" and self._is_full(machine.zone, ("ready", "repairing", "starting")):
                self._fail(key)
            elif machine.state in ("creating", "starting"):
                self.update(key, state="ready", said="READY", healthy=True, workers=(Worker("10.0.0.2", None),))
            elif machine.state == "stopping":
                self.update(key, state="stopped", said="STOPPED", healthy=None)
            elif machine.state == "deleting":
                self._end(key)
        for key, machine in list(self.existing.items()):
            if machine.state == "waiting" and not self._is_full(machine.zone):
                self.update(key, state="creating", said="PROVISIONING")
                self.transitions[key] = self.now + BOOT_S

    def preempt(self, key: Key, status: str = "PREEMPTED") -> None:
        """Take a machine away; with status `404` nothing of it remains."""
        self.transitions.pop(key, None)
        if status == "404":
            self._end(key)
        else:
            self.update(key, state="dead", said=status, healthy=None, workers=())

    def _end(self, key: Key) -> None:
        """Let a machine's hosts be gone; of a slice in Compute Engine something is left."""
        if _is_slice(self.existing[key]):
            self.update(key, state="dead", said=REMAINS, healthy=None, workers=())
        else:
            del self.existing[key]

    def update(self, key: Key, **changes: object) -> None:
        self.existing[key] = replace(self.existing[key], **changes)  # type: ignore[arg-type]

    def add_foreign(self, name: str, zone: str, type_: str = "v2-8", **fields: object) -> Machine:
        machine = Machine(name, zone, "tpu", type_, "ready", "READY", healthy=True, created=self.now, **fields)  # type: ignore[arg-type]
        self.existing[zone, name] = machine
        return machine

    def names(self, *states: str) -> list[str]:
        """Return the names of machines in these states; without states, of all."""
        return sorted(machine.name for machine in self.existing.values() if not states or machine.state in states)

    def live_machines(self, fleet: str, pool: str | None = None) -> list[Machine]:
        """Return a fleet's machines that are neither dead nor being deleted."""
        ours = [machine for machine in list(self.existing.values()) if machine.fleet == fleet]
        alive = [machine for machine in ours if machine.state not in ("dead", "deleting")]
        return [machine for machine in alive if pool in (None, machine.pool)]

    def _new_machine(self, spec: Spec) -> Machine:
        labels = {**spec.labels, FLEET_LABEL: spec.fleet, POOL_LABEL: spec.pool}
        kind, status = ("tpu", "CREATING") if isinstance(spec, TpuSpec) else ("vm", "STAGING")
        machine = Machine(
            spec.name, spec.zone, kind, spec.type, "creating", status, how=spec.how, api=spec.api,
            created=self.now, labels=labels,
            metadata=spec.metadata, runtime=getattr(spec, "runtime", None), disk_gib=getattr(spec, "disk_gib", None),
        )  # fmt: skip
        if self._is_queued(spec):
            return replace(machine, state="waiting", said="WAITING_FOR_RESOURCES", request=f"{spec.name}-q")
        return machine

    def _is_queued(self, spec: Spec) -> bool:
        return isinstance(spec, TpuSpec) and spec.how == "queued" and self._is_full(spec.zone)

    def _is_full(
        self, zone: str, states: Sequence[str] = ("creating", "ready", "repairing", "stopping", "stopped", "starting")
    ) -> bool:
        if zone not in self.capacity:
            return False
        used = sum(machine.zone == zone and machine.state in states for machine in list(self.existing.values()))
        return used >= self.capacity[zone]

    def _exceeds_quota(self, spec: Spec) -> bool:
        if not isinstance(spec, TpuSpec):
            return False
        wanted = spec_quota(spec)
        used = sum(machine_quota(machine) == wanted for machine in list(self.existing.values()))
        return used >= self.quota.get(wanted, UNLIMITED)

    def _lacks_address(self, zone: str) -> bool:
        region = region_of(zone)
        used = sum(region_of(machine.zone) == region for machine in list(self.existing.values()))
        return used >= self.addresses.get(region, UNLIMITED)

    def _fail(self, key: Key, error: CloudError | None = None) -> None:
        error = error or NoCapacity(f"There is no more capacity in the zone {key[0]!r}")
        self.operations |= {operation: error for operation, target in self.operations.items() if target == key}
        del self.existing[key]

    def _start_transition(self, key: Key, state: str) -> None:
        self.update(key, state=state, said=state.upper(), healthy=None)
        self.transitions[key] = self.now + STOP_S

    def _switch(self, machine: Machine, required: str, state: str) -> str:
        self.kill_switch.effect()
        key = (machine.zone, machine.name)
        if key not in self.existing:
            raise NotFound(f"there is no {machine.name}")
        if self.existing[key].state != required or machine.spot:
            raise Invalid(f"{machine.name} is {self.existing[key].said}")
        self._start_transition(key, state)
        self.kill_switch.effect(is_done=True)
        return state

    def _connect(self, zone: str) -> None:
        if zone in self.unreachable:
            raise Unreachable(f"{zone} does not answer")

    def _respond(self) -> None:
        self.kill_switch.effect(is_done=True)
        if self.lost_responses:
            self.lost_responses -= 1
            raise Unreachable("the connection was lost")
