"""The tables of swarm.toml: machines, budget, grants, set-up and training."""

import re
import tomllib
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, model_validator

from tpuswarm.catalog import APIS, Api, accelerators, find, generations
from tpuswarm.catalog.accelerators import ACCESSES
from tpuswarm.cloud.protocol import FLEET_LABEL, How
from tpuswarm.config.nearest import did_you_mean, nearest_name
from tpuswarm.config.toml_file import Name, StrictTable, match_pattern, read_toml
from tpuswarm.config.train_table import Train
from tpuswarm.config.units import parse_seconds
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import DownWhen
from tpuswarm.fleet.decide.money import is_generation
from tpuswarm.fleet.decide.names import ALL, ZONE_PATTERN
from tpuswarm.plan.flags import FLAG_NAME_PATTERN
from tpuswarm.remote.setup.table import Setup

DEFAULT_FILE = Path("swarm.toml")
MAX_MACHINES = 1_000
HEAD = "head"
LABEL_PREFIX = FLEET_LABEL.partition("-")[0]


def _validated(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Turn a parser's InputError into the ValueError that pydantic expects."""

    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except InputError as error:
            raise ValueError(str(error)) from error

    return validate


def _unix_seconds(value: Any) -> float:
    """Parse a date (midnight in UTC), or a date and time."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"a date such as 2026-12-24, not {value!r}") from None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC).timestamp()
    raise ValueError(f"a date such as 2026-12-24, not {value!r}")


def _machine_count(count: int) -> int:
    if not 1 <= count <= MAX_MACHINES:
        way_out = "leave the pool out for none" if count < 1 else "make several pools for more"
        raise ValueError(f"1 to {MAX_MACHINES:,} machines, not {count:,}; {way_out}")
    return count


def _zone(text: str) -> str:
    if not ZONE_PATTERN.fullmatch(text):
        known = {zone for tpu in accelerators() for access in ACCESSES for zone in tpu.zones(access)}
        near = nearest_name(re.sub(r"l(?=-)", "1", text), known)  # us-centrall-f
        raise ValueError(f"a zone such as us-central1-f, not {text!r}" + (f"; did you mean {near}?" if near else ""))
    return text


def _generation(name: str) -> str:
    known = [ALL, *(generation.name for generation in generations())]
    if name not in known:
        raise ValueError(f"there is no generation {name!r}; {did_you_mean(name, known)}")
    return name


def _flag_value(value: Any) -> Any:
    """Accept numbers and true or false without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int | float) else value


def _max_run(value: Any) -> float:
    """Parse the run time of a flex-start machine: https://docs.cloud.google.com/compute/docs/instances/flex-start-vms"""
    seconds = float(_validated(lambda text: parse_seconds(text, "max_run"))(value))
    if not 600 <= seconds <= 7 * 86_400:
        raise ValueError(f"10 minutes to 7 days, not {value!r}")
    return seconds


def _down_when(value: Any) -> Any:
    if value == "done":
        return DownWhen(done=True)
    if isinstance(value, str) and value.startswith("idle"):
        return DownWhen(idle_s=_validated(lambda text: parse_seconds(text, "the time after idle"))(value[4:]))
    try:
        return DownWhen(at=_unix_seconds(value))
    except ValueError:
        raise ValueError(f'"done", "idle 30m" or a date such as 2026-12-24, not {value!r}') from None


