"""What preflight judges, asked of the cloud."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import CloudError
from tpuswarm.fleet.file import Placed, SwarmFile

if TYPE_CHECKING:
    from tpuswarm.cloud.google.firewall import Rule
    from tpuswarm.cloud.google.project import Project
    from tpuswarm.cloud.google.provider import Google
    from tpuswarm.cloud.google.quotas import Quota

T = TypeVar("T")


class Net(NamedTuple):
    """Where machines get their addresses."""

    network: str
    subnetwork: str | None
    region: str


@dataclass(frozen=True)
class Facts:
    """Answers; an error of the cloud stands in the place of one that it did not give."""

    project: str
    apis: frozenset[str] | CloudError
    """Those that are on. With an error here nothing else was asked."""
    billing: str | CloudError | None = None
    quotas: "tuple[Quota, ...] | CloudError" = ()
    types: Mapping[str, tuple[str, ...] | CloudError] = field(default_factory=dict)
    """TPU types under the cloud's names, by zone."""
    runtimes: Mapping[str, tuple[str, ...] | CloudError] = field(default_factory=dict)
    """Runtime versions, by zone."""
    bucket: str | CloudError | None = None
    """The region of the bucket; None: there is none, or the file names none."""
    ranges: Mapping[Net, str | CloudError | None] = field(default_factory=dict)
    """Addresses such as 10.128.0.0/20; None: the network has none there."""
    rules: "tuple[Rule, ...] | CloudError" = ()
    account: str | CloudError | None = None
    """The project's default service account; None: it has none."""


def collect(google: "Google", project: "Project", file: SwarmFile) -> Facts:
    """Everything that `preflight.checks` judges of this file; questions are asked side by side."""
    apis = _asked(project.apis)
    if isinstance(apis, CloudError):
        return Facts(project.id, apis)
    zones = sorted({zone for pool in file.pool for zone in pool.zones})
    nets = sorted(nets_of(file), key=str)
    bucket = file.storage.bucket if file.storage else None
    with ThreadPoolExecutor(16) as pool:

        def ask(question: Callable[..., T], *about: object) -> Callable[[], T | CloudError]:
            return pool.submit(_asked, question, *about).result

        billing, quotas = ask(project.billing), ask(project.quotas)
        types = {zone: ask(google.types, zone) for zone in zones}
        runtimes = {zone: ask(google.runtimes, zone) for zone in zones}
        where = ask(project.bucket_region, bucket) if bucket else lambda: None
        ranges = {net: ask(project.address_range, net.network, net.region, net.subnetwork) for net in nets}
        rules, account = ask(project.rules), ask(project.default_account)
        return Facts(
            project=project.id,
            apis=apis,
            billing=billing(),
            quotas=quotas(),
            types={zone: _tuple(get()) for zone, get in types.items()},
            runtimes={zone: _tuple(get()) for zone, get in runtimes.items()},
            bucket=where(),
            ranges={net: get() for net, get in ranges.items()},
            rules=rules(),
            account=account(),
        )


def placed(file: SwarmFile) -> list[tuple[str, Placed, tuple[str, ...]]]:
    """Everything that asks for machines: its name as the file has it, its table, its zones."""
    found: list[tuple[str, Placed, tuple[str, ...]]] = [(f"pool {each.name}", each, each.zones) for each in file.pool]
    found += [("the head", file.head, (file.head.zone,))] if file.head else []
    return found + [(f"vm {each.name}", each, (each.zone,)) for each in file.vm]


def nets_of(file: SwarmFile) -> set[Net]:
    """Networks, by region, in which the file has machines."""
    return {Net(table.network, table.subnetwork, region_of(zone)) for _, table, zones in placed(file) for zone in zones}


def _asked(question: Callable[..., T], *about: object) -> T | CloudError:
    try:
        return question(*about)
    except CloudError as error:
        return error


def _tuple(answer: Iterable[str] | CloudError) -> tuple[str, ...] | CloudError:
    return answer if isinstance(answer, CloudError) else tuple(answer)
