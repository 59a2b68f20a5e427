"""Check everything that must be right before the first machine is created."""

import ipaddress
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tpuswarm.catalog import find, generations, machines
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import CloudError, Denied, NotSignedIn, Unreachable
from tpuswarm.cloud.google import firewall
from tpuswarm.cloud.google.accounts import Binding, Grantee
from tpuswarm.cloud.google.failures import member_of, quota_page
from tpuswarm.cloud.google.project import APIS, BILLING_API
from tpuswarm.cloud.google.quotas import allowance, quota_units
from tpuswarm.cloud.google.settings import gcloud_account
from tpuswarm.cloud.protocol import ADDRESSES, REGION_QUOTAS, Machine
from tpuswarm.config.nearest import nearest_name
from tpuswarm.config.units import GIB
from tpuswarm.fleet.apply.project_facts import NetworkKey, ProjectFacts, account_names
from tpuswarm.fleet.decide import money
from tpuswarm.fleet.spec.checks import read_price
from tpuswarm.fleet.spec.desired_from_file import list_grants
from tpuswarm.fleet.spec.file import HeadTable, MachineTable, Pool, SwarmFile, VmTable
from tpuswarm.train.storage.credentials import used_credentials

UNLIMITED_COUNT = 10**6
NAT_PAGE = "https://cloud.google.com/nat/docs/set-up-manage-network-address-translation"
OPTIONAL_APIS = (
    *(BILLING_API, "cloudquotas.googleapis.com", "cloudresourcemanager.googleapis.com"),
    *("iam.googleapis.com", "iamcredentials.googleapis.com"),
)
RESERVED_ADDRESSES = 4
"""Google keeps these for itself in every range."""


class Check(NamedTuple):
    id: str
    ok: bool
    sentence: str
    mend: str = ""
    """The command, or the line of swarm.toml, that fixes it."""
    known: bool = True
    """False if the user may not ask the cloud: assumed to be right, the first creation will tell."""


Verdict = str | tuple[str, str]
"""A sentence if the check passes, otherwise a sentence and a remedy."""
P = ParamSpec("P")
T = TypeVar("T")


def _check(id_: str, optional: bool = False) -> Callable[[Callable[P, Verdict]], Callable[P, Check]]:
    """Turn a verdict, or an error of the cloud, into a check.

    `optional`: project members may lack the permission to ask, and create machines all the same.
    """

    def decorate(judge: Callable[P, Verdict]) -> Callable[P, Check]:
        @wraps(judge)
        def run(*args: P.args, **kwargs: P.kwargs) -> Check:
            try:
                verdict = judge(*args, **kwargs)
            except CloudError as error:
                if optional and isinstance(error, Denied):
                    return Check(id_, True, f"could not be checked: {error}", known=False)
                sentence, _, remedy = str(error).partition("; ")
                return Check(id_, False, sentence, remedy)
            return Check(id_, True, verdict) if isinstance(verdict, str) else Check(id_, False, *verdict)

        return run

    return decorate


def _answer(answer: T | CloudError) -> T:
    if isinstance(answer, CloudError):
        raise answer
    return answer


def run_checks(
    file: SwarmFile, facts: ProjectFacts, now: float, paid: bool, head_bytes: float | None = None
) -> list[Check]:
    """Run all checks, and return those that pass, too.

    `now`: Unix seconds; `paid`: TPUs outside of grants may cost money; `head_bytes`: the head's memory for the model.
    """
    checks = list(_access(facts))
    if not all(check.ok for check in checks):
        return checks
    checks += [_billing(facts), _apis(facts)]
    if not all(check.ok for check in checks):
        return checks  # nothing else can be asked
    for pool in file.pool:
        checks.append(_quota(pool, facts))
        offers = facts.machine_types if pool.chosen_api == "compute" else facts.types
        zones = [zone for zone in pool.zones if not isinstance(offers[zone], CloudError)] or pool.zones
        for zone in pool.zones:
            if zone not in zones:
                checks.append(Check("zone", True, f"{zone} is left out now: {offers[zone]}", known=False))
        checks += [_type(pool, zone, facts) for zone in zones]
        if pool.chosen_api == "compute":
            checks.append(_image(pool.image, facts))
        else:
            checks += dict.fromkeys(_runtime(pool, zone, facts) for zone in zones)
    vms = [(name, table) for name, table, _ in file.machine_tables if isinstance(table, VmTable)]
    checks += [_vm_type(name, vm, facts) for name, vm in vms]
    checks += [_bucket(file, file.storage.bucket, facts)] if file.storage else []
    checks += [_addresses(file, key, facts) for key in facts.subnetworks]
    checks += [_region_quota(file, quota, facts) for quota in REGION_QUOTAS]
    checks += _firewalls(file, facts)
    checks += [*_accounts(file, facts), _policy(facts), *_price(file, now, paid)]
    checks += [_head(file.head, head_bytes)] if file.head and head_bytes is not None else []
    return checks


