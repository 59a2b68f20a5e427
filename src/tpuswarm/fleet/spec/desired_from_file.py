"""What swarm.toml, or a few options, ask of a fleet, as the values with which it is planned."""

import getpass
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from tpuswarm.catalog import find
from tpuswarm.cloud.google.firewall import tag_of
from tpuswarm.cloud.google.settings import find_zone
from tpuswarm.cloud.protocol import Disk, Listing, TpuSpec, VmSpec
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Budget, Desired, DownWhen, PoolSpec
from tpuswarm.fleet.decide.money import Grant
from tpuswarm.fleet.decide.names import resolve_name
from tpuswarm.fleet.spec import flags
from tpuswarm.fleet.spec.checks import check_file, find_problems
from tpuswarm.fleet.spec.file import (
    DEFAULT_FILE,
    HEAD,
    MAX_MACHINES,
    HeadTable,
    MachineTable,
    Pool,
    SwarmFile,
    Vm,
    read_swarm,
)
from tpuswarm.fleet.spec.providers import check_provider

ID_PLACEHOLDER = "xxxxxx"
"""What stands for the random part of a fleet's id while there is no fleet."""
ID_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
SSH_KEYS = "ssh-keys"
"""The key of a machine's metadata from which it takes who may log in: USER:KEY."""


def new_fleet_id(name: str, mark: str) -> str:
    """An id that no other fleet has: the name, so that a person knows it, and a random part, which begins with `mark`.

    `mark` says where the fleet's document is kept: who has lost it knows his own machines by that.
    """
    return f"{name}-{mark}{''.join(secrets.choice(ID_LETTERS) for _ in range(6))}"


