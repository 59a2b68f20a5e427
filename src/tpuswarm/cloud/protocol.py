"""Define a cloud for a fleet, in our own types, without Google's.

A method that changes something returns at once with the name of an operation. `machines` shows its result, and
`outcome` its error. Every method may raise any CloudError.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

from tpuswarm.catalog import Api
from tpuswarm.cloud.errors import CloudError

How = Literal["spot", "on-demand", "queued", "reserved", "flex-start"]
"""How to get a machine. `queued` waits in line for one on demand, `reserved` draws on a reservation, `flex-start` waits
for one that runs for a limited time."""
State = Literal["waiting", "creating", "ready", "repairing", "stopping", "stopped", "starting", "deleting", "dead"]
"""`waiting`: in a queue, nothing exists yet. `repairing`: the cloud restarts or repairs it. `dead`: it will not come
back (PREEMPTED, TERMINATED, SUSPENDED, FAILED) and must be deleted."""
SSH_KEYS = "ssh-keys"
"""Metadata key for who may log in, one USER:KEY per line."""
ENV_VARS = "tensorflow-env-vars"
"""Metadata key of a TPU; its service tpu-runtime reads it at the start, if it has that service."""
ENV_VARS_NEW = "tpuswarm-env-vars-new"
"""Metadata key that is TRUE from before a change of ENV_VARS until that service has restarted."""
FLEET_LABEL, POOL_LABEL = "tpuswarm-fleet", "tpuswarm-pool"
"""Labels of all resources of a fleet: its random id, and the pool."""
REMAINS = "REMAINS"
"""`said` of a machine whose hosts are gone: another deletion removes what is left of it."""
ADDRESSES, INSTANCES = REGION_QUOTAS = "IN_USE_ADDRESSES", "INSTANCES"
"""Quotas that Compute Engine has for a region: external addresses, and machines. Each host of a TPU takes one."""


class Worker(NamedTuple):
    """The addresses of one host; None: it has none (yet)."""

    internal: str | None
    external: str | None
    name: str | None = None
    """The instance's name in Compute Engine; None: the machine's own."""


class Disk(NamedTuple):
    """An existing data disk."""

    name: str
    read_only: bool


@dataclass(frozen=True)
class TpuSpec:
    """A TPU to create: one slice of any number of hosts."""

    name: str
    zone: str
    type: str
    """The catalogue's name, such as v5e-8."""
    how: How
    fleet: str
    pool: str
    runtime: str
    """A runtime version of the TPU API, or an image PROJECT/FAMILY of Compute Engine."""
    api: Api = "tpu"
    network: str = "default"
    subnetwork: str | None = None
    external_ips: bool = True
    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """Added to the fleet's own."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    """None: the project's default account."""
    disks: tuple[Disk, ...] = ()
    reservation: str | None = None
    wait_s: float | None = None
    """The cloud gives up a request that waits after so long. With spot: wait in line, None: at once or not at all."""
    max_run_s: float | None = None
    """The cloud deletes a flex-start machine after so long."""

    @property
    def is_queued(self) -> bool:
        """Whether the TPU API gets a queued resource."""
        return self.api == "tpu" and (self.how in ("queued", "reserved") or self.wait_s is not None)


@dataclass(frozen=True)
class VmSpec:
    """A plain VM to create: a swarm's head, or a router."""

    name: str
    zone: str
    type: str
    """Such as n2-highmem-8."""
    fleet: str
    pool: str
    """`head`, or the name of a [[vm]]."""
    image: str
    """PROJECT/FAMILY."""
    disk_gib: int
    network: str = "default"
    subnetwork: str | None = None
    external_ips: bool = True
    ip_forward: bool = False
    spot: bool = False
    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    ends: float | None = None
    """Unix seconds when the cloud deletes it. The TPU API has no such option."""

    api: ClassVar[Api] = "compute"

    @property
    def how(self) -> How:
        return "spot" if self.spot else "on-demand"

    @property
    def disk_type(self) -> str | None:
        """The boot disk's type, whose price the catalog has. None: series from 4 on take Hyperdisk only, by default."""
        series = re.match(r"[a-z]+(\d)", self.type)
        return None if series and int(series[1]) >= 4 else "pd-balanced"


Spec = TpuSpec | VmSpec


