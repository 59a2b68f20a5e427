"""What must be right before the first machine is created. Facts in, checks out; `facts` asks for them."""

import ipaddress
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tpuswarm.catalog import find, generations, machines, network
from tpuswarm.catalog.prices import region_of
from tpuswarm.cloud.errors import CloudError, Denied, NotSignedIn, Unreachable
from tpuswarm.cloud.google import firewall
from tpuswarm.cloud.google.failures import SIGN_IN
from tpuswarm.cloud.google.project import APIS, BILLING_API, Subnetwork
from tpuswarm.cloud.google.quotas import allowance, size
from tpuswarm.config.nearest import nearest_name
from tpuswarm.config.units import GIB
from tpuswarm.fleet.apply.project_facts import NetworkKey, ProjectFacts, machine_tables
from tpuswarm.fleet.decide import money
from tpuswarm.fleet.spec.desired_from_file import list_grants
from tpuswarm.fleet.spec.file import MachineTable, Pool, SwarmFile

UNLIMITED_COUNT = 10**6
"""Quota for so many machines is no limit."""
OPTIONAL_APIS = (BILLING_API, "cloudquotas.googleapis.com")
"""APIs without which there is a machine all the same: only what is asked of them stays unknown."""
RESERVED_ADDRESSES = 4
"""Addresses of a range that Google keeps for itself."""


class Check(NamedTuple):
    """One thing that must be right."""

    id: str
    ok: bool
    sentence: str
    """What was found."""
    mend: str = ""
    """The command, or the line of swarm.toml, that puts it right."""
    known: bool = True
    """Else nobody may ask the cloud about it: it is taken for right, and the first creation tells."""


def run_checks(
    file: SwarmFile, facts: ProjectFacts, now: float, paid: bool, head_bytes: float | None = None
) -> list[Check]:
    """All of them, those that are right included. `now`: Unix seconds; `paid`: what no grant covers may cost money.

    `head_bytes`: memory that the head needs for the model, as plan says; None: there is no model yet.
    """
    first = _signed_in(facts)
    if not all(each.ok for each in first):
        return first
    found = [*first, _billing(facts), _apis(facts)]
    if not all(each.ok for each in found):
        return found  # nothing else can be asked then
    for pool in file.pool:
        found += [_quota(pool, facts), *_offers(pool, facts), *_runtimes(pool, facts)]
    found += _bucket(file, facts)
    found += _addresses(file, facts)
    found += _firewall(file, facts)
    found += [_account(facts), _policy(facts), *_price(file, now, paid), *_head(file, head_bytes)]
    return found


def _signed_in(facts: ProjectFacts) -> list[Check]:
    error = facts.apis if isinstance(facts.apis, CloudError) else None
    if isinstance(error, NotSignedIn):
        return [Check("credentials", False, str(error), SIGN_IN.strip("`"))]
    if isinstance(error, Unreachable):
        return [Check("credentials", False, str(error), "check the network of this computer and try again")]
    signed = Check("credentials", True, "signed in to Google Cloud")
    if error is None or not facts.denies_all:
        return [signed, Check("project", True, f"project {facts.project} can be reached")]
    mend = f"gcloud projects describe {facts.project}"
    if not isinstance(error, Denied):
        mend = f"gcloud projects list names yours, gcloud projects create {facts.project} makes one"
    return [signed, Check("project", False, str(error), mend)]


def _billing(facts: ProjectFacts) -> Check:
    mend = f"gcloud billing projects link {facts.project} --billing-account=ACCOUNT"

    def judge(account: str | None) -> Check:
        if account:
            return Check("billing", True, f"billing account {account} pays for project {facts.project}")
        return Check("billing", False, f"no billing account is linked to project {facts.project}", mend)

    return _unless_denied("billing", facts.billing, judge)