Zone = Annotated[str, AfterValidator(_zone)]
Tag = Annotated[str, match_pattern(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "a network tag of small letters, digits and -")]
LabelValue = Annotated[str, match_pattern(r"[a-z0-9_-]{0,63}", "small letters, digits, - and _, at most 63")]
LabelKey = Annotated[
    str,
    match_pattern(
        rf"(?!{LABEL_PREFIX})[a-z][a-z0-9_-]{{0,62}}",
        f"a label such as owner, which does not begin with {LABEL_PREFIX}",
    ),
]
TpuType = Annotated[str, AfterValidator(_validated(lambda text: find(text).name))]
GrantedType = Annotated[str, AfterValidator(_validated(lambda text: text if is_generation(text) else find(text).name))]
MachineType = Annotated[str, match_pattern(r"[a-z0-9]+-[a-z0-9-]+", "a machine type such as n2-highmem-8")]
IMAGE_PATTERN = r"[a-z0-9.:-]+/[a-z0-9-]+"
IMAGE_EXAMPLE = "PROJECT/FAMILY such as ubuntu-os-cloud/ubuntu-2404-lts-amd64"
Image = Annotated[str, match_pattern(IMAGE_PATTERN, IMAGE_EXAMPLE)]
ProjectId = Annotated[str, match_pattern(r"[a-z][a-z0-9.:-]{4,61}[a-z0-9]", "a project's id such as my-project-123")]
UnixSeconds = Annotated[float, BeforeValidator(_unix_seconds)]
Seconds = Annotated[float, BeforeValidator(_validated(lambda value: parse_seconds(value, "it")))]
MachineCount = Annotated[int, Field(strict=True), AfterValidator(_machine_count)]
FlagName = Annotated[
    str, match_pattern(FLAG_NAME_PATTERN, "the name of a flag without dashes, such as xla_tpu_scoped_vmem_limit_kib")
]
Flags = dict[FlagName, Annotated[str, BeforeValidator(_flag_value)]]


class DiskTable(StrictTable):
    """One of a pool's disks."""

    name: Name
    """A persistent disk in the zones of the pool."""
    read_only: bool = False
    """Required if several hosts share the disk."""


class MachineTable(StrictTable):
    """Keys of all machines, as in Google's API."""

    network: str = "default"
    """The VPC network; `tpuswarm init` makes one of the fleet's own."""
    subnetwork: str | None = None
    """The subnetwork; by default the one with the network's name."""
    external_ips: bool = True
    """Whether workers get addresses that the internet can reach."""
    tags: tuple[Tag, ...] = ()
    """Network tags, which firewall rules name."""
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Labels of your own, for the bill."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Metadata that programs on the machine can read."""
    service_account: str | None = None
    """The account as which programs on the machine act."""

    @property
    def subnet(self) -> str | None:
        """The subnetwork to request; None: the one called `default`.

        Without a name, the TPU API uses `default` in any network. A network with automatic subnetworks, such as
        `tpuswarm init` makes, names them like itself.
        """
        return self.subnetwork or (None if self.network == "default" else self.network)


class PoolTpu(NamedTuple):
    """A TPU of a pool in one of its zones."""

    type: str
    zone: str
    how: How
    api: Api