@dataclass(frozen=True)
class Machine:
    """A machine of the project, in a fleet or not."""

    __pydantic_config__: ClassVar = {"arbitrary_types_allowed": True}  # for `error`, which is never stored

    name: str
    zone: str
    kind: Literal["tpu", "vm"]
    type: str
    """The catalogue's name, or the cloud's if the catalogue lacks it."""
    state: State
    said: str
    """The cloud's word for the state."""
    why: str = ""
    """The cloud's reason for bad health or failure."""
    healthy: bool | None = None
    """None: unknown, for example because it is not ready."""
    symptoms: tuple[str, ...] = ()
    """Problems that the cloud noticed; a healthy machine may have some."""
    how: How = "on-demand"
    api: Api = "tpu"
    """The API that a TPU was created through."""
    created: float = 0.0
    """Unix seconds."""
    workers: tuple[Worker, ...] = ()
    """By number."""
    labels: Mapping[str, str] = field(default_factory=dict)
    runtime: str | None = None
    """A TPU's image; None: unknown, or a VM."""
    metadata: Mapping[str, str] | None = field(default=None, compare=False)
    """None: unknown. Never stored."""
    disk_gib: int | None = None
    """The size of a VM's boot disk; None: unknown, or a TPU."""
    runtime_env: str | None = field(default="", compare=False)
    """Its metadata ENV_VARS; None: its service may still run with older ones."""
    request: str | None = None
    """Its queued request; deleting the machine deletes it too."""
    error: CloudError | None = field(default=None, compare=False)
    """Why the cloud gave up the queued request, if known."""

    @property
    def state_word(self) -> str:
        """The state; of a dead machine the cloud's word, such as `preempted`."""
        return self.said.lower() if self.state == "dead" else self.state

    @property
    def fleet(self) -> str | None:
        """The id of the fleet that made it; None: no fleet."""
        return self.labels.get(FLEET_LABEL)

    @property
    def pool(self) -> str | None:
        return self.labels.get(POOL_LABEL)

    @property
    def is_instance(self) -> bool:
        """Whether it is an instance of Compute Engine: a plain VM, or a TPU created there."""
        return self.kind == "vm" or self.api == "compute"

    @property
    def spot(self) -> bool:
        """Whether it can be preempted."""
        return self.how == "spot"


class Listing(NamedTuple):
    """All known machines of a project."""

    machines: tuple[Machine, ...]
    unreachable: frozenset[str]
    """Zones and regions that did not answer; their machines are unknown."""


class Outcome(NamedTuple):
    """The state of an operation."""

    done: bool
    error: CloudError | None


class Stored(NamedTuple):
    """An object of a bucket, and its generation."""

    data: bytes
    generation: int


class Bucket(Protocol):
    """Objects with conditional writes."""

    def read(self, path: str) -> Stored | None:
        """Return the object; None if there is none."""

    def write(self, path: str, data: bytes, generation: int) -> int:
        """Write if the object's generation is this one (0: no object); return the new one. Raises Changed."""


class Provider(Protocol):
    """A project on a cloud."""

    @property
    def project(self) -> str:
        """The project's id."""

    def machines(self, zones: Iterable[str]) -> Listing:
        """Return all machines of the project in all zones, and the queued requests of `zones` as waiting machines.

        The number of calls may grow with `zones`, but not with machines.
        """

    def create(self, spec: Spec) -> str:
        """Begin to create a machine."""

    def delete(self, machine: Machine) -> str:
        """Begin to delete a machine and its queued request. Raises NotFound if it is gone."""

    def stop(self, machine: Machine) -> str:
        """Begin to stop a machine; then only its disk costs money. Raises Invalid if the cloud cannot stop it."""

    def start(self, machine: Machine) -> str:
        """Begin to start a stopped machine."""

    def grow_disk(self, machine: Machine, gib: int) -> str:
        """Begin to grow a VM's boot disk. Its file system grows when it boots."""

    def outcome(self, operation: str) -> Outcome:
        """Return the state of an operation; one that the cloud has forgotten is done."""

    def types(self, zone: str) -> Sequence[str]:
        """Return the TPU types that the zone offers to this project, by the TPU API's names."""

    def runtimes(self, zone: str) -> Sequence[str]:
        """Return the runtime versions that the zone offers."""

    def set_metadata(self, machine: Machine, metadata: Mapping[str, str]) -> str:
        """Begin to set keys of a machine's metadata; other keys stay."""

    def guest_attributes(self, machine: Machine, worker: int, path: str) -> Mapping[str, str]:
        """Return the values that a host published under `path`, such as its SSH host keys under `hostkeys/`."""

    def bucket(self, name: str) -> Bucket:
        """Return a bucket; its first read raises NotFound if it does not exist."""
