"""Check the tables of swarm.toml against each other, the catalogue and today's date."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from tpuswarm import recipes
from tpuswarm.catalog import find, generations, network
from tpuswarm.catalog.accelerators import ACCESSES
from tpuswarm.catalog.prices import region_of
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.toml_file import TomlPath, locate_error
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide import money
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.spec.file import HEAD, Grant, Pool, SwarmFile, VmTable
from tpuswarm.fleet.spec.flags import flag_problems, flag_warnings

RUNTIME_PATTERN = re.compile(
    r"tpu-ubuntu\d{4}-base|tpu-vm-(base|tf-[\w.]+(-pod)?(-pjrt)?|pt-[\w.]+|cos[\w.-]*)|v2-alpha-tpuv\w+(-lite|-lite-podslice)?"
)
"""Names in Google's lists of runtimes (https://cloud.google.com/tpu/docs/runtimes)."""


def check_file(path: Path, file: SwarmFile, now: float) -> list[str]:
    for place, problem in find_problems(file, now):
        raise InputError(locate_error(path, place, problem))
    return list(_warnings(file))


def find_problems(file: SwarmFile, now: float) -> Iterator[tuple[TomlPath, str]]:
    """Yield each problem: its place in the file, and a sentence."""
    yield from _check_names(file)
    for number, grant in enumerate(file.grant):
        if grant.expires is not None and grant.expires <= now + money.DELETE_MARGIN_S:
            yield ("grant", number, "expires"), _expired(grant)
    for number, pool in enumerate(file.pool):
        yield from ((("pool", number, *place), problem) for place, problem in _check_pool(file, pool))
    yield from _check_budget(file)
    if file.storage and file.storage.region and not file.allow_cross_region:
        yield from _check_regions(file, file.storage.region)
    if file.train:
        try:
            recipes.find(file.train.recipe)
        except InputError as error:
            yield ("train", "recipe"), str(error)
    yield from flag_problems(file)
    pools = [name for name, _, _ in file.machine_tables]
    by_pool = {"swap_gb": [*file.setup.swap_gb], "on": [*file.setup.on]} if file.setup else {}
    for key, names in by_pool.items():
        for name in names:
            if name not in pools and (key, name) != ("swap_gb", ALL):
                yield ("setup", key, name), f"there is no pool or VM {name}; {did_you_mean(name, pools)}"
    vms = [name for name, table, _ in file.machine_tables if isinstance(table, VmTable)]
    if file.setup and file.setup.nfs and file.setup.nfs.server not in vms:
        yield ("setup", "nfs", "server"), f"there is no VM {file.setup.nfs.server}; {did_you_mean('', vms)}"


def _check_names(file: SwarmFile) -> Iterator[tuple[TomlPath, str]]:
    seen = {HEAD} if file.head else set()
    for table in ("pool", "vm"):
        for number, named in enumerate(getattr(file, table)):
            place: TomlPath = (table, number, "name")
            if named.name == ALL or (named.name == HEAD and table == "pool"):
                yield place, f"{named.name} means something else in commands: choose another name"
            if named.name in seen:
                yield place, f"there are two named {named.name}: pools and VMs need different names"
            seen.add(named.name)


def _check_pool(file: SwarmFile, pool: Pool) -> Iterator[tuple[TomlPath, str]]:
    tpu = find(pool.type)
    offered = {zone for access in ACCESSES for zone in tpu.zones(access)}
    key = money.quota_key(pool.type, "", True)
    granted = {grant.zone for grant in file.grant if money.quota_key(grant.type, "", True) == key}
    for number, zone in enumerate(pool.zones):
        if zone not in offered | granted:
            zones = ", ".join(sorted(tpu.zones()) or sorted(offered))
            yield ("zones", number), f"no list has a {pool.type} in {zone}; zones that have it: {zones}"


def _expired(grant: Grant) -> str:
    price = money.tpu_price(grant.type, grant.zone, grant.how == "spot")
    cost = "unknown" if price is None else f"{money.format_dollars(price)} an hour each"
    date = datetime.fromtimestamp(grant.expires or 0, UTC)
    return (
        f"the grant of {money.describe_grant(grant.type, grant.count)} in {grant.zone} ended on {date:%Y-%m-%d}: "
        f"remove it (the price is then {cost}), or correct its date"
    )


def _check_budget(file: SwarmFile) -> Iterator[tuple[TomlPath, str]]:
    limit = file.budget.per_hour
    if limit is None:
        return
    grants = {money.quota_key(grant.type, grant.zone, grant.how == "spot") for grant in file.grant}
    for pool in file.pool:
        spot = pool.how == "spot"
        if pool.chosen_api == "tpu" and any(money.quota_key(pool.type, zone, spot) in grants for zone in pool.zones):
            continue
        known = [price for zone in pool.zones if (price := money.tpu_price(pool.type, zone, spot)) is not None]
        if not known:
            problem = f"the price of a {pool.type} in {', '.join(pool.zones)} is unknown, so no budget can be kept"
            yield ("budget", "per_hour"), problem
        elif min(known) > limit:
            cost = money.format_dollars(min(known))
            problem = f"{money.format_dollars(limit)} an hour is less than a machine of pool {pool.name} costs: {cost}"
            yield ("budget", "per_hour"), problem


def _check_regions(file: SwarmFile, region: str) -> Iterator[tuple[TomlPath, str]]:
    for pool in file.pool:
        for pool_region in dict.fromkeys(map(region_of, pool.zones)):
            if pool_region != region:
                yield (
                    ("storage", "region"),
                    f"the bucket lies in {region} and pool {pool.name} in {pool_region}: each GiB read there costs "
                    f"{read_price(pool_region, region)}; make a bucket in {pool_region}, or set "
                    "allow_cross_region = true",
                )


def read_price(region: str, bucket_region: str) -> str:
    """Return what reading a GiB of a bucket costs in another region."""
    same_continent = "-" in bucket_region and network.continent_of(region) == network.continent_of(bucket_region)
    price = network.read_price("same continent" if same_continent else "other continent")
    return "an unknown price" if price is None else money.format_dollars(float(price.value))


def _warnings(file: SwarmFile) -> Iterator[str]:
    usual_runtimes = {generation.runtime for generation in generations() if generation.runtime}
    for pool in file.pool:
        if pool.chosen_api == "compute":
            if file.grant:
                yield f"pool {pool.name}: grants are for the TPU API; in Compute Engine its machines cost money"
            continue
        usual = find(pool.type).generation.runtime
        if pool.runtime and pool.runtime not in usual_runtimes and not RUNTIME_PATTERN.fullmatch(pool.runtime):
            yield (
                f"pool {pool.name}: runtime {pool.runtime} is in no list we know; the cloud will say whether it exists "
                f"(usual for {pool.type}: {usual})"
            )
        elif pool.runtime in usual_runtimes and pool.runtime != usual:
            others = ", ".join(generation.name for generation in generations() if generation.runtime == pool.runtime)
            yield f"pool {pool.name}: runtime {pool.runtime} is for {others}; usual for {pool.type}: {usual}"
    yield from flag_warnings(file)
    for name, table, _ in file.machine_tables:
        if isinstance(table, VmTable) and money.vm_price(table.type, table.zone, False, 0) is None:
            yield f"{name}: the price of a {table.type} in {table.zone} is unknown"