def _apis(facts: ProjectFacts) -> Check:
    def judge(on: frozenset[str]) -> Check:
        missing = [api for api in APIS if api not in on and api not in OPTIONAL_APIS]
        if not missing:
            return Check("apis", True, "the APIs that machines need are on")
        named = ", ".join(APIS[api] for api in missing)
        mend = shlex.join(["gcloud", "services", "enable", *missing, f"--project={facts.project}"])
        return Check("apis", False, f"not on in project {facts.project}: {named}", mend)

    return _unless_denied("apis", facts.apis, judge)


def _quota(pool: Pool, facts: ProjectFacts) -> Check:
    spot = pool.how == "spot"

    def judge(quotas: Any) -> Check:
        if pool.how == "reserved":
            return Check("quota", True, "a reservation has its quota with it")
        found = {zone: allowance(quotas, pool.type, spot, zone) for zone in pool.zones}
        known = {zone: each for zone, each in found.items() if each}
        fits = sum(each.limit // size(pool.type) for each in known.values())
        if len(known) < len(found) or fits >= pool.count:
            said = f"for {fits:,} of them" if fits < UNLIMITED_COUNT else "for any number of them"
            told = f"{', '.join(known)} has quota {said}" if known else "what quota there is, Google does not tell"
            return Check("quota", True, f"pool {pool.name} wants {pool.count} {pool.type}: {told}")
        limits = "; ".join(f"{zone}: {each.limit} ({each.quota})" for zone, each in known.items())
        kind = "spot " if spot else ""
        return Check(
            "quota",
            False,
            f"pool {pool.name} wants {pool.count} {kind}{pool.type}, each takes {size(pool.type)} of the quota; the "
            f"project may have {limits}",
            f"ask for more at https://console.cloud.google.com/iam-admin/quotas?project={facts.project}, take another "
            f"zone{f', or set count = {fits}' if fits else ''}",
        )

    return _unless_denied("quota", facts.quotas, judge)


def _offers(pool: Pool, facts: ProjectFacts) -> Iterator[Check]:
    api_name = find(pool.type).api_name
    for zone in pool.zones:

        def judge(types: tuple[str, ...], zone: str = zone) -> Check:
            if api_name in types:
                return Check("type", True, f"{zone} offers {pool.type}")
            others = [each for each in find(pool.type).zones() if each != zone]
            mend = f"take one of the zones that have it: {', '.join(others)}" if others else "take another type"
            return Check("type", False, f"{zone} offers no {pool.type} to project {facts.project}", mend)

        yield _unless_unknown("type", facts.types[zone], judge)


def _runtimes(pool: Pool, facts: ProjectFacts) -> Iterator[Check]:
    usual = find(pool.type).generation.runtime or ""
    runtime = pool.runtime or usual
    others = [each.name for each in generations() if each.runtime == runtime]
    if runtime != usual and others:
        said = f"runtime {runtime} is for {', '.join(others)}, and pool {pool.name} is of {pool.type}"
        yield Check("runtime", False, said, f'runtime = "{usual}"')
        return
    for zone in pool.zones:

        def judge(runtimes: tuple[str, ...], zone: str = zone) -> Check:
            if runtime in runtimes:
                return Check("runtime", True, f"{zone} has runtime {runtime}")
            mend = f'runtime = "{usual if usual in runtimes else nearest_name(runtime, runtimes) or "…"}"'
            return Check("runtime", False, f"{zone} has no runtime {runtime}", mend)

        yield _unless_unknown("runtime", facts.runtimes[zone], judge)


def _bucket(file: SwarmFile, facts: ProjectFacts) -> Iterator[Check]:
    if file.storage is None:
        return
    name = file.storage.bucket
    regions = Counter(region_of(zone) for pool in file.pool for zone in pool.zones)

    def judge(region: str | None) -> Check:
        if region is None:
            where = next(iter(regions), "REGION")
            mend = f"gcloud storage buckets create gs://{name} --project={facts.project} --location={where}"
            return Check("bucket", False, f"there is no bucket {name}", mend)
        far = [each for each in regions if each != region]
        if not far or file.allow_cross_region:
            return Check("bucket", True, f"bucket {name} lies in {region}")
        price = _read(far[0], region)
        said = f"bucket {name} lies in {region}, and TPUs in {', '.join(far)}: each GiB read there costs {price}"
        mend = f"make a bucket in {far[0]} and name it in [storage], or write allow_cross_region = true"
        return Check("bucket", False, said, mend)

    yield _unless_denied("bucket", facts.bucket, judge)


def _read(region: str, bucket: str) -> str:
    near = "-" in bucket and network.continent_of(region) == network.continent_of(bucket)
    price = network.read_price("same continent" if near else "other continent")
    return "what nobody says" if price is None else money.format_dollars(float(price.value))


def _addresses(file: SwarmFile, facts: ProjectFacts) -> Iterator[Check]:
    for net, subnetwork in facts.subnetworks.items():
        inside = [
            table
            for _, table, zones in machine_tables(file)
            if net in {NetworkKey(table.network, table.subnet, region_of(zone)) for zone in zones}
        ]
        needed, hidden = sum(map(_hosts, inside)), not all(table.external_ips for table in inside)

        def judge(
            found: Subnetwork | None, net: NetworkKey = net, needed: int = needed, hidden: bool = hidden
        ) -> Check:
            where, name = f"network {net.network} in {net.region}", net.subnetwork or net.network
            if found is None:
                where += f" has no subnetwork {name}"
                make = f"gcloud compute networks subnets create {name} --network={net.network}"
                mend = f"{make} --region={net.region} --range=10.200.0.0/20 --project={facts.project}"
                return Check("addresses", False, f"{where}, and so no addresses, or does not exist", mend)
            if hidden and not found.reaches_google:
                said = f"{where} lets machines without an external address reach neither buckets nor the TPU service"
                mend = f"gcloud compute networks subnets update {name} --region={net.region} --project={facts.project}"
                return Check("addresses", False, said, f"{mend} --enable-private-ip-google-access")
            room = ipaddress.ip_network(found.addresses).num_addresses - RESERVED_ADDRESSES
            if room >= needed:
                return Check("addresses", True, f"{where} has {room:,} addresses for {needed:,} hosts")
            mend = f"gcloud compute networks subnets expand-ip-range {name} --region={net.region} --prefix-length=20"
            return Check(
                "addresses", False, f"{where} has {room:,} addresses ({found.addresses}) for {needed:,} hosts", mend
            )

        yield _unless_unknown("addresses", subnetwork, judge)


def _hosts(table: MachineTable) -> int:
    return table.count * find(table.type).hosts if isinstance(table, Pool) else 1


def _firewall(file: SwarmFile, facts: ProjectFacts) -> Iterator[Check]:
    own = firewall.tag_of(file.name)
    if sum(_hosts(table) for _, table, _ in machine_tables(file)) == 1:
        yield Check("firewall", True, "a machine alone speaks with no other")
        return
    for net in sorted({table.network for _, table, _ in machine_tables(file)}):

        def judge(rules: Any, net: str = net) -> Check:
            if strangers := firewall.lets_strangers_in(rules, net, [own]):
                rule, sentence = strangers[0]
                said = f"{sentence}: processes of Ray and JAX listen on all addresses and do what they are told"
                delete = f"gcloud compute firewall-rules delete {rule.name} --project={facts.project}"
                mend = f'{delete}, or network = "{own}", a network of the fleet\'s own that `tpuswarm init` makes'
                return Check("firewall", False, said, mend)
            if not firewall.joins(rules, net, [own]):
                said = f"no firewall rule of network {net} lets the fleet's machines (tag {own}) reach each other"
                rule = firewall.wanted(net, own, f"tpuswarm {file.name}")[0]
                return Check("firewall", False, said, rule.gcloud(facts.project))
            return Check("firewall", True, f"network {net} joins the fleet's machines and lets nobody else in")

        yield _unless_unknown("firewall", facts.rules, judge)


def _account(facts: ProjectFacts) -> Check:
    def judge(account: str | None) -> Check:
        if account:
            return Check("account", True, f"machines use {account}, with the scope cloud-platform")
        said = f"project {facts.project} has no default service account for its machines"
        mend = (
            f"gcloud iam service-accounts create tpuswarm --project={facts.project}, and service_account = its address"
        )
        return Check("account", False, said, mend)

    return _unless_denied("account", facts.account, judge)


def _policy(facts: ProjectFacts) -> Check:
    if facts.os_login is True:
        said = f"an organisation's policy turns OS Login on for all machines of project {facts.project}"
        mend = f"gcloud resource-manager org-policies disable-enforce compute.requireOsLogin --project={facts.project}"
        return Check("policy", False, f"{said}, so none would take the fleet's SSH key; who sets it can lift it", mend)
    if isinstance(facts.os_login, CloudError):  # few may ask, and few projects have an organisation: it is no news
        return Check("policy", True, f"whether a policy turns OS Login on could not be asked: {facts.os_login}")
    return Check("policy", True, "no policy turns OS Login on")


def _price(file: SwarmFile, now: float, paid: bool) -> Iterator[Check]:
    grants = list_grants(file)
    cover, rate, outside = money.GrantCover(grants, now), money.Rate(), Counter[str]()
    for pool in file.pool:
        for _ in range(pool.count):
            if not any(cover.claim(pool.type, zone, pool.how) for zone in pool.zones):
                prices = [money.tpu_price(pool.type, zone, pool.how == "spot") for zone in pool.zones]
                rate = rate.plus(max((each for each in prices if each is not None), default=None))
                outside[f"{pool.type} of pool {pool.name}"] += 1
    for vm in [*([file.head] if file.head else []), *file.vm]:
        rate = rate.plus(money.vm_price(vm.type, vm.zone, getattr(vm, "spot", False), vm.disk_gib))
    if outside and grants and not paid:
        named = ", ".join(f"{count} {what}" for what, count in outside.items())
        yield Check("grants", False, f"no grant covers {named}: {rate.hour} an hour", "--paid, or a smaller count")
    limit = file.budget.per_hour
    if limit is not None and rate.dollars > limit:
        said = f"the file asks for {rate.hour} an hour, its budget is {money.format_dollars(limit)}"
        yield Check("price", False, said, f"per_hour = {rate.dollars:.2f} in [budget], or fewer machines")
    else:
        yield Check("price", True, f"this costs {rate.hour} an hour, {rate.day} a day, while all of it runs")


def _head(file: SwarmFile, needed: float | None) -> Iterator[Check]:
    if file.head is None or needed is None:
        return
    known = {each.name: each for each in machines()}
    memory = known[file.head.type].memory_gib * GIB if file.head.type in known else None
    if memory is None:
        yield Check("head", True, f"the head needs {needed / GIB:.0f} GiB; what a {file.head.type} has is not known")
    elif memory >= needed:
        yield Check(
            "head", True, f"the head needs {needed / GIB:.0f} GiB, and a {file.head.type} has {memory / GIB:.0f}"
        )
    else:
        large = [each for each in known.values() if each.memory_gib * GIB >= needed]
        fits = min(large, key=_cost(file.head.zone), default=None)
        said = f"the head needs {needed / GIB:.0f} GiB for this model, and a {file.head.type} has {memory / GIB:.0f}"
        yield Check("head", False, said, f'type = "{fits.name}" in [head]' if fits else "train a smaller model")


def _cost(zone: str) -> Callable[[Any], float]:
    def cost(machine: Any) -> float:
        price = machine.price(zone)
        return price.on_demand if price and price.on_demand else float("inf")

    return cost


def _unless_unknown(id_: str, answer: Any, judge: Callable[[Any], Check]) -> Check:
    """What `judge` makes of an answer; where the cloud gave none, its sentence, which says the way out."""
    if not isinstance(answer, CloudError):
        return judge(answer)
    said, _, way = str(answer).partition("; ")
    return Check(id_, False, said, way)


def _unless_denied(id_: str, answer: Any, judge: Callable[[Any], Check]) -> Check:
    """The same of what many a member of a project may not ask, and may create machines all the same."""
    if isinstance(answer, Denied):
        return Check(id_, True, f"could not be checked: {answer}", known=False)
    return _unless_unknown(id_, answer, judge)
