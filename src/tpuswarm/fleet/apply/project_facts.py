"""What preflight judges, asked of the cloud."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import CloudError, Denied
from tpuswarm.fleet.spec.file import MachineTable, SwarmFile

if TYPE_CHECKING:
    from tpuswarm.cloud.google.firewall import Rule
    from tpuswarm.cloud.google.project import Project, Subnetwork
    from tpuswarm.cloud.google.provider import Google
    from tpuswarm.cloud.google.quotas import Quota

T = TypeVar("T")


class NetworkKey(NamedTuple):
    """Where machines get their addresses."""

    network: str
    subnetwork: str | None
    region: str


@dataclass(frozen=True)
class ProjectFacts:
    """Answers; an error of the cloud stands in the place of one that it did not give."""

    project: str
    apis: frozenset[str] | CloudError
    """Those that are on. With an error here that is not `Denied` nothing else was asked."""
    billing: str | CloudError | None = None
    quotas: "tuple[Quota, ...] | CloudError" = ()
    types: Mapping[str, tuple[str, ...] | CloudError] = field(default_factory=dict)
    """TPU types under the cloud's names, by zone."""
    runtimes: Mapping[str, tuple[str, ...] | CloudError] = field(default_factory=dict)
    """Runtime versions, by zone."""
    bucket: str | CloudError | None = None
    """The region of the bucket; None: there is none, or the file names none."""
    subnetworks: "Mapping[NetworkKey, Subnetwork | CloudError | None]" = field(default_factory=dict)
    """None: the network has none there."""
    rules: "tuple[Rule, ...] | CloudError" = ()
    account: str | CloudError | None = None
    """The project's default service account; None: it has none."""
    os_login: bool | CloudError = False
    """Whether a policy of an organisation turns OS Login on for all machines."""

    @property
    def denies_all(self) -> bool:
        """Whether nothing may be asked of the project: it is somebody else's, or there is none of that name."""
        return isinstance(self.apis, CloudError) and all(isinstance(each, Denied) for each in self.types.values())


def collect_facts(google: "Google", project: "Project", file: SwarmFile) -> ProjectFacts:
    """Everything that `preflight.checks` judges of this file; questions are asked side by side."""
    apis = _asked(project.apis)
    if isinstance(apis, CloudError) and not isinstance(apis, Denied):
        return ProjectFacts(project.id, apis)
    zones = sorted({zone for pool in file.pool for zone in pool.zones})
    nets = sorted(network_keys(file), key=str)
    with ThreadPoolExecutor(16) as pool:

        def ask(question: Callable[..., T], *about: object) -> Callable[[], T | CloudError]:
            return pool.submit(_asked, question, *about).result

        billing, quotas = ask(project.billing), ask(project.quotas)
        types = {zone: ask(google.types, zone) for zone in zones}
        runtimes = {zone: ask(google.runtimes, zone) for zone in zones}
        stored = file.storage
        where = ask(project.bucket_region, stored.bucket, stored.project) if stored else lambda: None
        subnetworks = {net: ask(project.subnetwork, net.network, net.region, net.subnetwork) for net in nets}
        rules, account, os_login = ask(project.rules), ask(project.default_account), ask(project.forces_os_login)
        return ProjectFacts(
            project=project.id,
            apis=apis,
            billing=billing(),
            quotas=quotas(),
            types={zone: _tuple(get()) for zone, get in types.items()},
            runtimes={zone: _tuple(get()) for zone, get in runtimes.items()},
            bucket=where(),
            subnetworks={net: get() for net, get in subnetworks.items()},
            rules=rules(),
            account=account(),
            os_login=os_login(),
        )


def machine_tables(file: SwarmFile) -> list[tuple[str, MachineTable, tuple[str, ...]]]:
    """Everything that asks for machines: its name as the file has it, its table, its zones."""
    found: list[tuple[str, MachineTable, tuple[str, ...]]] = [
        (f"pool {each.name}", each, each.zones) for each in file.pool
    ]
    found += [("the head", file.head, (file.head.zone,))] if file.head else []
    return found + [(f"vm {each.name}", each, (each.zone,)) for each in file.vm]


def network_keys(file: SwarmFile) -> set[NetworkKey]:
    """Networks, by region, in which the file has machines."""
    return {
        NetworkKey(table.network, table.subnet, region_of(zone))
        for _, table, zones in machine_tables(file)
        for zone in zones
    }


def _asked(question: Callable[..., T], *about: object) -> T | CloudError:
    try:
        return question(*about)
    except CloudError as error:
        return error


def _tuple(answer: Iterable[str] | CloudError) -> tuple[str, ...] | CloudError:
    return answer if isinstance(answer, CloudError) else tuple(answer)
