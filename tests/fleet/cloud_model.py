"""A small model of a cloud, in memory, whose clock and whose misbehaviour a test holds in its hands."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpuswarm.cloud.errors import Changed, CloudError, Invalid, NoCapacity, NoQuota, NotFound, Taken, Unreachable
from tpuswarm.cloud.protocol import (
    FLEET_LABEL,
    POOL_LABEL,
    Listing,
    Machine,
    Outcome,
    Spec,
    Stored,
    TpuSpec,
    Worker,
)
from tpuswarm.fleet.core.money import lot

BOOT, GO = 180.0, 60.0
"""Seconds that a machine takes to come and to go."""


class Killed(BaseException):
    """The process is killed: nothing catches it."""


@dataclass
class Fuse:
    """Kills at the n-th effect from now on, before or after it."""

    left: int | None = None
    after: bool = False
    count: int = 0

    def effect(self, done: bool) -> None:
        """To be called before and after everything that changes the world."""
        if not done:
            self.count += 1
        if self.left is not None and done == self.after:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed


@dataclass
class Bucket:
    """Objects with generations."""

    fuse: Fuse
    objects: dict[str, Stored] = field(default_factory=dict)
    reachable: bool = True

    def read(self, path: str) -> Stored | None:
        self._answer()
        return self.objects.get(path)

    def write(self, path: str, data: bytes, generation: int) -> int:
        self._answer()
        self.fuse.effect(False)
        now = self.objects[path].generation if path in self.objects else 0
        if now != generation:
            raise Changed(f"{path} is generation {now}, not {generation}")
        self.objects[path] = Stored(data, now + 1)
        self.fuse.effect(True)
        return now + 1

    def delete(self, path: str) -> None:
        self._answer()
        self.objects.pop(path, None)

    def _answer(self) -> None:
        if not self.reachable:
            raise Unreachable("the bucket does not answer")


class Cloud:
    """A project; implements `Provider`."""

    project = "model"

    def __init__(self, now: float = 1_800_000_000.0):
        self.now = now
        self.there: dict[tuple[str, str], Machine] = {}
        """All that exists, by zone and name; copied before it is gone through, for calls come from several threads."""
        self.due: dict[tuple[str, str], float] = {}
        """When what is under way comes to its end."""
        self.operations: dict[str, tuple[str, str] | CloudError] = {}
        self.capacity: dict[str, int] = {}
        """Machines that a zone has at most; without limit where it is not in it."""
        self.quota: dict[object, int] = {}
        """By lot."""
        self.unreachable: set[str] = set()
        self.lag = 0.0
        """Seconds after which a new machine is listed."""
        self.shown: dict[tuple[str, str], float] = {}
        self.lost_answers: int = 0
        """So many of the next calls are carried out, but not answered."""
        self.late_refusals = True
        """Whether lack of capacity is the failure of an operation, not of the call."""
        self.calls: list[str] = []
        self.deleted: list[Machine] = []
        """As they were when their deletion was asked for."""
        self.fuse = Fuse()
        self.buckets: dict[str, Bucket] = {}
        self.deny: CloudError | None = None
        self._number = itertools.count()

    # What a fleet does.

    def machines(self, zones: Iterable[str]) -> Listing:
        self.calls.append("machines")
        self.advance(0)
        seen = tuple(
            each
            for key, each in list(self.there.items())
            if each.zone not in self.unreachable and self.shown.get(key, 0.0) <= self.now
        )
        return Listing(seen, frozenset(self.unreachable))

    def create(self, spec: Spec) -> str:
        self.calls.append(f"create {spec.name}")
        self.fuse.effect(False)
        key = (spec.zone, spec.name)
        if self.deny is not None:
            raise self.deny
        if spec.zone in self.unreachable:
            raise Unreachable(f"{spec.zone} does not answer")
        if key in self.there:
            raise Taken(f"{spec.name} exists already in {spec.zone}")
        if self._over_quota(spec):
            raise NoQuota(f"quota of {spec.type} in {spec.zone} is used up", "TPUS")
        full = self._full(spec.zone)
        if full and not self.late_refusals and not self._queues(spec):
            raise NoCapacity(f"no more capacity in the zone {spec.zone}")
        operation = f"operation-{next(self._number)}"
        self.there[key] = self._machine(spec)
        self.due[key] = self.now + (20.0 if full else BOOT)
        self.shown[key] = self.now + self.lag
        self.operations[operation] = key
        self.fuse.effect(True)
        self._answer()
        return operation

    def delete(self, machine: Machine) -> str:
        self.calls.append(f"delete {machine.name}")
        self.fuse.effect(False)
        key = (machine.zone, machine.name)
        if machine.zone in self.unreachable:
            raise Unreachable(f"{machine.zone} does not answer")
        if key not in self.there:
            raise NotFound(f"there is no {machine.name}")
        self.deleted.append(self.there[key])
        self._go(key)
        self.fuse.effect(True)
        self._answer()
        return "deletion"

    def stop(self, machine: Machine) -> str:
        return self._turn(machine, "ready", "stopping", "STOPPING")

    def start(self, machine: Machine) -> str:
        return self._turn(machine, "stopped", "starting", "STARTING")

    def outcome(self, operation: str) -> Outcome:
        self.calls.append("outcome")
        found = self.operations[operation]
        if isinstance(found, CloudError):
            return Outcome(True, found)
        machine = self.there.get(found)
        return Outcome(machine is None or machine.state == "ready", None)

    def types(self, zone: str) -> Sequence[str]:
        return ()

    def runtimes(self, zone: str) -> Sequence[str]:
        return ()

    def set_metadata(self, machine: Machine, metadata: Mapping[str, str]) -> str:
        return "metadata"

    def guest_attributes(self, machine: Machine, worker: int, path: str) -> Mapping[str, str]:
        return {}

    def bucket(self, name: str) -> Bucket:
        return self.buckets.setdefault(name, Bucket(self.fuse))

    # What the weather does.

    def advance(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        self.now += seconds
        for key in [key for key, at in self.due.items() if at <= self.now]:
            machine = self.there[key]
            del self.due[key]
            if machine.state == "creating" and self._crowded(key):
                self._fail(key)
            elif machine.state in ("creating", "starting"):
                workers = (Worker("10.0.0.2", None),)
                self.there[key] = replace(machine, state="ready", said="READY", healthy=True, workers=workers)
            elif machine.state == "stopping":
                self.there[key] = replace(machine, state="stopped", said="STOPPED", healthy=None)
            elif machine.state == "deleting":
                del self.there[key]
        for key, machine in list(self.there.items()):
            if machine.state == "waiting" and not self._full(machine.zone):
                self.there[key] = replace(machine, state="creating", said="PROVISIONING")
                self.due[key] = self.now + BOOT

    def preempt(self, key: tuple[str, str], how: str = "PREEMPTED") -> None:
        """Take a machine away; `404`: nothing is left of it."""
        self.due.pop(key, None)
        if how == "404":
            del self.there[key]
        else:
            self.there[key] = replace(self.there[key], state="dead", said=how, healthy=None, workers=())

    def change(self, key: tuple[str, str], **facts: object) -> None:
        """Make a machine what it is not."""
        self.there[key] = replace(self.there[key], **facts)  # type: ignore[arg-type]

    def foreign(self, name: str, zone: str, type_: str = "v2-8", **facts: object) -> Machine:
        """Somebody else's machine."""
        made = Machine(name, zone, "tpu", type_, "ready", "READY", healthy=True, created=self.now, **facts)  # type: ignore[arg-type]
        self.there[zone, name] = made
        return made

    def mine(self, fleet: str, pool: str | None = None) -> list[Machine]:
        """What a fleet holds in truth: neither dead nor on its way out."""
        return [
            each
            for each in list(self.there.values())
            if each.fleet == fleet and pool in (None, each.pool) and each.state not in ("dead", "deleting")
        ]

    def _machine(self, spec: Spec) -> Machine:
        labels = {**spec.labels, FLEET_LABEL: spec.fleet, POOL_LABEL: spec.pool}
        if not isinstance(spec, TpuSpec):
            how = "spot" if spec.spot else "on-demand"
            return Machine(
                spec.name, spec.zone, "vm", spec.type, "creating", "STAGING", how=how, created=self.now, labels=labels
            )  # type: ignore[arg-type]
        made = Machine(
            spec.name, spec.zone, "tpu", spec.type, "creating", "CREATING",
            how=spec.how, created=self.now, labels=labels,
        )  # fmt: skip
        if self._queues(spec):
            return replace(made, state="waiting", said="WAITING_FOR_RESOURCES", request=f"{spec.name}-q")
        return made

    def _queues(self, spec: Spec) -> bool:
        return isinstance(spec, TpuSpec) and spec.how == "queued" and self._full(spec.zone)

    def _full(self, zone: str) -> bool:
        used = sum(
            each.zone == zone and each.state not in ("dead", "waiting", "deleting")
            for each in list(self.there.values())
        )
        return used >= self.capacity.get(zone, 10**9)

    def _crowded(self, key: tuple[str, str]) -> bool:
        """Whether a machine being created finds no room: others that are ready have it."""
        zone = key[0]
        used = sum(
            each.zone == zone and each.state in ("ready", "repairing", "starting") for each in list(self.there.values())
        )
        return used >= self.capacity.get(zone, 10**9)

    def _over_quota(self, spec: Spec) -> bool:
        if not isinstance(spec, TpuSpec):
            return False
        mine = lot(spec.type, spec.zone, spec.how == "spot")
        used = sum(
            lot(each.type, each.zone, each.spot) == mine for each in list(self.there.values()) if each.kind == "tpu"
        )
        return used >= self.quota.get(mine, 10**9)

    def _fail(self, key: tuple[str, str]) -> None:
        error = NoCapacity(f"There is no more capacity in the zone {key[0]!r}")
        for operation, target in self.operations.items():
            if target == key:
                self.operations[operation] = error
        del self.there[key]

    def _go(self, key: tuple[str, str]) -> None:
        self.there[key] = replace(self.there[key], state="deleting", said="DELETING", healthy=None)
        self.due[key] = self.now + GO

    def _turn(self, machine: Machine, before: str, state: str, said: str) -> str:
        self.fuse.effect(False)
        key = (machine.zone, machine.name)
        if key not in self.there:
            raise NotFound(f"there is no {machine.name}")
        if self.there[key].state != before or machine.spot:
            raise Invalid(f"{machine.name} is {self.there[key].said}")
        self.there[key] = replace(self.there[key], state=state, said=said, healthy=None)  # type: ignore[arg-type]
        self.due[key] = self.now + GO
        self.fuse.effect(True)
        return state

    def _answer(self) -> None:
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unreachable("the connection was lost")
