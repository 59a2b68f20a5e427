"""The actions of a plan, and their results."""

from typing import Literal, NamedTuple

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import Machine, Spec


class Create(NamedTuple):
    spec: Spec
    why: str


class Delete(NamedTuple):
    """Delete a machine, and its queued request if it has one."""

    machine: Machine
    why: str
    blame: Literal["late", "bad"] | None = None
    """The zone's fault: the machine came too late, or was unhealthy."""
    pause_s: float = 0.0


class Stop(NamedTuple):
    machine: Machine
    why: str


class Start(NamedTuple):
    machine: Machine
    why: str


class Grow(NamedTuple):
    """Grow the boot disk of a VM."""

    machine: Machine
    disk_gib: int
    why: str


Action = Create | Delete | Stop | Start | Grow


class Wait(NamedTuple):
    """Why a pool lacks machines while nothing can be done about it."""

    pool: str
    missing: int
    why: str
    until: float | None
    """When this changes by itself (Unix seconds); None if an event or a person has to change it."""

    @property
    def subject(self) -> str:
        """`3 of pool small`, or `pool small` if none is missing."""
        return f"{self.missing:,} of pool {self.pool}" if self.missing else f"pool {self.pool}"


class Plan(NamedTuple):
    actions: tuple[Action, ...]
    waits: tuple[Wait, ...] = ()
    end: str | None = None
    """Why the whole fleet must come down; the keeper stores this before it deletes anything."""


class ActionResult(NamedTuple):
    action: Action
    operation: str | None
    error: CloudError | None


class CreateResult(NamedTuple):
    key: str
    error: CloudError | None


CloudAnswer = ActionResult | CreateResult


class Event(NamedTuple):
    at: float
    """Unix seconds."""
    pool: str
    machine: str
    """Empty if the event concerns the whole pool."""
    kind: str
    """asked, ready, preempted, lost, gone, unhealthy, deleting, stopping, starting, growing, refused, job,
    maintenance or clock."""
    text: str