def _access(facts: ProjectFacts) -> Iterator[Check]:
    error = facts.apis if isinstance(facts.apis, CloudError) else None
    if isinstance(error, NotSignedIn):
        yield Check("credentials", False, str(error), used_credentials(gcloud_account()).remedy)
        return
    if isinstance(error, Unreachable):
        yield Check("credentials", False, str(error), "check the network of this computer and try again")
        return
    yield Check("credentials", True, "signed in to Google Cloud")
    if error is None or not facts.denies_all:
        yield Check("project", True, f"project {facts.project} can be reached")
    elif isinstance(error, Denied):
        yield Check("project", False, str(error), f"gcloud projects describe {facts.project}")
    else:
        remedy = f"gcloud projects list names yours, gcloud projects create {facts.project} makes one"
        yield Check("project", False, str(error), remedy)


@_check("billing", optional=True)
def _billing(facts: ProjectFacts) -> Verdict:
    if account := _answer(facts.billing):
        return f"billing account {account} pays for project {facts.project}"
    remedy = f"gcloud billing projects link {facts.project} --billing-account=ACCOUNT"
    return f"no billing account is linked to project {facts.project}", remedy


@_check("apis", optional=True)
def _apis(facts: ProjectFacts) -> Verdict:
    enabled = _answer(facts.apis)
    missing = [api for api in APIS if api not in enabled and api not in OPTIONAL_APIS]
    if not missing:
        return "the APIs that machines need are on"
    names = ", ".join(APIS[api] for api in missing)
    remedy = shlex.join(["gcloud", "services", "enable", *missing, f"--project={facts.project}"])
    return f"not on in project {facts.project}: {names}", remedy