def location_mark(place: str) -> str:
    """The letters that stand for a place: another place has others, as good as surely."""
    number = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8])
    return "".join(ID_LETTERS[number // len(ID_LETTERS) ** power % len(ID_LETTERS)] for power in range(4))


def desired_from_file(file: SwarmFile, fleet: str, paid: bool, public_key: str | None) -> Desired:
    """What the file asks. `paid`: TPUs outside of its grants as well; without grants everything is paid for."""
    when, budget = file.down_when, file.budget
    return Desired(
        fleet=fleet,
        pools=tuple(list_pools(file, fleet, public_key)),
        grants=list_grants(file),
        budget=Budget(budget.per_hour, budget.total, budget.traffic_per_day),
        down_when=DownWhen(when.done, when.idle_s, when.at) if when else None,
        paid=paid or not file.grant,
        flags=flags.flags_from_file(file),
    )


def list_grants(file: SwarmFile) -> tuple[Grant, ...]:
    """All of the file, those that have ended as well."""
    return tuple(Grant(each.type, each.zone, each.how == "spot", each.count, each.expires) for each in file.grant)


def list_pools(file: SwarmFile, fleet: str, public_key: str | None) -> list[PoolSpec]:
    """All pools and VMs; VMs first, as they are few and others wait for them."""
    found = [_vm(file, HEAD, file.head, fleet, public_key)] if file.head else []
    found += [_vm(file, each.name, each, fleet, public_key) for each in file.vm]
    return found + [_pool(file, each, fleet, public_key) for each in file.pool]


def _pool(file: SwarmFile, pool: Pool, fleet: str, public_key: str | None) -> PoolSpec:
    spec = TpuSpec(
        name="",
        zone=pool.zones[0],
        type=pool.type,
        how=pool.how,
        fleet=fleet,
        pool=pool.name,
        runtime=pool.runtime or find(pool.type).generation.runtime or "",
        network=pool.network,
        subnetwork=pool.subnet,
        external_ips=pool.external_ips,
        tags=_tags(file, pool),
        labels=pool.labels,
        metadata=_metadata(pool, public_key),
        service_account=pool.service_account,
        disks=tuple(Disk(each.name, each.read_only) for each in pool.disks),
        reservation=pool.reservation,
        wait_s=pool.wait,
    )
    return PoolSpec(pool.name, spec, pool.zones, pool.count, pool.wait)


def _vm(file: SwarmFile, name: str, table: HeadTable, fleet: str, public_key: str | None) -> PoolSpec:
    spec = VmSpec(
        name=f"{file.name}-{name}",
        zone=table.zone,
        type=table.type,
        fleet=fleet,
        pool=name,
        image=table.image,
        disk_gib=table.disk_gib,
        network=table.network,
        subnetwork=table.subnet,
        external_ips=table.external_ips,
        ip_forward=isinstance(table, Vm) and table.ip_forward,
        spot=isinstance(table, Vm) and table.spot,
        tags=_tags(file, table),
        labels=table.labels,
        metadata=_metadata(table, public_key),
        service_account=table.service_account,
    )
    routes = isinstance(table, Vm) and table.role == "router"
    return PoolSpec(name, spec, (table.zone,), 1, routes=routes)


def _tags(file: SwarmFile, table: MachineTable) -> tuple[str, ...]:
    """With the one by which the firewall knows the fleet's machines."""
    return tuple(dict.fromkeys((tag_of(file.name), *table.tags)))


def _metadata(table: MachineTable, public_key: str | None) -> Mapping[str, str]:
    """With the key of whoever creates it, unless the file names its own."""
    if public_key is None or SSH_KEYS in table.metadata:
        return table.metadata
    return {SSH_KEYS: f"{getpass.getuser()}:{public_key}", **table.metadata}


def with_keeper_home(wanted: Desired, bucket: str | None) -> Desired:
    """With its keeper where it lives best: on the head, which needs its document in a bucket; else wherever it is."""
    has_head = any(each.name == HEAD for each in wanted.pools)
    return replace(wanted, kept_on=HEAD if has_head and bucket else None)


def login_user(pool: PoolSpec) -> str:
    """Whose home on its machines everything happens in: the first user that may log in."""
    user, colon, _ = pool.spec.metadata.get(SSH_KEYS, "").strip().partition(":")
    return user if colon else getpass.getuser()


def add_ssh_key(pool: PoolSpec, key: str) -> PoolSpec:
    """With one more key that its user may log in with, unless it is there."""
    there = pool.spec.metadata.get(SSH_KEYS, "").splitlines()
    if any(line.partition(":")[2].split()[:2] == key.split()[:2] for line in there):
        return pool
    lines = "\n".join((*there, f"{login_user(pool)}:{key}"))
    return replace(pool, spec=replace(pool.spec, metadata={**pool.spec.metadata, SSH_KEYS: lines}))


def keep_ssh_keys(pool: PoolSpec, before: Sequence[PoolSpec]) -> PoolSpec:
    """With the keys that other computers have added to it."""
    old = next((each.spec.metadata.get(SSH_KEYS, "") for each in before if each.name == pool.name), "")
    there = pool.spec.metadata.get(SSH_KEYS, "").splitlines()
    lines = "\n".join(dict.fromkeys((*old.splitlines(), *there)))
    if not lines:
        return pool
    return replace(pool, spec=replace(pool.spec, metadata={**pool.spec.metadata, SSH_KEYS: lines}))


def file_or_options(
    file: Path | None,
    type_: str | None,
    zones: Sequence[str],
    name: str | None,
    spot: bool,
    provider: str,
    down_when: str | None = None,
) -> tuple[SwarmFile, list[str]]:
    """The file, or one TPU that options ask for as a file; warnings. Raises InputError."""
    if type_ is None:
        if zones or name or spot or down_when:
            raise InputError("--zone, --name, --spot and --down-when go with --type; of a fleet, the file says them")
        path = file or DEFAULT_FILE
        read = read_swarm(path)
        return read, check_file(path, read, time.time())
    if file is not None:
        raise InputError("give a file or --type, not both")
    check_provider(provider)
    tpu = find(type_)
    called = name or tpu.name
    how = "spot" if spot else "on-demand"
    own = find_zone() if provider == "google" else None
    near = sorted(tpu.zones(), key=lambda each: each != own)
    pool = {"name": called, "type": type_, "zones": zones or near, "count": 1, "how": how}
    table = {"name": called, "provider": provider, "pool": [pool], **({"down_when": down_when} if down_when else {})}
    try:
        read = SwarmFile.model_validate(table)
    except ValidationError as error:
        raise InputError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
    for _, sentence in find_problems(read, time.time()):
        raise InputError(sentence)
    return read, []


def with_machine_name(wanted: Desired, name: str | None) -> Desired:
    """With a single TPU that is called as its owner calls it."""
    if name is None:
        return wanted
    pool = wanted.pools[0]
    return replace(wanted, pools=(replace(pool, spec=replace(pool.spec, name=name)),))


def with_counts(wanted: Desired, scale: Sequence[str]) -> Desired:
    """With other numbers of machines, as POOL=N each. Raises InputError."""
    counts = {}
    for text in scale:
        pool, _, number = text.partition("=")
        if not number.isdigit() or int(number) > MAX_MACHINES:
            raise InputError(f"--scale takes POOL=N with N from 0 to {MAX_MACHINES:,}, such as small=20, not {text!r}")
        if pool not in (pools := [each.name for each in wanted.pools]):
            raise InputError(f"there is no pool {pool!r}; {did_you_mean(pool, pools)}")
        counts[pool] = int(number)
    return replace(wanted, pools=tuple(replace(each, count=counts.get(each.name, each.count)) for each in wanted.pools))


def require_same_types(before: Desired | None, wanted: Desired) -> None:
    """Raises InputError for a pool that becomes another: it would lose its machines unseen."""
    pools = {each.name: each for each in before.pools} if before and before.down is None else {}
    for pool in wanted.pools:
        old = pools.get(pool.name)
        if old and old.count and (old.type, old.how) != (pool.type, pool.how):
            raise InputError(
                f"pool {pool.name} is of {old.type} ({old.how}) and would become {pool.type} ({pool.how}): give the "
                f"new one another name, or let its machines go first with `tpuswarm up --scale {pool.name}=0`"
            )


def without_machine(wanted: Desired, listing: Listing, text: str) -> Desired:
    """Without one machine, and with one fewer in its pool. Raises InputError where there is none of that name."""
    ours = {each.name: each for each in listing.machines if each.fleet == wanted.fleet}
    machine = ours[resolve_name(text, ours)]
    pools = tuple(
        replace(each, count=max(0, each.count - 1)) if each.name == machine.pool else each for each in wanted.pools
    )
    return replace(wanted, pools=pools, dropped={**wanted.dropped, machine.name: machine.created})
