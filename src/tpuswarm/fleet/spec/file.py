"""swarm.toml: the machines of a fleet, what they may cost, what covers them, and what is set up on them."""

import tomllib
from collections.abc import Callable
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, model_validator

from tpuswarm.catalog import find, generations
from tpuswarm.cloud.protocol import FLEET_LABEL, How
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.toml_file import Name, StrictTable, match_pattern, read_toml
from tpuswarm.config.train_table import Train
from tpuswarm.config.units import parse_seconds
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.names import ALL, ZONE_PATTERN
from tpuswarm.plan.flags import NAME
from tpuswarm.remote.setup.table import Setup

DEFAULT_FILE = Path("swarm.toml")
MAX_MACHINES = 1_000
"""Machines of a pool: a thousand is ten times the largest fleet we know of, ten thousand is a slip of the finger."""
HEAD = "head"
LABEL_PREFIX = FLEET_LABEL.partition("-")[0]


def _said(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A parser whose InputError is the sentence of a field."""

    def check(value: Any) -> Any:
        try:
            return parse(value)
        except InputError as error:
            raise ValueError(str(error)) from error

    return check


def _moment(value: Any) -> float:
    """Unix seconds of a date (its first moment in UTC), or of a date and time."""
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


Zone = Annotated[str, match_pattern(ZONE_PATTERN.pattern, "a zone such as us-central1-f")]
Tag = Annotated[str, match_pattern(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "a network tag of small letters, digits and -")]
Label = Annotated[str, match_pattern(r"[a-z0-9_-]{0,63}", "small letters, digits, - and _, at most 63")]
Key = Annotated[
    str,
    match_pattern(
        rf"(?!{LABEL_PREFIX})[a-z][a-z0-9_-]{{0,62}}",
        f"a label such as owner, which does not begin with {LABEL_PREFIX}",
    ),
]
TpuType = Annotated[str, AfterValidator(_said(lambda text: find(text).name))]
MachineType = Annotated[str, match_pattern(r"[a-z0-9]+-[a-z0-9-]+", "a machine type such as n2-highmem-8")]
Image = Annotated[
    str, match_pattern(r"[a-z0-9.:-]+/[a-z0-9-]+", "PROJECT/FAMILY such as ubuntu-os-cloud/ubuntu-2404-lts-amd64")
]
ProjectId = Annotated[str, match_pattern(r"[a-z][a-z0-9.:-]{4,61}[a-z0-9]", "a project's id such as my-project-123")]
Moment = Annotated[float, BeforeValidator(_moment)]
Seconds = Annotated[float, BeforeValidator(_said(lambda value: parse_seconds(value, "it")))]
MachineCount = Annotated[int, Field(strict=True), AfterValidator(_machine_count)]


def _generation(name: str) -> str:
    known = [ALL, *(each.name for each in generations())]
    if name not in known:
        raise ValueError(f"there is no generation {name!r}; {did_you_mean(name, known)}")
    return name


def _value(value: Any) -> Any:
    """As a flag has it: TOML's true and numbers are written without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int | float) else value


FlagName = Annotated[
    str, match_pattern(NAME, "the name of a flag without dashes, such as xla_tpu_scoped_vmem_limit_kib")
]
Flags = dict[FlagName, Annotated[str, BeforeValidator(_value)]]
"""Flags of XLA and libtpu by name."""


class DiskTable(StrictTable):
    """A data disk that exists already."""

    name: Name
    read_only: bool = False


class MachineTable(StrictTable):
    """What TPUs and VMs have in common."""

    network: str = "default"
    subnetwork: str | None = None
    external_ips: bool = True
    tags: tuple[Tag, ...] = ()
    labels: dict[Key, Label] = Field(default_factory=dict)
    metadata: dict[str, str] = Field(default_factory=dict)
    service_account: str | None = None

    @property
    def subnet(self) -> str | None:
        """The subnetwork that it is in; None: the one called `default`.

        The TPU API takes `default` in whatever network, where none is named. A network with one in each region, as
        `tpuswarm init` makes it, calls them like itself.
        """
        return self.subnetwork or (None if self.network == "default" else self.network)


class Pool(MachineTable):
    """[[pool]]: machines that are alike."""

    name: Name
    type: TpuType
    zones: Annotated[tuple[Zone, ...], Field(min_length=1)]
    """In order of preference."""
    count: MachineCount
    how: How = "spot"
    runtime: str | None = None
    """None: the one of its generation."""
    disks: tuple[DiskTable, ...] = ()
    reservation: str | None = None
    wait: Seconds | None = None
    """How long a queued request may wait before the next zone is asked; None: for ever in the last zone, else 4 h."""
    flags: Flags = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> "Pool":
        if len(set(self.zones)) < len(self.zones):
            raise ValueError("zones has the same zone twice")
        if (self.how == "reserved") != (self.reservation is not None):
            raise ValueError('how = "reserved" and a reservation go together: give both or neither')
        if self.wait is not None and self.how != "queued":
            raise ValueError(
                f'wait is for how = "queued", and this pool is {self.how}: a machine comes at once or fails'
            )
        if writable := [each.name for each in self.disks if not each.read_only]:
            machines = f"{self.count} machines" if self.count > 1 else ""
            hosts = f"the {find(self.type).hosts} hosts of a {self.type}" if find(self.type).hosts > 1 else ""
            if several := machines or hosts:
                raise ValueError(f"disk {writable[0]} cannot be written by {several}: set read_only = true")
        return self


class Grant(StrictTable):
    """[[grant]]: TPUs that cost nothing."""

    type: TpuType
    zone: Zone
    how: Literal["spot", "on-demand"]
    count: Annotated[int, Field(strict=True, ge=1)]
    expires: Moment | None = None
    """Unix seconds; from then on they are paid for."""


class HeadTable(MachineTable):
    """[head]: the VM of a swarm's coordinator, and of the keeper; never spot."""

    type: MachineType
    zone: Zone
    image: Image = "ubuntu-os-cloud/ubuntu-2404-lts-amd64"
    disk_gib: Annotated[int, Field(strict=True, ge=10, le=65_536)] = 100


class Vm(HeadTable):
    """[[vm]]: a plain VM."""

    name: Name
    ip_forward: bool = False
    spot: bool = False
    role: Literal["router"] | None = None

    @model_validator(mode="after")
    def _forwards(self) -> "Vm":
        if self.role == "router" and not self.ip_forward:
            raise ValueError('role = "router" needs ip_forward = true: Google drops what a VM passes on for others')
        return self


class BudgetTable(StrictTable):
    """[budget]: dollars."""

    per_hour: PositiveFloat | None = None
    total: PositiveFloat | None = None
    traffic_per_day: PositiveFloat | None = None


class Storage(StrictTable):
    """[storage]: the fleet's bucket."""

    bucket: Annotated[
        str,
        AfterValidator(lambda text: text.removeprefix("gs://").rstrip("/")),
        match_pattern(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", "a bucket's name such as my-swarm"),
    ]
    region: str | None = None
    """Where it lies: us-central1, or us for one in several regions."""
    project: ProjectId | None = None
    """What it is of, where that is another project than the machines are of."""


class DownWhen(StrictTable):
    """When a fleet comes down by itself: exactly one is set."""

    done: bool = False
    idle_s: float | None = None
    at: float | None = None
    """Unix seconds."""

    @property
    def text(self) -> str:
        """As a person writes it."""
        if self.at is not None:
            return f"{datetime.fromtimestamp(self.at, UTC):%Y-%m-%d %H:%M} UTC"
        return "done" if self.done else f"idle {self.idle_s / 60:g}m"  # type: ignore[operator]  # one is set


def _down_when(value: Any) -> Any:
    if value == "done":
        return DownWhen(done=True)
    if isinstance(value, str) and value.startswith("idle"):
        return DownWhen(idle_s=_said(lambda text: parse_seconds(text, "the time after idle"))(value[4:]))
    try:
        return DownWhen(at=_moment(value))
    except ValueError:
        raise ValueError(f'"done", "idle 30m" or a date such as 2026-12-24, not {value!r}') from None


class SwarmFile(StrictTable):
    """The whole file."""

    name: Name
    provider: Literal["google", "rehearsal"] = "google"
    project: ProjectId | None = None
    """None: of the environment or gcloud's configuration."""
    down_when: Annotated[DownWhen | None, BeforeValidator(_down_when)] = None
    allow_cross_region: bool = False
    pool: tuple[Pool, ...] = ()
    grant: tuple[Grant, ...] = ()
    head: HeadTable | None = None
    vm: tuple[Vm, ...] = ()
    flags: dict[Annotated[str, AfterValidator(_generation)], Flags] = Field(default_factory=dict)
    """By generation, or for `all`."""
    budget: BudgetTable = BudgetTable()
    storage: Storage | None = None
    setup: Setup | None = None
    train: Train | None = None
    """What is trained on its pools."""

    @model_validator(mode="after")
    def _something(self) -> "SwarmFile":
        if not (self.pool or self.vm or self.head):
            raise ValueError("there is neither a [[pool]] nor a [[vm]] nor a [head], so it asks for no machine")
        return self


def read_swarm(path: Path) -> SwarmFile:
    """The file; InputError, a sentence that names the line, for anything that is not right in it.

    Whether its tables go together, and with today's date, is for `checks.problem`.
    """
    if not path.exists() and path == DEFAULT_FILE:
        raise InputError("there is no swarm.toml here: `tpuswarm init` writes one, or name the file")
    return read_toml(path, SwarmFile)


def asks_for_machines(path: Path) -> bool:
    """Return whether a TOML file is a fleet's, and not that of a training on this computer."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the command that reads the file reports the error
    return any(name in tables for name in ("pool", "head", "vm", "provider"))
