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
from tpuswarm.cloud.google.project import APIS
from tpuswarm.cloud.google.quotas import allowance, size
from tpuswarm.config.nearest import nearest
from tpuswarm.config.units import GIB
from tpuswarm.fleet.core import money
from tpuswarm.fleet.facts import Facts, Net, placed
from tpuswarm.fleet.file import Placed, Pool, SwarmFile

PLENTY = 10**6
"""Quota for so many machines is no limit."""
TAKEN = 4
"""Addresses of a range that Google keeps for itself."""


class Check(NamedTuple):
    """One thing that must be right."""

    id: str
    ok: bool
    sentence: str
    """What was found."""
    mend: str = ""
    """The command, or the line of swarm.toml, that puts it right."""


def checks(file: SwarmFile, facts: Facts, now: float, paid: bool, head_bytes: float | None = None) -> list[Check]:
    """All of them, those that are right included. `now`: Unix seconds; `paid`: what no grant covers may cost money.

    `head_bytes`: memory that the head needs for the model, as plan says; None: there is no model yet.
    """
    first = _signed_in(facts)
    if isinstance(facts.apis, CloudError):
        return first
    found = [*first, _billing(facts), _apis(facts)]
    if not all(each.ok for each in found):
        return found  # nothing else can be asked then
    for pool in file.pool:
        found += [_quota(pool, facts), *_offers(pool, facts), *_runtimes(pool, facts)]
    found += _bucket(file, facts)
    found += _addresses(file, facts)
    found += _firewall(file, facts)
    found += [_account(facts), *_price(file, now, paid), *_head(file, head_bytes)]
    return found


def _signed_in(facts: Facts) -> list[Check]:
    error = facts.apis if isinstance(facts.apis, CloudError) else None
    if isinstance(error, NotSignedIn):
        return [Check("credentials", False, str(error), SIGN_IN.strip("`"))]
    if isinstance(error, Unreachable):
        return [Check("credentials", False, str(error), "check the network of this computer and try again")]
    signed = Check("credentials", True, "signed in to Google Cloud")
    if error is None:
        return [signed, Check("project", True, f"project {facts.project} can be reached")]
    mend = f"gcloud projects describe {facts.project}"
    if not isinstance(error, Denied):
        mend = f"gcloud projects list names yours, gcloud projects create {facts.project} makes one"
    return [signed, Check("project", False, str(error), mend)]


def _billing(facts: Facts) -> Check:
    mend = f"gcloud billing projects link {facts.project} --billing-account=ACCOUNT"

    def judge(account: str | None) -> Check:
        if account:
            return Check("billing", True, f"billing account {account} pays for project {facts.project}")
        return Check("billing", False, f"no billing account is linked to project {facts.project}", mend)

    return _unless_unknown("billing", facts.billing, judge)


def _apis(facts: Facts) -> Check:
    assert not isinstance(facts.apis, CloudError)
    missing = [api for api in APIS if api not in facts.apis]
    if not missing:
        return Check("apis", True, f"the {len(APIS)} APIs that tpuswarm calls are on")
    named = ", ".join(APIS[api] for api in missing)
    mend = shlex.join(["gcloud", "services", "enable", *missing, f"--project={facts.project}"])
    return Check("apis", False, f"not on in project {facts.project}: {named}", mend)


