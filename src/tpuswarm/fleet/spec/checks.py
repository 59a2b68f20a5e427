"""Whether the tables of swarm.toml go together, with the catalogue and with today's date."""

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
from tpuswarm.fleet.spec import flags
from tpuswarm.fleet.spec.file import HEAD, Grant, HeadTable, Pool, SwarmFile

RUNTIME_PATTERN = re.compile(
    r"tpu-ubuntu\d{4}-base|tpu-vm-(base|tf-[\w.]+(-pod)?(-pjrt)?|pt-[\w.]+|cos[\w.-]*)|v2-alpha-tpuv\w+(-lite|-lite-podslice)?"
)
"""How runtime versions are called that are in Google's lists (https://cloud.google.com/tpu/docs/runtimes)."""


def check_file(path: Path, file: SwarmFile, now: float) -> list[str]:
    """Warnings; InputError, naming the line, for the first thing that does not go together. `now`: Unix seconds."""
    for place, sentence in find_problems(file, now):
        raise InputError(locate_error(path, place, sentence))
    return list(_warnings(file))


def find_problems(file: SwarmFile, now: float) -> Iterator[tuple[TomlPath, str]]:
    """Everything that does not go together: where it stands, and a sentence."""
    yield from _names(file)
    for number, grant in enumerate(file.grant):
        if grant.expires is not None and grant.expires <= now + money.DELETE_MARGIN_S:
            yield ("grant", number, "expires"), _expired(grant)
    for number, pool in enumerate(file.pool):
        yield from ((("pool", number, *place), said) for place, said in _pool(file, pool))
    yield from _budget(file)
    if file.storage and file.storage.region and not file.allow_cross_region:
        yield from _regions(file, file.storage.region)
    if file.train:
        try:
            recipes.find(file.train.recipe)
        except InputError as error:
            yield ("train", "recipe"), str(error)
    yield from flags.flag_problems(file)
    if file.setup and file.setup.nfs and file.setup.nfs.server not in (servers := _servers(file)):
        yield ("setup", "nfs", "server"), f"there is no VM {file.setup.nfs.server}; {did_you_mean('', servers)}"


def _names(file: SwarmFile) -> Iterator[tuple[TomlPath, str]]:
    seen = {HEAD} if file.head else set()
    for table in ("pool", "vm"):
        for number, each in enumerate(getattr(file, table)):
            place: TomlPath = (table, number, "name")
            if each.name == ALL or (each.name == HEAD and table == "pool"):
                yield place, f"{each.name} means something else where a name is given: call it differently"
            if each.name in seen:
                yield place, f"there are two of the name {each.name}: each pool and VM has its own"
            seen.add(each.name)


def _servers(file: SwarmFile) -> list[str]:
    return [*([HEAD] if file.head else []), *(each.name for each in file.vm)]


def _pool(file: SwarmFile, pool: Pool) -> Iterator[tuple[TomlPath, str]]:
    found = find(pool.type)
    if found.api_name is None:
        yield (
            ("type",),
            f"{pool.type} exists in Compute Engine and GKE only, not in the TPU API, and tpuswarm makes no TPUs there "
            f"yet; `tpuswarm plan RECIPE --on {pool.type}` tells what it would do",
        )
    offered = {zone for access in ACCESSES for zone in found.zones(access)}
    granted = {
        each.zone for each in file.grant if money.quota_key(each.type, "", True) == money.quota_key(pool.type, "", True)
    }
    for number, zone in enumerate(pool.zones):
        if zone not in offered | granted:
            zones = ", ".join(sorted(found.zones()) or sorted(offered))
            yield ("zones", number), f"no list has a {pool.type} in {zone}; zones that have it: {zones}"


def _expired(grant: Grant) -> str:
    spot = grant.how == "spot"
    price = money.tpu_price(grant.type, grant.zone, spot)
    each = (
        "what each costs then is unknown" if price is None else f"each costs {money.format_dollars(price)} an hour then"
    )
    return (
        f"the grant of {grant.count} {grant.type} in {grant.zone} ended on "
        f"{datetime.fromtimestamp(grant.expires or 0, UTC):%Y-%m-%d}: take it out ({each}), or correct its date"
    )


def _budget(file: SwarmFile) -> Iterator[tuple[TomlPath, str]]:
    limit = file.budget.per_hour
    if limit is None:
        return
    grants = {money.quota_key(each.type, each.zone, each.how == "spot") for each in file.grant}
    for pool in file.pool:
        spot = pool.how == "spot"
        if any(money.quota_key(pool.type, zone, spot) in grants for zone in pool.zones):
            continue
        prices = [money.tpu_price(pool.type, zone, spot) for zone in pool.zones]
        known = [each for each in prices if each is not None]
        if not known:
            yield (
                ("budget", "per_hour"),
                f"nobody says what a {pool.type} costs in {', '.join(pool.zones)}, so no budget can be kept with it",
            )
        elif min(known) > limit:
            yield (
                ("budget", "per_hour"),
                f"{money.format_dollars(limit)} an hour is less than one machine of pool {pool.name} costs, "
                f"a {pool.type}: "
                f"{money.format_dollars(min(known))}",
            )


def _regions(file: SwarmFile, region: str) -> Iterator[tuple[TomlPath, str]]:
    for pool in file.pool:
        for zone in pool.zones:
            if region_of(zone) == region:
                continue
            near = network.continent_of(zone) == network.continent_of(region)
            price = network.read_price("same continent" if near else "other continent")
            costs = (
                "costs a price that nobody says"
                if price is None
                else f"costs {money.format_dollars(float(price.value))}"
            )
            yield (
                ("storage", "region"),
                f"the bucket lies in {region} and pool {pool.name} in {region_of(zone)}: each GiB read there {costs}; "
                f"make a bucket in {region_of(zone)}, or set allow_cross_region = true",
            )


def _warnings(file: SwarmFile) -> Iterator[str]:
    usual = {each.runtime for each in generations() if each.runtime}
    for pool in file.pool:
        fits = find(pool.type).generation.runtime
        if pool.runtime and pool.runtime not in usual and not RUNTIME_PATTERN.fullmatch(pool.runtime):
            yield (
                f"pool {pool.name}: runtime {pool.runtime} is in no list we know; the cloud will say whether it has it "
                f"(usual for {pool.type}: {fits})"
            )
        elif pool.runtime in usual and pool.runtime != fits:
            others = ", ".join(each.name for each in generations() if each.runtime == pool.runtime)
            yield f"pool {pool.name}: runtime {pool.runtime} is for {others}; usual for {pool.type}: {fits}"
    yield from flags.flag_warnings(file)
    vms: list[tuple[str, HeadTable]] = [(HEAD, file.head)] if file.head else []
    for name, vm in [*vms, *((each.name, each) for each in file.vm)]:
        if money.vm_price(vm.type, vm.zone, False, 0) is None:
            yield f"{name}: nobody says what a {vm.type} costs in {vm.zone}"
