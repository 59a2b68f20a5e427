"""What a listing does not show: since when a machine is in its state, what is under way, where nothing is to be had.

It may be lost at any time: the fleet then tries a few things again that it need not have tried.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tpuswarm.cloud.protocol import Listing, Machine, Spec
from tpuswarm.fleet.decide.traffic import Traffic

FIRST_BACKOFF_S, BACKOFF_FACTOR, MAX_BACKOFF_S, JITTER_SHARE = 15.0, 1.6, 60.0, 0.4
"""Backoff: seconds before the first new try, factor, seconds at most, and the share by which each varies."""


def machine_key(machine: Machine) -> str:
    """A machine that is listed, in the mappings of a memory."""
    return f"{machine.zone}/{machine.name}"


def spec_key(spec: Spec) -> str:
    """The same of a machine that is asked for."""
    return f"{spec.zone}/{spec.name}"


def backoff_key(zone: str, type_: str, how: str) -> str:
    """What is tried again, or not, as one: a type in a zone, asked for in one way."""
    return f"{zone}/{type_}/{how}"


def spec_backoff_key(spec: Spec) -> str:
    """Where a machine is asked for."""
    return backoff_key(spec.zone, spec.type, spec.how)


@dataclass(frozen=True)
class SeenMachine:
    """A machine of ours at the last look."""

    machine: Machine
    since: float
    """When it was first seen in this state, Unix seconds."""
    ready_at: float | None = None
    """When it was first seen ready."""
    unhealthy_since: float | None = None
    dead: bool = False
    """Whether it was dead once, though it may be called something else while it is deleted."""
    born: float = 0.0
    """When it was created, as the cloud said first: of what came of a request, when that was made."""


@dataclass(frozen=True)
class CreateRequest:
    """A creation under way."""

    spec: Spec
    at: float
    operation: str | None
    """None: the cloud did not answer, so whether it has begun is not known."""


@dataclass(frozen=True)
class ZoneBackoff:
    """How it goes with a type in a zone."""

    failures: int = 0
    """In a row."""
    not_before: float = 0.0
    """Of the next try, Unix seconds."""
    failed_at: float = 0.0
    """When it failed last, Unix seconds."""
    said: str = ""
    """The last failure, in the cloud's words."""
    held: int | None = None
    """With how many machines there the quota was at its end; None: it is not known to be."""
    bad: tuple[float, ...] = ()
    """When machines were replaced because they were not healthy."""
    lost: tuple[float, ...] = ()
    """When the cloud took machines away, of late."""

    def failed(self, seed: str, now: float, said: str, pause: float = 0.0) -> "ZoneBackoff":
        """After one more failure; those of one burst count once."""
        if now < self.not_before:
            return replace(self, said=said, failed_at=now, not_before=max(self.not_before, now + pause))
        failures = self.failures + 1
        spread = 1 + JITTER_SHARE * (2 * random.Random(f"{seed}/{failures}").random() - 1)
        wait = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * BACKOFF_FACTOR ** min(failures - 1, 20)) * spread
        return replace(self, failures=failures, not_before=now + max(wait, pause), failed_at=now, said=said)


@dataclass(frozen=True)
class FleetState:
    """All of it. The keys are `machine_key` and, for places, `place_of`."""

    seen: Mapping[str, SeenMachine] = field(default_factory=dict)
    asked: Mapping[str, CreateRequest] = field(default_factory=dict)
    deleting: Mapping[str, float] = field(default_factory=dict)
    """When we first asked for their deletion."""
    sent: Mapping[str, float] = field(default_factory=dict)
    """When we last asked for something of them: a deletion, a stop, a start."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Machines whose creation has failed, though they may still be listed; why."""
    taken: Mapping[str, float] = field(default_factory=dict)
    """Names that the cloud says are taken, though nothing is listed; when."""
    places: Mapping[str, ZoneBackoff] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)
    """Pools for which nothing is created any more until a person asks again; why."""
    looked: frozenset[str] = frozenset()
    """Zones that have answered at least once."""
    revision: int = 0

    def moved(self, seconds: float) -> "FleetState":
        """After the clock has jumped by so many seconds: all durations stay what they are."""
        if not seconds:
            return self
        return replace(
            self,
            seen={
                key: replace(
                    each,
                    since=each.since + seconds,
                    ready_at=None if each.ready_at is None else each.ready_at + seconds,
                    unhealthy_since=None if each.unhealthy_since is None else each.unhealthy_since + seconds,
                )
                for key, each in self.seen.items()
            },
            asked={key: replace(each, at=each.at + seconds) for key, each in self.asked.items()},
            deleting={key: at + seconds for key, at in self.deleting.items()},
            sent={key: at + seconds for key, at in self.sent.items()},
            taken={key: at + seconds for key, at in self.taken.items()},
            places={
                key: replace(
                    each,
                    not_before=each.not_before + seconds,
                    failed_at=each.failed_at + seconds,
                    bad=tuple(at + seconds for at in each.bad),
                    lost=tuple(at + seconds for at in each.lost),
                )
                for key, each in self.places.items()
            },
        )


@dataclass(frozen=True)
class WorkStatus:
    """What the fleet's machines do, as whoever runs something on them has reported."""

    done: bool = False
    busy_at: float | None = None
    """Unix seconds at which something ran."""
    spoilt: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Machines that cannot be set up, though another one of their pool was: when each was created, and why."""


@dataclass(frozen=True)
class Observed:
    """What there is."""

    listing: Listing
    memory: FleetState
    spent: float = 0.0
    """Dollars so far."""
    work: WorkStatus = WorkStatus()
    traffic: Traffic = field(default_factory=Traffic)
    busy: frozenset[str] = frozenset()
    """Machines on which a job runs."""

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """All of the project; those of ours in zones that do not answer as they were when they last did."""
        away = self.listing.unreachable
        if not away:
            return self.listing.machines
        # One of several lists may have failed: what the others show of the zone is known.
        listed = {machine_key(each) for each in self.listing.machines}
        unknown = (each.machine for key, each in self.memory.seen.items() if key not in listed)
        return (*self.listing.machines, *(each for each in unknown if each.zone in away))
