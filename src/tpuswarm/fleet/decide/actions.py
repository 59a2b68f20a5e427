"""What a plan says to do, and what came of it."""

from typing import Literal, NamedTuple

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import Machine, Spec


class Create(NamedTuple):
    """Create a machine."""

    spec: Spec
    why: str


class Delete(NamedTuple):
    """Delete a machine, and with it the request that it comes from."""

    machine: Machine
    why: str
    blame: Literal["late", "bad"] | None = None
    """What its zone is blamed for: it did not come in time, or was not healthy."""
    pause: float = 0.0
    """Seconds for which that zone is not asked again at least."""


class Stop(NamedTuple):
    """Stop a machine that can be started again."""

    machine: Machine
    why: str


class Start(NamedTuple):
    """Start a stopped machine."""

    machine: Machine
    why: str


Action = Create | Delete | Stop | Start


class Wait(NamedTuple):
    """Why a pool lacks machines that nothing is done for at the moment, or what else a person should do about it."""

    pool: str
    missing: int
    why: str
    until: float | None
    """When that may change by itself, Unix seconds; None: when something else happens, or somebody does something."""

    @property
    def of(self) -> str:
        """`3 of pool small`; `pool small` where none is missing."""
        return f"{self.missing:,} of pool {self.pool}" if self.missing else f"pool {self.pool}"


class Plan(NamedTuple):
    """What to do next."""

    actions: tuple[Action, ...]
    waits: tuple[Wait, ...] = ()
    end: str | None = None
    """Why the fleet is to come down from now on: to be stored before anything is deleted."""


class ActionResult(NamedTuple):
    """What came of asking the cloud for an action."""

    action: Action
    operation: str | None
    error: CloudError | None


class CreateResult(NamedTuple):
    """A creation's operation has ended."""

    key: str
    error: CloudError | None


CloudAnswer = ActionResult | CreateResult


class Event(NamedTuple):
    """What happened, for people."""

    at: float
    """Unix seconds."""
    pool: str
    machine: str
    """Empty: of the pool."""
    kind: str
    """One word to count: asked, ready, preempted, lost, gone, unhealthy, deleting, stopping, starting, refused."""
    text: str
