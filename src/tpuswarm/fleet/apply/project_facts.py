"""Collect the facts for the preflight checks."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tpuswarm.catalog import APIS
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import CloudError, Denied
from tpuswarm.cloud.google.accounts import Grantee
from tpuswarm.cloud.protocol import Listing, Machine
from tpuswarm.fleet.spec.file import SwarmFile, VmTable

if TYPE_CHECKING:
    from tpuswarm.cloud.google.accounts import Lack
    from tpuswarm.cloud.google.firewall import Rule
    from tpuswarm.cloud.google.project import BucketSettings, Project, RegionQuota, Subnetwork
    from tpuswarm.cloud.google.provider import GoogleProvider
    from tpuswarm.cloud.google.quotas import Quota

T = TypeVar("T")
MAX_THREADS = 16
AUTOMATIC_RANGE = "10.128.0.0/20"
"""Of an automatic subnetwork; all have this size (https://cloud.google.com/vpc/docs/subnets)."""


class NetworkKey(NamedTuple):
    network: str
    subnetwork: str | None
    region: str


@dataclass(frozen=True)
class ProjectFacts:
    project: str
    apis: frozenset[str] | CloudError
    """Enabled APIs. Any error except `Denied` means that nothing else was asked."""
    billing: str | CloudError | None = None
    quotas: "tuple[Quota, ...] | CloudError" = ()
    types: Mapping[str, tuple[str, ...] | CloudError] = field(default_factory=dict)
    """The cloud's names of TPU types, by zone."""
    runtimes: Mapping[str, tuple[str, ...] | CloudError] = field(default_factory=dict)
    machine_types: Mapping[str, tuple[str, ...] | CloudError] = field(default_factory=dict)
    """Compute Engine's, by zone."""
    images: Mapping[str, bool | CloudError] = field(default_factory=dict)
    """Whether Compute Engine has each image PROJECT/FAMILY of the pools."""
    bucket: "BucketSettings | CloudError | None" = None
    """None if there is no bucket, or the file names none."""
    subnetworks: "Mapping[NetworkKey, Subnetwork | CloudError | None]" = field(default_factory=dict)
    region_quotas: "Mapping[str, Mapping[str, RegionQuota] | CloudError]" = field(default_factory=dict)
    """Compute Engine's quotas by region and name."""
    nats: Mapping[NetworkKey, bool | CloudError] = field(default_factory=dict)
    """Whether machines without external addresses reach the internet."""
    own: tuple[Machine, ...] = ()
    """The fleet's machines that exist already and have not ended."""
    rules: "tuple[Rule, ...] | CloudError" = ()
    account: str | CloudError | None = None
    """The default service account."""
    user: str | None = None
    """Email address of the credentials in use."""
    lacks: "Mapping[str, tuple[Lack, ...] | CloudError]" = field(default_factory=dict)
    """The roles that each service account of the file lacks."""
    may_use: Mapping[str, bool | CloudError] = field(default_factory=dict)
    """Whether the user may create machines with each service account."""
    os_login: bool | CloudError = False
    """Whether an organisation's policy turns OS Login on for all machines."""

    @property
    def denies_all(self) -> bool:
        """Whether the project does not exist, or belongs to somebody else."""
        answers = (*self.types.values(), *self.machine_types.values())
        return isinstance(self.apis, CloudError) and all(isinstance(answer, Denied) for answer in answers)


def collect_facts(google: "GoogleProvider", project: "Project", file: SwarmFile) -> ProjectFacts:
    apis = _answer_or_error(project.apis)
    if isinstance(apis, CloudError) and not isinstance(apis, Denied):
        return ProjectFacts(project.id, apis)
    zones = sorted({zone for pool in file.pool for zone in pool.zones})
    by_api = {
        api: sorted({zone for pool in file.pool if pool.chosen_api == api for zone in pool.zones}) for api in APIS
    }
    image_names = sorted({pool.image for pool in file.pool if pool.chosen_api == "compute"})
    keys = sorted(network_keys(file), key=str)
    with ThreadPoolExecutor(MAX_THREADS) as threads:

        def ask(question: Callable[..., T], *about: object) -> Callable[[], T | CloudError]:
            return threads.submit(_answer_or_error, question, *about).result

        billing, quotas = ask(project.billing), ask(project.quotas, [api for api in APIS if by_api[api]])
        types = {zone: ask(lambda zone: tuple(google.types(zone)), zone) for zone in by_api["tpu"]}
        runtimes = {zone: ask(lambda zone: tuple(google.runtimes(zone)), zone) for zone in by_api["tpu"]}
        vm_zones = {zone for _, table, zones in file.machine_tables if isinstance(table, VmTable) for zone in zones}
        machine_types = {zone: ask(project.machine_types, zone) for zone in sorted({*by_api["compute"], *vm_zones})}
        images = {image: ask(project.has_image, image) for image in image_names}
        storage = file.storage
        bucket = ask(project.find_bucket, storage.bucket, storage.project) if storage else lambda: None
        subnetworks = {key: ask(project.subnetwork, key.network, key.region, key.subnetwork) for key in keys}
        regions = sorted({key.region for key in keys})
        region_quotas = {region: ask(project.region_quotas, region) for region in regions}
        listing = ask(google.machines, zones)
        nats = {key: ask(project.has_nat, key.network, key.region) for key in keys}
        rules, account, os_login = ask(project.rules), ask(project.default_account), ask(project.forces_os_login)
        default = account()
        grantees = {
            name: Grantee(name, project.id, storage.bucket if storage else None)
            for name in account_names(file, default)
        }
        may_use = {name: ask(project.accounts.may_use, grantee) for name, grantee in grantees.items()}
        lacks = {
            name: ask(lambda grantee, needs: tuple(project.accounts.missing(grantee, needs)), grantee, needs)
            for name, grantee in grantees.items()
            if (needs := needed_resources(file, name, default))
        }
        return ProjectFacts(
            project.id,
            apis,
            billing(),
            quotas(),
            {zone: answer() for zone, answer in types.items()},
            {zone: answer() for zone, answer in runtimes.items()},
            {zone: answer() for zone, answer in machine_types.items()},
            {image: answer() for image, answer in images.items()},
            bucket(),
            {key: answer() for key, answer in subnetworks.items()},
            {region: answer() for region, answer in region_quotas.items()},
            {key: answer() for key, answer in nats.items()},
            _own_machines(listing(), file.name),
            rules(),
            default,
            project.user,
            {name: answer() for name, answer in lacks.items()},
            {name: answer() for name, answer in may_use.items()},
            os_login(),
        )


def with_network(facts: ProjectFacts, network: str, rules: "Iterable[Rule]") -> ProjectFacts:
    """Return the facts as they are once a network with automatic subnetworks and these rules exists."""
    from tpuswarm.cloud.google.project import Subnetwork

    subnetworks = {
        key: Subnetwork(AUTOMATIC_RANGE, True) if key.network == network and found is None else found
        for key, found in facts.subnetworks.items()
    }
    known = facts.rules if isinstance(facts.rules, CloudError) else (*facts.rules, *rules)
    return replace(facts, subnetworks=subnetworks, rules=known)


def _own_machines(listing: Listing | CloudError, name: str) -> tuple[Machine, ...]:
    """Return the living machines of fleets with this name, whose ids are NAME-LETTERS."""
    living = () if isinstance(listing, CloudError) else (one for one in listing.machines if one.state != "dead")
    return tuple(machine for machine in living if (machine.fleet or "").rpartition("-")[0] == name)


def account_names(file: SwarmFile, default: str | CloudError | None) -> list[str]:
    """Return the service accounts of the file's machines; without the default one if it is unknown."""
    names = {table.service_account or default for _, table, _ in file.machine_tables}
    return sorted(name for name in names if isinstance(name, str))


def needed_resources(file: SwarmFile, account: str, default: str | CloudError | None) -> list[str]:
    """Return what machines with an account work with: all have the bucket, and the head creates machines."""
    is_heads = file.head is not None and (file.head.service_account or default) == account
    return [*(["bucket"] if file.storage else []), *(["project", "account"] if is_heads else [])]


def network_keys(file: SwarmFile) -> set[NetworkKey]:
    return {
        NetworkKey(table.network, table.subnet, region_of(zone))
        for _, table, zones in file.machine_tables
        for zone in zones
    }


def _answer_or_error(question: Callable[..., T], *about: object) -> T | CloudError:
    try:
        return question(*about)
    except CloudError as error:
        return error
