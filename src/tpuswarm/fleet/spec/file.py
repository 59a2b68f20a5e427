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
    name: Name
    read_only: bool = False


class MachineTable(StrictTable):
    network: str = "default"
    subnetwork: str | None = None
    external_ips: bool = True
    tags: tuple[Tag, ...] = ()
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    metadata: dict[str, str] = Field(default_factory=dict)
    service_account: str | None = None

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
    type: TpuType
    zones: Annotated[tuple[Zone, ...], Field(min_length=1)]
    count: MachineCount = 1
    how: How = "spot"
    api: Api | None = None
    """None: the type's default."""
    runtime: str | None = None
    disks: tuple[DiskTable, ...] = ()
    reservation: str | None = None
    wait: Seconds | None = None
    """How long a queued request waits before the next zone is tried; None: 4 h, in the last zone without limit."""
    max_run: Annotated[float, BeforeValidator(_max_run)] | None = None
    """How long a flex-start machine runs; None: seven days."""
    flags: Flags = Field(default_factory=dict)

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
    """A generation, such as v6e: `count` counts chips."""
    zone: Zone
    how: Literal["spot", "on-demand"]
    count: Annotated[int, Field(strict=True, ge=1)]
    expires: UnixSeconds | None = None


class HeadTable(MachineTable):
    """[head]: the VM of the swarm's coordinator and of the keeper; never spot."""

    type: MachineType
    zone: Zone
    image: Image = "ubuntu-os-cloud/ubuntu-2404-lts-amd64"
    disk_gib: Annotated[int, Field(strict=True, ge=10, le=65_536)] = 100


class Vm(HeadTable):
    name: Name
    ip_forward: bool = False
    spot: bool = False
    role: Literal["router"] | None = None
    ports: Annotated[tuple[Annotated[int, Field(strict=True, ge=1, le=65_535)], ...], Field(min_length=1)] = (22,)
    """The ports of each TPU worker that a router forwards to; 22: SSH."""

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
    per_hour: PositiveFloat | None = None
    total: PositiveFloat | None = None
    traffic_per_day: PositiveFloat | None = None


class Storage(StrictTable):
    bucket: Annotated[
        str,
        AfterValidator(lambda text: text.removeprefix("gs://").rstrip("/")),
        match_pattern(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", "a bucket's name such as my-swarm"),
    ]
    region: str | None = None
    project: ProjectId | None = None
    """The bucket's project, if it is not the machines' project."""


class SwarmFile(StrictTable):
    name: Name
    provider: Literal["google", "rehearsal"] = "google"
    project: ProjectId | None = None
    """By default from the environment or gcloud's configuration."""
    down_when: Annotated[DownWhen | None, BeforeValidator(_down_when)] = None
    allow_cross_region: bool = False
    pool: tuple[Pool, ...] = ()
    grant: tuple[Grant, ...] = ()
    head: HeadTable | None = None
    vm: tuple[Vm, ...] = ()
    flags: dict[Annotated[str, AfterValidator(_generation)], Flags] = Field(default_factory=dict)
    budget: BudgetTable = BudgetTable()
    storage: Storage | None = None
    setup: Setup | None = None
    train: Train | None = None

    @model_validator(mode="after")
    def _check(self) -> "SwarmFile":
        if not (self.pool or self.vm or self.head):
            raise ValueError("there is neither a [[pool]] nor a [[vm]] nor a [head], so it asks for no machine")
        return self

    @property
    def machine_tables(self) -> list[tuple[str, MachineTable, tuple[str, ...]]]:
        """All tables that request machines, head and VMs first: name, table and zones."""
        vms: list[tuple[str, HeadTable]] = [(HEAD, self.head)] if self.head else []
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
