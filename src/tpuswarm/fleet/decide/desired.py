"""What a person wants of a fleet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpuswarm.cloud.protocol import Spec
from tpuswarm.fleet.decide.flags import Flag
from tpuswarm.fleet.decide.money import Grant


@dataclass(frozen=True)
class PoolSpec:
    """A pool: machines that are alike; or one VM."""

    name: str
    spec: Spec
    """Of each; a TPU gets its name and zone when it is created, unless it has a name already."""
    zones: tuple[str, ...]
    """In order of preference."""
    count: int
    wait_s: float | None = None
    """How long a request may wait in the queue of a zone before the next one is asked; None: for ever in the last."""
    routes: bool = False
    """Whether it is a VM that leads to the TPUs of the fleet."""

    @property
    def type(self) -> str:
        """Of its machines."""
        return self.spec.type

    @property
    def how(self) -> str:
        """How they are asked for."""
        return self.spec.how


@dataclass(frozen=True)
class Budget:
    """Dollars; None: without limit."""

    per_hour: float | None = None
    total: float | None = None
    traffic_per_day: float | None = None
    """Of what its training carries, in the last 24 hours."""


@dataclass(frozen=True)
class DownWhen:
    """When a fleet comes down by itself; one of them is set."""

    done: bool = False
    idle_s: float | None = None
    at: float | None = None
    """Unix seconds."""


@dataclass(frozen=True)
class Desired:
    """All of it."""

    fleet: str
    """Its id: what it makes carries it."""
    pools: tuple[PoolSpec, ...]
    grants: tuple[Grant, ...] = ()
    budget: Budget = Budget()
    down_when: DownWhen | None = None
    paid: bool = False
    """Whether TPUs that no grant covers may be paid for; a VM that the file names is."""
    flags: tuple[Flag, ...] = ()
    """Those that the file names."""
    paused: Mapping[str, str] = field(default_factory=dict)
    """Pools by the names of their machines that are to be stopped."""
    dropped: Mapping[str, float] = field(default_factory=dict)
    """Machines that are to go, by name, and when they were created: a later one of that name may stay."""
    down: str | None = None
    """Why everything is to go; None: it is up."""
    kept_on: str | None = None
    """The pool of the VM on which its keeper is to live; None: wherever somebody starts one."""
    revision: int = 1
    """Counts what people asked: with each, what was given up is tried again."""

    @property
    def home(self) -> str | None:
        """What the machine is called on which its keeper is to live; None: it may live anywhere."""
        return next((each.spec.name for each in self.pools if each.name == self.kept_on), None)

    @property
    def zones(self) -> tuple[str, ...]:
        """All that it may use."""
        return tuple(dict.fromkeys(zone for pool in self.pools for zone in pool.zones))
