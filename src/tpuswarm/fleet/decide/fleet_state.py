"""The state of a fleet that no listing shows: times of state changes, open requests, backoffs.

It may be lost at any time: the fleet then retries some things too early.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from pydantic import Field

from tpuswarm.catalog import Api
from tpuswarm.cloud.protocol import Listing, Machine, Spec
from tpuswarm.fleet.decide.traffic import Traffic

FIRST_BACKOFF_S, BACKOFF_FACTOR, MAX_BACKOFF_S, JITTER_SHARE = 15.0, 1.6, 60.0, 0.4


def machine_key(machine: Machine) -> str:
    return f"{machine.zone}/{machine.name}"


def spec_key(spec: Spec) -> str:
    """The `machine_key` that the machine will have."""
    return f"{spec.zone}/{spec.name}"


def backoff_key(zone: str, type_: str, how: str, api: Api) -> str:
    """Creations with the same key succeed or fail together, and share their backoff."""
    return f"{zone}/{type_}/{how}" + ("/compute" if api == "compute" else "")


def spec_backoff_key(spec: Spec) -> str:
    return backoff_key(spec.zone, spec.type, spec.how, spec.api)


def machine_backoff_key(machine: Machine) -> str:
    return backoff_key(machine.zone, machine.type, machine.how, "compute" if machine.is_instance else "tpu")


@dataclass(frozen=True)
class SeenMachine:
    """A machine of the fleet at the last observation; times are Unix seconds."""

    machine: Machine
    since: float
    ready_at: float | None = None
    unhealthy_since: float | None = None
    dead: bool = False
    """Stays true while a dead machine is deleted."""
    born: float = 0.0
    """The creation time that the cloud reported first: for a queued request, the request's."""


@dataclass(frozen=True)
class CreateRequest:
    spec: Spec
    at: float
    operation: str | None
    """None if the cloud did not answer: whether the creation began is unknown."""


@dataclass(frozen=True)
class ZoneBackoff:
    """How creations of one type in one zone went lately; times are Unix seconds."""

    failures: int = 0
    not_before: float = 0.0
    failed_at: float = 0.0
    why: str = ""
    """The last failure, in the cloud's words."""
    quota_limit: int | None = None
    """The number of machines at which the quota was exhausted."""
    replaced: tuple[float, ...] = ()
    """When unhealthy machines were replaced."""
    lost: tuple[float, ...] = ()
    """When the cloud took the last few machines away, recently."""
    refused_after_s: float = 0.0
    """How long the last creation ran that ended without capacity."""

    def after_failure(self, seed: str, now: float, why: str, pause_s: float = 0.0) -> "ZoneBackoff":
        """Back off after a failure; failures of one burst count once."""
        if now < self.not_before:
            return replace(self, why=why, failed_at=now, not_before=max(self.not_before, now + pause_s))
        failures = self.failures + 1
        jitter = 1 + JITTER_SHARE * (2 * random.Random(f"{seed}/{failures}").random() - 1)
        wait = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * BACKOFF_FACTOR ** min(failures - 1, 20)) * jitter
        return replace(self, failures=failures, not_before=now + max(wait, pause_s), failed_at=now, why=why)


@dataclass(frozen=True)
class RegionLimit:
    """A quota of a region that was exhausted."""

    hosts: int
    """How many hosts of the fleet it may have allowed."""
    why: str
    """In the cloud's words."""


@dataclass(frozen=True)
class FleetState:
    """Keys are `machine_key`, of backoffs `backoff_key`; times are Unix seconds."""

    seen: Mapping[str, SeenMachine] = field(default_factory=dict)
    requests: Mapping[str, CreateRequest] = field(default_factory=dict)
    deleting: Mapping[str, float] = field(default_factory=dict)
    """When we first requested the deletion."""
    last_call: Mapping[str, float] = field(default_factory=dict)
    """When we last requested a deletion, stop or start."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Machines whose creation failed, though they may still be listed, and why."""
    taken: Mapping[str, float] = field(default_factory=dict)
    """Names that exist according to the cloud though no listing shows them, and when it said so."""
    backoffs: Mapping[str, ZoneBackoff] = field(default_factory=dict)
    region_limits: Mapping[str, RegionLimit] = field(default_factory=dict)
    """By `region_key`."""
    stopped: Mapping[str, str] = field(default_factory=dict)
    """Pools that create nothing until the user asks again, and why."""
    answered: frozenset[str] = frozenset()
    """Zones that have answered at least once."""
    revision: int = 0
    unused_zones: frozenset[str] = frozenset()
    """Zones where nothing was ever requested."""

    def shifted(self, seconds: float) -> "FleetState":
        """Move all times after the clock has jumped, so that durations stay the same."""
        if not seconds:
            return self

        def shift(times: Mapping[str, float]) -> dict[str, float]:
            return {key: at + seconds for key, at in times.items()}

        return replace(
            self,
            seen={
                key: replace(
                    seen,
                    since=seen.since + seconds,
                    ready_at=None if seen.ready_at is None else seen.ready_at + seconds,
                    unhealthy_since=None if seen.unhealthy_since is None else seen.unhealthy_since + seconds,
                )
                for key, seen in self.seen.items()
            },
            requests={key: replace(request, at=request.at + seconds) for key, request in self.requests.items()},
            deleting=shift(self.deleting),
            last_call=shift(self.last_call),
            taken=shift(self.taken),
            backoffs={
                key: replace(
                    backoff,
                    not_before=backoff.not_before + seconds,
                    failed_at=backoff.failed_at + seconds,
                    replaced=tuple(at + seconds for at in backoff.replaced),
                    lost=tuple(at + seconds for at in backoff.lost),
                )
                for key, backoff in self.backoffs.items()
            },
        )


@dataclass(frozen=True)
class WorkStatus:
    """The job runner's report."""

    done: bool = False
    busy_at: float | None = None
    """When something last ran, Unix seconds."""
    unusable: Annotated[Mapping[str, tuple[float, str]], Field(alias="spoilt")] = field(default_factory=dict)
    """Machines that cannot be set up though others can: their creation times, and why."""


@dataclass(frozen=True)
class Observed:
    listing: Listing
    state: FleetState
    spent: float = 0.0
    work: WorkStatus = WorkStatus()
    traffic: Traffic = field(default_factory=Traffic)
    busy: frozenset[str] = frozenset()

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """All machines of the project; our own in unreachable zones as last seen."""
        unreachable = self.listing.unreachable
        if not unreachable:
            return self.listing.machines
        # A zone has several listings; a single one may have failed.
        listed = {machine_key(machine) for machine in self.listing.machines}
        last_seen = (seen.machine for key, seen in self.state.seen.items() if key not in listed)
        return (*self.listing.machines, *(machine for machine in last_seen if machine.zone in unreachable))