def _quota(pool: Pool, facts: Facts) -> Check:
    spot = pool.how == "spot"

    def judge(quotas: Any) -> Check:
        if pool.how == "reserved":
            return Check("quota", True, "a reservation has its quota with it")
        found = {zone: allowance(quotas, pool.type, spot, zone) for zone in pool.zones}
        known = {zone: each for zone, each in found.items() if each}
        fits = sum(each.limit // size(pool.type) for each in known.values())
        if len(known) < len(found) or fits >= pool.count:
            said = f"for {fits:,} of them" if fits < PLENTY else "for any number of them"
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

    return _unless_unknown("quota", facts.quotas, judge)


def _offers(pool: Pool, facts: Facts) -> Iterator[Check]:
    api_name = find(pool.type).api_name
    for zone in pool.zones:

        def judge(types: tuple[str, ...], zone: str = zone) -> Check:
            if api_name in types:
                return Check("type", True, f"{zone} offers {pool.type}")
            others = [each for each in find(pool.type).zones() if each != zone]
            mend = f"take one of the zones that have it: {', '.join(others)}" if others else "take another type"
            return Check("type", False, f"{zone} offers no {pool.type} to project {facts.project}", mend)

        yield _unless_unknown("type", facts.types[zone], judge)


def _runtimes(pool: Pool, facts: Facts) -> Iterator[Check]:
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
            mend = f'runtime = "{usual if usual in runtimes else nearest(runtime, runtimes) or "…"}"'
            return Check("runtime", False, f"{zone} has no runtime {runtime}", mend)

        yield _unless_unknown("runtime", facts.runtimes[zone], judge)


def _bucket(file: SwarmFile, facts: Facts) -> Iterator[Check]:
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

    yield _unless_unknown("bucket", facts.bucket, judge)


def _read(region: str, bucket: str) -> str:
    near = "-" in bucket and network.continent_of(region) == network.continent_of(bucket)
    price = network.read_price("same continent" if near else "other continent")
    return "what nobody says" if price is None else money.dollars(float(price.value))


def _addresses(file: SwarmFile, facts: Facts) -> Iterator[Check]:
    for net, addresses in facts.ranges.items():
        needed = sum(
            _hosts(table)
            for _, table, zones in placed(file)
            if net in {Net(table.network, table.subnetwork, region_of(zone)) for zone in zones}
        )

        def judge(cidr: str | None, net: Any = net, needed: int = needed) -> Check:
            where = f"network {net.network} in {net.region}"
            if cidr is None:
                make = f"gcloud compute networks subnets create {net.network}-{net.region} --network={net.network}"
                mend = f"{make} --region={net.region} --range=10.200.0.0/20 --project={facts.project}"
                return Check("addresses", False, f"{where} has no addresses, or does not exist", mend)
            room = ipaddress.ip_network(cidr).num_addresses - TAKEN
            if room >= needed:
                return Check("addresses", True, f"{where} has {room:,} addresses for {needed:,} hosts")
            name = net.subnetwork or net.network
            mend = f"gcloud compute networks subnets expand-ip-range {name} --region={net.region} --prefix-length=20"
            return Check("addresses", False, f"{where} has {room:,} addresses ({cidr}) for {needed:,} hosts", mend)

        yield _unless_unknown("addresses", addresses, judge)


def _hosts(table: Placed) -> int:
    return table.count * find(table.type).hosts if isinstance(table, Pool) else 1


def _firewall(file: SwarmFile, facts: Facts) -> Iterator[Check]:
    own = firewall.tag_of(file.name)
    if sum(_hosts(table) for _, table, _ in placed(file)) == 1:
        yield Check("firewall", True, "a machine alone speaks with no other")
        return
    for net in sorted({table.network for _, table, _ in placed(file)}):

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


def _account(facts: Facts) -> Check:
    def judge(account: str | None) -> Check:
        if account:
            return Check("account", True, f"machines use {account}, with the scope cloud-platform")
        said = f"project {facts.project} has no default service account for its machines"
        mend = (
            f"gcloud iam service-accounts create tpuswarm --project={facts.project}, and service_account = its address"
        )
        return Check("account", False, said, mend)

    return _unless_unknown("account", facts.account, judge)


def _price(file: SwarmFile, now: float, paid: bool) -> Iterator[Check]:
    grants = [money.Grant(each.type, each.zone, each.how == "spot", each.count, each.expires) for each in file.grant]
    cover, rate, outside = money.Cover(grants, now), money.Rate(), Counter[str]()
    for pool in file.pool:
        for _ in range(pool.count):
            if not any(cover.take(pool.type, zone, pool.how) for zone in pool.zones):
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
        said = f"the file asks for {rate.hour} an hour, its budget is {money.dollars(limit)}"
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