class Pool(MachineTable):
    """[[pool]]: equal machines."""

    name: Name
    """What commands call the pool."""
    type: TpuType
    """Any name of `tpuswarm catalog`. A slice such as `v3-32` is one machine."""
    zones: Annotated[tuple[Zone, ...], Field(min_length=1)]
    """In order of preference. A zone without capacity is skipped; a healthy machine stays where it is."""
    count: MachineCount = 1
    """1 to 1,000. `tpuswarm up --scale NAME=5` overrides it until the next `up`."""
    how: How = "spot"
    """`spot` is cheap and can be preempted. `on-demand` comes at once or not at all. `queued` waits in line for an
    on-demand machine. `reserved` draws on the `reservation` you name. `flex-start` (Compute Engine) waits for a machine
    that runs for `max_run`."""
    api: Api | None = None
    """Which of Google's APIs creates the machines: `tpu` or `compute`; by default the type's usual one."""
    runtime: str | None = None
    """The image; by default the usual one for the generation."""
    disks: tuple[DiskTable, ...] = ()
    """Data disks to attach."""
    reservation: str | None = None
    """The name of the reservation, with `how = "reserved"`."""
    wait: Seconds | None = None
    """How long a request waits in line before the next zone is asked, 4 hours by default; in the last zone forever.
    `spot` of the TPU API waits only with it; a flex-start request of one host is made again after 2 hours."""
    max_run: Annotated[float, BeforeValidator(_max_run)] | None = None
    """How long a flex-start machine runs, 10 minutes to 7 days, the default."""
    flags: Flags = Field(default_factory=dict)
    """XLA's and libtpu's flags for this pool."""
    role: Literal["member", "both"] = "member"
    """What a training runs there: `both` adds room for aggregators, so that the head's network carries less."""

    @property
    def chosen_api(self) -> Api:
        return self.api or ("compute" if self.how == "flex-start" else find(self.type).apis[0])

    @property
    def image(self) -> str:
        """The runtime version of the TPU API, or the image PROJECT/FAMILY of Compute Engine."""
        return self.runtime or find(self.type).image(self.chosen_api)

    @property
    def wanted(self) -> tuple[PoolTpu, ...]:
        """Its TPU in each zone."""
        return tuple(PoolTpu(self.type, zone, self.how, self.chosen_api) for zone in self.zones)

    @model_validator(mode="after")
    def _check(self) -> "Pool":
        tpu = find(self.type)
        if self.chosen_api not in tpu.apis:
            others = " or ".join(f'"{api}"' for api in tpu.apis)
            raise ValueError(f"{APIS[self.chosen_api]} has no {self.type}: write api = {others}, or leave api out")
        if self.chosen_api == "compute" and self.how == "queued":
            raise ValueError('Compute Engine has no queued resources: how = "flex-start" waits in line there')
        if self.chosen_api == "tpu" and self.how == "flex-start":
            raise ValueError('how = "flex-start" is for api = "compute": the TPU API\'s clients lack it')
        if self.max_run is not None and self.how != "flex-start":
            raise ValueError('max_run is for how = "flex-start"')
        if self.chosen_api == "compute" and self.runtime and not re.fullmatch(IMAGE_PATTERN, self.runtime):
            raise ValueError(f"Compute Engine boots an image {IMAGE_EXAMPLE}, not the runtime {self.runtime!r}")
        if len(set(self.zones)) < len(self.zones):
            raise ValueError("zones has the same zone twice")
        if (self.how == "reserved") != (self.reservation is not None):
            raise ValueError('how = "reserved" and a reservation go together: give both or neither')
        can_wait = self.how in ("queued", "flex-start") or (self.how == "spot" and self.chosen_api == "tpu")
        if self.wait is not None and not can_wait:
            raise ValueError(f"wait is for queued, flex-start, and spot of the TPU API, and this pool is {self.how}")
        if writable := [disk.name for disk in self.disks if not disk.read_only]:
            type_hosts = find(self.type).hosts
            machines = f"{self.count} machines" if self.count > 1 else ""
            hosts = f"the {type_hosts} hosts of a {self.type}" if type_hosts > 1 else ""
            if machines or hosts:
                raise ValueError(f"disk {writable[0]} cannot be written by {machines or hosts}: set read_only = true")
        return self


class Grant(StrictTable):
    """[[grant]]: TPUs that cost nothing."""

    type: GrantedType
    """A TPU type, or a generation such as `v6e`: then `count` counts chips. From v4 on two `v4-8` cover one `v4-16`."""
    zone: Zone
    """Where."""
    how: Literal["spot", "on-demand"]
    """Which of the two the grant is for."""
    count: Annotated[int, Field(strict=True, ge=1)]
    """How many of the type."""
    expires: UnixSeconds | None = None
    """The day it ends, at 00:00 UTC."""


class VmTable(MachineTable):
    """A VM without a TPU."""

    type: MachineType
    """Google's machine type."""
    zone: Zone
    """Where the VM stands."""
    image: Image = "ubuntu-os-cloud/ubuntu-2404-lts-amd64"
    """PROJECT/FAMILY of the image."""
    disk_gib: Annotated[int, Field(strict=True, ge=10, le=65_536)] = 100
    """Size of the boot disk; it can grow later."""


class HeadTable(VmTable):
    """[head]: the VM of the swarm's coordinator and of the keeper; never spot."""

    listen: bool = False
    """Whether people with an invite may train along from anywhere: opens port 8443 of the head to everybody."""

    @model_validator(mode="after")
    def _check(self) -> "HeadTable":
        if self.listen and not self.external_ips:
            raise ValueError("listen = true needs external_ips = true: members from anywhere reach the head by it")
        return self


