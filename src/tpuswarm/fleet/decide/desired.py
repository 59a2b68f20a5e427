"""The desired state of a fleet."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AliasChoices, BeforeValidator, Field

from tpuswarm.cloud.protocol import Machine, Spec
from tpuswarm.fleet.decide.flags import Flag
from tpuswarm.fleet.decide.money import Grant


def _read_forwards(value: object) -> object:
    """Read `routes` of older documents too: whether the VM forwards to SSH."""
    return ((22,) if value else ()) if isinstance(value, bool) else value


@dataclass(frozen=True)
class PoolSpec:
    name: str
    spec: Spec
    """A TPU without a name gets its name and zone when it is created."""
    zones: tuple[str, ...]
    count: int
    wait_s: float | None = None
    """How long a queued request waits before the next zone is tried; None: without limit in the last zone."""
    forwards: Annotated[
        tuple[int, ...],
        Field(validation_alias=AliasChoices("forwards", "routes")),
        BeforeValidator(_read_forwards),
    ] = ()
    """The ports of all TPU workers that this VM forwards to, as a router."""

    @property
    def type(self) -> str:
        return self.spec.type

    @property
    def how(self) -> str:
        return self.spec.how


@dataclass(frozen=True)
class Budget:
    per_hour: float | None = None
    total: float | None = None
    traffic_per_day: float | None = None


@dataclass(frozen=True)
class DownWhen:
    """When a fleet comes down by itself; exactly one field is set."""

    done: bool = False
    idle_s: float | None = None
    at: float | None = None
    """Unix seconds."""


@dataclass(frozen=True)
class Desired:
    fleet: str
    """The fleet's id; everything it creates carries this label."""
    pools: tuple[PoolSpec, ...]
    grants: tuple[Grant, ...] = ()
    budget: Budget = Budget()
    down_when: DownWhen | None = None
    paid: bool = False
    """Whether TPUs outside of grants may be paid for; VMs always may."""
    flags: tuple[Flag, ...] = ()
    paused: Mapping[str, str] = field(default_factory=dict)
    """Machines to stop, with their pools."""
    dropped: Mapping[str, float] = field(default_factory=dict)
    """Machines to delete, with their creation times: a later machine of the same name may stay."""
    down: str | None = None
    """Why everything is to be deleted; None while the fleet is up."""
    kept_on: str | None = None
    """The pool of the machine that runs the keeper; None: any computer."""
    revision: int = 1
    """Counts the user's requests; each one clears earlier failures."""

    @property
    def keeper_machine(self) -> str | None:
        """The name of the machine that runs the keeper; None: any computer."""
        return next((pool.spec.name for pool in self.pools if pool.name == self.kept_on), None)

    def own(self, machines: Iterable[Machine]) -> list[Machine]:
        """Select the fleet's own machines."""
        return [machine for machine in machines if machine.fleet == self.fleet]

    @property
    def zones(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(zone for pool in self.pools for zone in pool.zones))
