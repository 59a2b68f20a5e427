"""What a fleet asks of a cloud, in our own types. Nothing here knows which of Google's APIs answers.

A verb that changes something starts it and returns at once with the name of an operation; `machines` shows what came of
it, and `outcome` why nothing did. Every verb may raise any CloudError.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol

from tpuswarm.cloud.errors import CloudError

How = Literal["spot", "on-demand", "queued", "reserved"]
"""How a machine is asked for. `queued` waits in line for one on demand, `reserved` draws on a reservation."""
State = Literal["waiting", "creating", "ready", "repairing", "stopping", "stopped", "starting", "deleting", "dead"]
"""`waiting`: in a queue, nothing exists yet. `repairing`: the cloud restarts or mends it. `dead`: it will not come
back, whatever the cloud calls that (PREEMPTED, TERMINATED, SUSPENDED, FAILED), and its remains are to be deleted."""
ENV_VARS = "tensorflow-env-vars"
"""The key of a TPU's metadata that its service tpu-runtime reads as it starts, where it has one."""
ENV_VARS_NEW = "tpuswarm-env-vars-new"
"""The key under which it has TRUE from before what is under ENV_VARS is changed until that service has begun anew."""
FLEET_LABEL, POOL_LABEL = "tpuswarm-fleet", "tpuswarm-pool"
"""Labels of everything that a fleet makes: its random id, and the pool."""


class Worker(NamedTuple):
    """One host of a machine: its addresses; None where it has none (yet)."""

    internal: str | None
    external: str | None


class Disk(NamedTuple):
    """A data disk that exists already."""

    name: str
    read_only: bool


@dataclass(frozen=True)
class TpuSpec:
    """A TPU to be created: one slice, whatever the number of its hosts."""

    name: str
    zone: str
    type: str
    """The catalogue's name: v5e-8."""
    how: How
    fleet: str
    pool: str
    runtime: str
    network: str = "default"
    subnetwork: str | None = None
    external_ips: bool = True
    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """Besides the fleet's own."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """`startup-script` and any other key."""
    service_account: str | None = None
    """None: the project's default one."""
    disks: tuple[Disk, ...] = ()
    reservation: str | None = None
    wait_s: float | None = None
    """A queued request is given up by the cloud after that long."""


@dataclass(frozen=True)
class VmSpec:
    """A plain VM to be created: a swarm's head, a router."""

    name: str
    zone: str
    type: str
    """Machine type: n2-highmem-8."""
    fleet: str
    pool: str
    """`head`, or the name of its [[vm]]."""
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
    """Unix seconds at which the cloud itself deletes it. The TPU API has no such thing."""

    @property
    def how(self) -> How:
        """How it is asked for."""
        return "spot" if self.spot else "on-demand"


Spec = TpuSpec | VmSpec


@dataclass(frozen=True)
class Machine:
    """A machine as the cloud shows it, ours or not."""

    __pydantic_config__: ClassVar = {"arbitrary_types_allowed": True}  # `error`, which is never stored

    name: str
    zone: str
    kind: Literal["tpu", "vm"]
    type: str
    """The catalogue's name where it knows the cloud's, else the cloud's own."""
    state: State
    said: str
    """The cloud's own word for its state."""
    why: str = ""
    """What the cloud says of its health or of why it failed."""
    healthy: bool | None = None
    """None: not known, as of a machine that is not ready."""
    symptoms: tuple[str, ...] = ()
    """What the cloud has noticed of it, which a machine that it calls healthy may have too."""
    how: How = "on-demand"
    created: float = 0.0
    """Unix seconds."""
    workers: tuple[Worker, ...] = ()
    """In the order of their numbers."""
    labels: Mapping[str, str] = field(default_factory=dict)
    runtime_env: str | None = field(default="", compare=False)
    """Its metadata under ENV_VARS; None: its service may run with what was there before."""
    request: str | None = None
    """The queued request that it comes from; deleting the machine deletes that as well."""
    error: CloudError | None = field(default=None, compare=False)
    """Why the cloud gave up a queued request, where it says so."""

    @property
    def fleet(self) -> str | None:
        """The id of the fleet that made it; None: not one of ours."""
        return self.labels.get(FLEET_LABEL)

    @property
    def pool(self) -> str | None:
        """The pool of its fleet."""
        return self.labels.get(POOL_LABEL)

    @property
    def spot(self) -> bool:
        """Whether it may be taken away at any moment."""
        return self.how == "spot"


class Listing(NamedTuple):
    """All machines of a project that could be seen."""

    machines: tuple[Machine, ...]
    unreachable: frozenset[str]
    """Zones that did not answer: their machines are unknown, not absent."""


class Outcome(NamedTuple):
    """Where an operation stands."""

    done: bool
    error: CloudError | None


class Stored(NamedTuple):
    """An object of a bucket, and which one of its generations it is."""

    data: bytes
    generation: int


class Bucket(Protocol):
    """Objects that are written only if nobody else wrote them meanwhile."""

    def read(self, path: str) -> Stored | None:
        """The object; None if there is none."""

    def write(self, path: str, data: bytes, generation: int) -> int:
        """Write it if its generation is still that (0: if there is none); the new generation. Raises `Changed`."""


class Provider(Protocol):
    """A project on a cloud."""

    @property
    def project(self) -> str:
        """Its id."""

    def machines(self, zones: Iterable[str]) -> Listing:
        """All machines of the project, ours or not, in all zones; queued requests of `zones` included.

        A request whose machine does not exist yet is a machine that waits. The number of calls depends on the number
        of `zones` at most, never on that of machines.
        """

    def create(self, spec: Spec) -> str:
        """Begin to create a machine."""

    def delete(self, machine: Machine) -> str:
        """Begin to delete it, and with it the request that it comes from. NotFound if it is gone."""

    def stop(self, machine: Machine) -> str:
        """Begin to stop it, so that only its disk costs money. Invalid for what the cloud cannot stop."""

    def start(self, machine: Machine) -> str:
        """Begin to start what was stopped."""

    def outcome(self, operation: str) -> Outcome:
        """Where an operation stands; one that the cloud has forgotten is done."""

    def types(self, zone: str) -> Sequence[str]:
        """The TPU types that the zone offers to this project, under the cloud's own names."""

    def runtimes(self, zone: str) -> Sequence[str]:
        """The runtime versions that the zone offers."""

    def set_metadata(self, machine: Machine, metadata: Mapping[str, str]) -> str:
        """Begin to set keys of its metadata; the others stay."""

    def guest_attributes(self, machine: Machine, worker: int, path: str) -> Mapping[str, str]:
        """What a host has written down under `path`, as its SSH host keys under `hostkeys/`; empty: nothing yet."""

    def bucket(self, name: str) -> Bucket:
        """A bucket; whether it exists shows at the first read."""