class Vm(VmTable):
    name: Name
    """What commands call the VM."""
    ip_forward: bool = False
    """Whether it may forward packets."""
    spot: bool = False
    """Whether it can be preempted."""
    role: Literal["router", "aggregators"] | None = None
    """The fleet's router forwards ports to TPU workers. A VM for aggregators takes them off a training's head."""
    ports: Annotated[tuple[Annotated[int, Field(strict=True, ge=1, le=65_535)], ...], Field(min_length=1)] = (22,)
    """The ports of each TPU worker that a router forwards to."""

    @model_validator(mode="after")
    def _check(self) -> "Vm":
        if len(set(self.ports)) < len(self.ports):
            raise ValueError("ports has the same port twice")
        if self.ports != (22,) and self.role != "router":
            raise ValueError('ports is for role = "router"')
        if self.role == "router" and not self.ip_forward:
            raise ValueError('role = "router" needs ip_forward = true: Google drops packets that a VM forwards')
        return self


class BudgetTable(StrictTable):
    """[budget]: limits of the keeper."""

    per_hour: PositiveFloat | None = None
    """Dollars an hour: nothing is created beyond it."""
    total: PositiveFloat | None = None
    """Dollars: at this sum everything is deleted."""
    traffic_per_day: PositiveFloat | None = None
    """Dollars: no TPU is created while the last 24 hours cost more."""


class Storage(StrictTable):
    """[storage]: the bucket of the fleet."""

    bucket: Annotated[
        str,
        AfterValidator(lambda text: text.removeprefix("gs://").rstrip("/")),
        match_pattern(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", "a bucket's name such as my-swarm"),
    ]
    """The bucket of the fleet's document and of runs."""
    region: str | None = None
    """The bucket's region, to check that reading it from the pools is free."""
    project: ProjectId | None = None
    """The bucket's project, if it is not the machines' project."""


class SwarmFile(StrictTable):
    """The whole file."""

    name: Name
    """The fleet's name."""
    provider: Literal["google", "rehearsal"] = "google"
    """`rehearsal` is the local cloud."""
    project: ProjectId | None = None
    """Google's project; by default that of the environment or of gcloud's configuration."""
    down_when: Annotated[DownWhen | None, BeforeValidator(_down_when)] = None
    """When the keeper deletes everything: `"done"` (all jobs have ended), `"idle 30m"`, or a date."""
    allow_cross_region: bool = False
    """Whether pools may read a bucket of another region, at a price."""
    pool: tuple[Pool, ...] = ()
    """Equal machines."""
    grant: tuple[Grant, ...] = ()
    """TPUs that cost nothing."""
    head: HeadTable | None = None
    """The VM of the swarm's coordinator and of the keeper."""
    vm: tuple[Vm, ...] = ()
    """Other plain VMs."""
    flags: dict[Annotated[str, AfterValidator(_generation)], Flags] = Field(default_factory=dict)
    """XLA's and libtpu's flags by generation (`v5e`), or for `all`."""
    budget: BudgetTable = BudgetTable()
    """Limits that the keeper enforces."""
    storage: Storage | None = None
    """The bucket."""
    setup: Setup | None = None
    """What every machine gets before anything runs."""
    train: Train | None = None
    """What `tpuswarm train swarm.toml` trains."""

    @model_validator(mode="after")
    def _check(self) -> "SwarmFile":
        if not (self.pool or self.vm or self.head):
            raise ValueError("there is neither a [[pool]] nor a [[vm]] nor a [head], so it asks for no machine")
        return self

    @property
    def machine_tables(self) -> list[tuple[str, MachineTable, tuple[str, ...]]]:
        """All tables that request machines, head and VMs first: name, table and zones."""
        vms: list[tuple[str, VmTable]] = [(HEAD, self.head)] if self.head else []
        vms += [(vm.name, vm) for vm in self.vm]
        return [*((name, vm, (vm.zone,)) for name, vm in vms), *((pool.name, pool, pool.zones) for pool in self.pool)]


def read_swarm(path: Path) -> SwarmFile:
    """Read the file. Raise InputError with the line of a mistake; `checks.check_file` compares the tables."""
    if not path.exists() and path == DEFAULT_FILE:
        raise InputError("there is no swarm.toml here: `tpuswarm init` writes one, or name the file")
    return read_toml(path, SwarmFile)


def asks_for_machines(path: Path) -> bool:
    """Return whether a TOML file describes a fleet."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return False  # the command that reads the file reports the error
    return any(name in tables for name in ("pool", "head", "vm", "provider"))