@_check("quota", optional=True)
def _quota(pool: Pool, facts: ProjectFacts) -> Verdict:
    if pool.how == "reserved":
        return "a reservation includes its quota"
    api, how = pool.chosen_api, "" if pool.how in ("on-demand", "queued") else f"{pool.how} "
    quotas, units = _answer(facts.quotas), quota_units(pool.type, api)
    allowances = {zone: allowance(quotas, pool.type, pool.how, zone, api) for zone in pool.zones}
    known = {zone: found for zone, found in allowances.items() if found}
    fits = sum(found.limit // units for found in {*known.values()})
    if len(known) < len(allowances) or fits >= pool.count:
        count = f"for {fits:,} of them" if fits < UNLIMITED_COUNT else "without limit"
        quota = f"{', '.join(known)} has quota {count}" if known else "Google does not tell the quota"
        return f"pool {pool.name} wants {pool.count} {pool.type}: {quota}"
    limits = "; ".join(f"{zone}: {found.limit} ({found.quota})" for zone, found in known.items())
    return (
        f"pool {pool.name} wants {pool.count} {how}{pool.type}, each takes {units} of the quota; the project may have "
        f"{limits}",
        f"ask for more at {quota_page(facts.project)}, take another zone{f', or set count = {fits}' if fits else ''}",
    )


@_check("type")
def _type(pool: Pool, zone: str, facts: ProjectFacts) -> Verdict:
    tpu = find(pool.type)
    if pool.chosen_api == "compute":
        is_offered = tpu.machine_type in _answer(facts.machine_types[zone])
    else:
        is_offered = tpu.api_name in _answer(facts.types[zone])
    if is_offered:
        return f"{zone} offers {pool.type}"
    others = [other for other in tpu.zones() if other != zone]
    remedy = f"take one of the zones that have it: {', '.join(others)}" if others else "take another type"
    return f"{zone} offers no {pool.type} to project {facts.project}", remedy


@_check("type", optional=True)
def _vm_type(name: str, vm: VmTable, facts: ProjectFacts) -> Verdict:
    offered = _answer(facts.machine_types[vm.zone])
    if vm.type in offered:
        return f"{vm.zone} offers {vm.type}"
    return f"{vm.zone} offers no {vm.type}, the type of {name}", f'type = "{nearest_name(vm.type, offered) or "…"}"'


@_check("image", optional=True)
def _image(image: str, facts: ProjectFacts) -> Verdict:
    if _answer(facts.images[image]):
        return f"Compute Engine has image {image}"
    project, _, family = image.partition("/")
    remedy = f"gcloud compute images list --project={project} --no-standard-images --filter=family:{family[:12]}"
    return f"Compute Engine has no image {image}", f"{remedy} lists others for `runtime`"


@_check("runtime")
def _runtime(pool: Pool, zone: str, facts: ProjectFacts) -> Verdict:
    usual = find(pool.type).generation.runtime or ""
    runtime = pool.runtime or usual
    others = [generation.name for generation in generations() if generation.runtime == runtime]
    if runtime != usual and others:
        sentence = f"runtime {runtime} is for {', '.join(others)}, and pool {pool.name} is of {pool.type}"
        return sentence, f'runtime = "{usual}"'
    offered = _answer(facts.runtimes[zone])
    if runtime in offered:
        return f"{zone} has runtime {runtime}"
    kind = (runtime.startswith("tpu-vm-tf"), "-pod" in runtime)
    same_kind = [other for other in offered if (other.startswith("tpu-vm-tf"), "-pod" in other) == kind]
    usual = usual if usual in (same_kind or offered) else ""
    suggestion = usual or nearest_name(runtime, same_kind) or nearest_name(runtime, offered) or "…"
    return f"{zone} has no runtime {runtime}", f'runtime = "{suggestion}"'


@_check("bucket", optional=True)
def _bucket(file: SwarmFile, name: str, facts: ProjectFacts) -> Verdict:
    regions = list(dict.fromkeys(region_of(zone) for pool in file.pool for zone in pool.zones))
    settings = _answer(facts.bucket)
    if settings is None:
        location = regions[0] if regions else "REGION"
        remedy = f"gcloud storage buckets create gs://{name} --project={facts.project} --location={location}"
        return f"there is no bucket {name}", remedy
    region, update = settings.region, f"gcloud storage buckets update gs://{name}"
    if settings.has_retention:
        remedy = f"{update} --clear-retention-period, or use another bucket"
        return f"bucket {name} has a retention policy, so no run in it can be renewed", remedy
    if settings.requester_pays:
        remedy = f"{update} --no-requester-pays, or use another bucket"
        return f"bucket {name} requires requesters to pay, which tpuswarm does not support", remedy
    far = [other for other in regions if other != region]
    if not far or file.allow_cross_region:
        days = settings.soft_delete_s / 86400
        bills = f"; it keeps and bills deleted objects for {days:.0f} days: `{update} --clear-soft-delete` ends that"
        return f"bucket {name} lies in {region}{bills if days else ''}"
    price = read_price(far[0], region)
    sentence = f"bucket {name} lies in {region}, and TPUs in {', '.join(far)}: each GiB read there costs {price}"
    return sentence, f"make a bucket in {far[0]} and name it in [storage], or write allow_cross_region = true"


@_check("addresses")
def _addresses(file: SwarmFile, key: NetworkKey, facts: ProjectFacts) -> Verdict:
    tables = [
        table
        for _, table, zones in file.machine_tables
        if any(key == NetworkKey(table.network, table.subnet, region_of(zone)) for zone in zones)
    ]
    hosts = sum(map(_host_count, tables))
    where, name = f"network {key.network} in {key.region}", key.subnetwork or key.network
    subnetwork, options = _answer(facts.subnetworks[key]), f"{name} --region={key.region}"
    if subnetwork is None:
        make = f"gcloud compute networks subnets create {name} --network={key.network} --region={key.region}"
        remedy = f"{make} --range=10.200.0.0/20 --project={facts.project}"
        return f"{where} has no subnetwork {name}, and so no addresses, or does not exist", remedy
    if not subnetwork.reaches_google and not all(table.external_ips for table in tables):
        sentence = f"{where} lets machines without an external address reach neither buckets nor the TPU service"
        update = f"gcloud compute networks subnets update {options} --project={facts.project}"
        return sentence, f"{update} --enable-private-ip-google-access"
    room = ipaddress.ip_network(subnetwork.addresses).num_addresses - RESERVED_ADDRESSES
    if room >= hosts:
        return f"{where} has {room:,} addresses for {hosts:,} hosts"
    remedy = f"gcloud compute networks subnets expand-ip-range {options} --prefix-length=20"
    return f"{where} has {room:,} addresses ({subnetwork.addresses}) for {hosts:,} hosts", remedy


@_check("region", optional=True)
def _region_quota(file: SwarmFile, quota: str, facts: ProjectFacts) -> Verdict:
    """Compare the hosts of the file with a quota of its regions; a pool may go to any of its own."""
    tables = [
        (frozenset(map(region_of, zones)), _host_count(table))
        for _, table, zones in file.machine_tables
        if table.external_ips or quota != ADDRESSES
    ]
    quotas = {region: _answer(answer).get(quota) for region, answer in facts.region_quotas.items()}
    known = {region: found for region, found in quotas.items() if found is not None}
    what = "external addresses" if quota == ADDRESSES else "machines"
    verdicts: list[str] = []
    choices = {regions for regions, _ in tables}
    for regions in sorted({*choices, frozenset[str]().union(*choices)}, key=sorted):
        if not regions or not regions.issubset(known):
            continue
        hosts = sum(count for choice, count in tables if choice <= regions)
        limit = sum(known[region].limit for region in regions)
        own = sum(_taken(machine, quota) for machine in facts.own if region_of(machine.zone) in regions)
        free = own + sum(max(0, known[region].limit - known[region].usage) for region in regions)
        names = ", ".join(sorted(regions))
        need = f"{hosts:,} hosts need one each" if hosts > 1 else "one host needs one"
        sentence = f"{names}: {free:,} of {limit:,} {what} are free or the fleet's, and {need}"
        if free < hosts:
            return f"{sentence} (quota {quota})", _region_remedy(file, quota, free, facts)
        verdicts.append(sentence)
    return "; ".join(verdicts) or f"the hosts take no {what}, or Google does not tell how many are free"


def _taken(machine: Machine, quota: str) -> int:
    """Return how much of a region's quota a machine takes."""
    return len([worker for worker in machine.workers if worker.external or quota != ADDRESSES])


def _region_remedy(file: SwarmFile, quota: str, free: int, facts: ProjectFacts) -> str:
    others = f"{free:,} hosts at most, another region, or more at {quota_page(facts.project)}"
    if quota != ADDRESSES:
        return others
    has_nat = facts.nats and all(nat is True for nat in facts.nats.values())
    nat = "" if has_nat else f", with Cloud NAT for what they download ({NAT_PAGE})"
    has_vm = any(isinstance(table, VmTable) and table.external_ips for _, table, _ in file.machine_tables)
    vm = "" if has_vm else ", with a [head] or [[vm]] to reach them through"
    return f"external_ips = false in [[pool]]{nat}{vm}; or {others}"


def _host_count(table: MachineTable) -> int:
    return table.count * find(table.type).hosts if isinstance(table, Pool) else 1


def _firewalls(file: SwarmFile, facts: ProjectFacts) -> list[Check]:
    tables = [table for _, table, _ in file.machine_tables]
    if sum(map(_host_count, tables)) == 1:
        return [Check("firewall", True, "a single machine needs no firewall rule")]
    return [_firewall(file, network, facts) for network in sorted({table.network for table in tables})]


@_check("firewall")
def _firewall(file: SwarmFile, network: str, facts: ProjectFacts) -> Verdict:
    tag, rules = firewall.network_tag(file.name), _answer(facts.rules)
    if strangers := firewall.rules_open_to_strangers(rules, network, [tag]):
        rule, problem = strangers[0]
        delete = f"gcloud compute firewall-rules delete {rule.name} --project={facts.project}"
        return (
            f"{problem}: processes of Ray and JAX listen on all addresses and obey anybody",
            f'{delete}, or network = "{tag}" in the file, a network of the fleet\'s own that `tpuswarm init` makes; '
            "without a file: --network NAME",
        )
    if not firewall.opens_all_ports(rules, network, [tag]):
        wanted = firewall.fleet_rules(network, tag, f"tpuswarm {file.name}")[0]
        sentence = f"no firewall rule of network {network} lets the fleet's machines (tag {tag}) reach each other"
        return sentence, wanted.gcloud(facts.project)
    return f"network {network} connects the fleet's machines and admits no others"


def _accounts(file: SwarmFile, facts: ProjectFacts) -> Iterator[Check]:
    if not all(table.service_account for _, table, _ in file.machine_tables):
        yield from [] if isinstance(facts.account, str) else [_default_account(facts)]
    for name in account_names(file, facts.account):
        yield _account(file, name, facts)


@_check("account", optional=True)
def _default_account(facts: ProjectFacts) -> Verdict:
    _answer(facts.account)
    create = f"gcloud iam service-accounts create tpuswarm --project={facts.project}"
    return (
        f"project {facts.project} has no default service account for its machines",
        f"{create}, and service_account = its address",
    )


@_check("account", optional=True)
def _account(file: SwarmFile, name: str, facts: ProjectFacts) -> Verdict:
    grantee = Grantee(name, facts.project, file.storage.bucket if file.storage else None)
    if not _answer(facts.may_use.get(name, True)):
        binding = Binding("account", "roles/iam.serviceAccountUser", member_of(facts.user))
        return f"you may not create machines with service account {name}", grantee.gcloud(binding)
    if lacks := _answer(facts.lacks.get(name, ())):
        permissions = ", ".join(permission for lack in lacks for permission in lack.permissions)
        sentence = f"machines use service account {name}, which lacks {permissions}"
        return sentence, " && ".join(grantee.gcloud(lack.binding) for lack in lacks)
    return f"machines use service account {name}, which may do what they need"


@_check("policy")
def _policy(facts: ProjectFacts) -> Verdict:
    if isinstance(facts.os_login, CloudError):  # few users may ask, and few projects have an organisation
        return f"whether a policy turns OS Login on could not be asked: {facts.os_login}"
    if not facts.os_login:
        return "no policy turns OS Login on"
    return (
        f"an organisation's policy turns OS Login on for all machines of project {facts.project}, so none would accept "
        "the fleet's SSH key; whoever set the policy can lift it",
        f"gcloud resource-manager org-policies disable-enforce compute.requireOsLogin --project={facts.project}",
    )


def _price(file: SwarmFile, now: float, paid: bool) -> Iterator[Check]:
    grants = list_grants(file)
    cover, rate, outside = money.GrantCover(grants, now), money.Rate(), Counter[str]()
    for pool in file.pool:
        for _ in range(pool.count):
            if not any(map(cover.claim, pool.wanted)):
                prices = [money.tpu_price(pool.type, zone, pool.how == "spot") for zone in pool.zones]
                rate = rate.plus(max((price for price in prices if price is not None), default=None))
                outside[f"{pool.type} of pool {pool.name}"] += 1
    for _, table, _ in file.machine_tables:
        if isinstance(table, VmTable):
            rate = rate.plus(money.vm_price(table.type, table.zone, getattr(table, "spot", False), table.disk_gib))
    if outside and grants and not paid:
        tpus = ", ".join(f"{count} {what}" for what, count in outside.items())
        yield Check("grants", False, f"no grant covers {tpus}: {rate.hour} an hour", "--paid, or a smaller count")
    limit = file.budget.per_hour
    if limit is not None and rate.dollars > limit:
        sentence = f"the file asks for {rate.hour} an hour, its budget is {money.format_dollars(limit)}"
        yield Check("price", False, sentence, f"per_hour = {rate.dollars:.2f} in [budget], or fewer machines")
    else:
        yield Check("price", True, f"this costs {rate.hour} an hour, {rate.day} a day, while everything runs")


@_check("head")
def _head(head: HeadTable, needed_bytes: float) -> Verdict:
    known = {machine.name: machine for machine in machines()}
    needed_gib = needed_bytes / GIB
    if head.type not in known:
        return f"the head needs {needed_gib:.0f} GiB; the memory of a {head.type} is unknown"
    memory_gib = known[head.type].memory_gib
    if memory_gib >= needed_gib:
        return f"the head needs {needed_gib:.0f} GiB, and a {head.type} has {memory_gib:.0f}"

    def price(machine: Any) -> float:
        found = machine.price(head.zone)
        return found.on_demand if found and found.on_demand else float("inf")

    larger = min((machine for machine in known.values() if machine.memory_gib >= needed_gib), key=price, default=None)
    sentence = f"the head needs {needed_gib:.0f} GiB for this model, and a {head.type} has {memory_gib:.0f}"
    return sentence, f'type = "{larger.name}" in [head]' if larger else "train a smaller model"
