"""Turn swarm.toml, or command-line options, into the desired state of a fleet."""

import getpass
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tpuswarm.catalog import APIS, find
from tpuswarm.cloud.google.firewall import head_tag, network_tag
from tpuswarm.cloud.google.settings import find_zone
from tpuswarm.cloud.protocol import SSH_KEYS, Disk, Listing, TpuSpec, VmSpec
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Budget, Desired, PoolSpec
from tpuswarm.fleet.decide.money import Grant
from tpuswarm.fleet.decide.names import resolve_name
from tpuswarm.fleet.spec import file as tables
from tpuswarm.fleet.spec.checks import check_file, find_problems
from tpuswarm.fleet.spec.flags import flags_from_file
from tpuswarm.fleet.spec.providers import check_provider
from tpuswarm.remote.setup.table import Setup

ID_PLACEHOLDER = "xxxxxx"
"""Replaces the random part of an id before a fleet exists."""
ID_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


def new_fleet_id(name: str, mark: str) -> str:
    """Return a unique id: the name, the mark of the document's location, and random letters.

    The mark lets a user who has lost the document recognize the fleet's machines.
    """
    return f"{name}-{mark}{''.join(secrets.choice(ID_LETTERS) for _ in range(6))}"


def location_mark(location: str) -> str:
    number = int.from_bytes(hashlib.sha256(location.encode()).digest()[:8])
    return "".join(ID_LETTERS[number // len(ID_LETTERS) ** power % len(ID_LETTERS)] for power in range(4))


def desired_from_file(file: tables.SwarmFile, fleet: str, paid: bool, public_key: str | None) -> Desired:
    """Convert the file. `paid`: allow TPUs outside its grants; without grants, everything is paid."""
    vms: list[tuple[str, tables.VmTable]] = [(tables.HEAD, file.head)] if file.head else []
    vms += [(vm.name, vm) for vm in file.vm]
    pools = [_vm_spec(file, name, table, fleet, public_key) for name, table in vms]  # first, as others wait for them
    pools += [_pool_spec(file, pool, fleet, public_key) for pool in file.pool]
    return Desired(
        fleet=fleet,
        pools=tuple(pools),
        grants=list_grants(file),
        budget=Budget(**file.budget.model_dump()),
        down_when=file.down_when,
        paid=paid or not file.grant,
        flags=flags_from_file(file),
    )


def list_grants(file: tables.SwarmFile) -> tuple[Grant, ...]:
    return tuple(Grant(grant.type, grant.zone, grant.how == "spot", grant.count, grant.expires) for grant in file.grant)


def _pool_spec(file: tables.SwarmFile, pool: tables.Pool, fleet: str, public_key: str | None) -> PoolSpec:
    spec = TpuSpec(
        name="",
        zone=pool.zones[0],
        how=pool.how,
        pool=pool.name,
        runtime=pool.image,
        api=pool.chosen_api,
        disks=tuple(Disk(disk.name, disk.read_only) for disk in pool.disks),
        reservation=pool.reservation,
        wait_s=pool.wait,
        max_run_s=pool.max_run,
        **_common_settings(file, pool, pool.type, fleet, public_key),
    )
    return PoolSpec(pool.name, spec, pool.zones, pool.count, pool.wait)


def _vm_spec(file: tables.SwarmFile, name: str, table: tables.VmTable, fleet: str, public_key: str | None) -> PoolSpec:
    vm = table if isinstance(table, tables.Vm) else None
    spec = VmSpec(
        name=f"{file.name}-{name}",
        zone=table.zone,
        pool=name,
        image=table.image,
        disk_gib=table.disk_gib,
        ip_forward=vm is not None and vm.ip_forward,
        spot=vm is not None and vm.spot,
        **_common_settings(file, table, table.type, fleet, public_key),
    )
    return PoolSpec(name, spec, (table.zone,), 1, forwards=vm.ports if vm and vm.role == "router" else ())


def _common_settings(
    file: tables.SwarmFile, table: tables.MachineTable, type_: str, fleet: str, public_key: str | None
) -> dict[str, Any]:
    metadata, tags = table.metadata, (network_tag(file.name), *table.tags)  # the firewall knows the fleet by its tag
    if isinstance(table, tables.HeadTable):
        tags += (head_tag(file.name),)
    if public_key is not None and SSH_KEYS not in metadata:
        metadata = {SSH_KEYS: f"{getpass.getuser()}:{public_key}", **metadata}
    return {
        "type": type_,
        "fleet": fleet,
        "network": table.network,
        "subnetwork": table.subnet,
        "external_ips": table.external_ips,
        "tags": tuple(dict.fromkeys(tags)),
        "labels": table.labels,
        "metadata": metadata,
        "service_account": table.service_account,
    }


def with_keeper_home(desired: Desired, bucket: str | None) -> Desired:
    """Let the keeper run on the head, if there is one and the document is in a bucket."""
    has_head = any(pool.name == tables.HEAD for pool in desired.pools)
    return replace(desired, kept_on=tables.HEAD if has_head and bucket else None)


def login_user(pool: PoolSpec) -> str:
    """Return the first user who may log in; everything runs in that user's home."""
    user, colon, _ = pool.spec.metadata.get(SSH_KEYS, "").strip().partition(":")
    return user if colon else getpass.getuser()


def add_ssh_key(pool: PoolSpec, key: str) -> PoolSpec:
    """Let another key log in; return the same pool if it has the key already."""
    lines = pool.spec.metadata.get(SSH_KEYS, "").splitlines()
    if any(line.partition(":")[2].split()[:2] == key.split()[:2] for line in lines):
        return pool
    return _with_ssh_keys(pool, [*lines, f"{login_user(pool)}:{key}"])


def keep_ssh_keys(pool: PoolSpec, before: Sequence[PoolSpec]) -> PoolSpec:
    """Keep the keys that other computers have added to the pool."""
    old = next((old_pool.spec.metadata.get(SSH_KEYS, "") for old_pool in before if old_pool.name == pool.name), "")
    lines = dict.fromkeys((*old.splitlines(), *pool.spec.metadata.get(SSH_KEYS, "").splitlines()))
    return _with_ssh_keys(pool, lines) if lines else pool


def _with_ssh_keys(pool: PoolSpec, lines: Sequence[str] | Mapping[str, None]) -> PoolSpec:
    return replace(pool, spec=replace(pool.spec, metadata={**pool.spec.metadata, SSH_KEYS: "\n".join(lines)}))


@dataclass(frozen=True)
class TpuOptions:
    """A TPU without a file, as the options of `up --type` describe it. None: the default of swarm.toml."""

    type: str
    zones: Sequence[str] = ()
    name: str | None = None
    is_spot: bool = False
    provider: str = "google"
    project: str | None = None
    network: str | None = None
    runtime: str | None = None
    metadata: Sequence[str] = ()
    """Each KEY=VALUE."""
    down_when: str | None = None
    setup: Setup | None = None


def read_checked_file(path: Path) -> tuple[tables.SwarmFile, list[str]]:
    """Return the file and warnings. Raise InputError for a mistake, with its line."""
    file = tables.read_swarm(path)
    return file, check_file(path, file, time.time())


def file_from_options(options: TpuOptions) -> tables.SwarmFile:
    """Return a file for one TPU. Raise InputError for a wrong option."""
    check_provider(options.provider)
    tpu, name = find(options.type), options.name or find(options.type).name
    own_network = network_tag(name) if tpu.hosts > 1 else None  # the default one lets strangers in to a second host
    own_zone = find_zone() if options.provider == "google" else None
    pool = {
        "name": name,
        "type": options.type,
        "zones": options.zones or sorted(tpu.zones(), key=lambda zone: zone != own_zone),
        "count": 1,
        "how": "spot" if options.is_spot else "on-demand",
        "network": options.network or own_network,
        "runtime": options.runtime,
        "metadata": dict(map(_key_and_value, options.metadata)),
    }
    table = {
        "name": pool["name"],
        "provider": options.provider,
        "project": options.project,
        "pool": [{key: value for key, value in pool.items() if value is not None}],
        "down_when": options.down_when,
        "setup": options.setup,
    }
    try:
        file = tables.SwarmFile.model_validate({key: value for key, value in table.items() if value is not None})
    except ValidationError as error:
        raise InputError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
    for _, problem in find_problems(file, time.time()):
        raise InputError(problem)
    return file


def _key_and_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InputError(f"--metadata takes KEY=VALUE, such as startup-script=uptime, not {text!r}")
    return key, value


def with_machine_name(desired: Desired, name: str | None) -> Desired:
    if name is None:
        return desired
    pool = desired.pools[0]
    return replace(desired, pools=(replace(pool, spec=replace(pool.spec, name=name)),))


def without_stale_pauses(desired: Desired, listing: Listing) -> Desired:
    """Drop the pauses of machines that no longer exist, so that the pool gets new ones."""
    if listing.unreachable:
        return desired
    existing = {machine.name for machine in desired.own(listing.machines) if machine.state not in ("dead", "deleting")}
    return replace(desired, paused={name: pool for name, pool in desired.paused.items() if name in existing})


def with_counts(desired: Desired, scale: Sequence[str]) -> Desired:
    counts = {}
    for text in scale:
        name, _, number = text.partition("=")
        if not number.isdigit() or int(number) > tables.MAX_MACHINES:
            limit = f"{tables.MAX_MACHINES:,}"
            raise InputError(f"--scale takes POOL=N with N from 0 to {limit}, such as small=20, not {text!r}")
        if name not in (names := [pool.name for pool in desired.pools]):
            raise InputError(f"there is no pool {name!r}; {did_you_mean(name, names)}")
        counts[name] = int(number)
    return replace(
        desired, pools=tuple(replace(pool, count=counts.get(pool.name, pool.count)) for pool in desired.pools)
    )


def require_same_types(before: Desired | None, desired: Desired) -> None:
    old_pools = {pool.name: pool for pool in before.pools} if before and before.down is None else {}
    for pool in desired.pools:
        old = old_pools.get(pool.name)
        is_changed = old and (old.type, old.how, old.spec.api) != (pool.type, pool.how, pool.spec.api)
        if old and old.count and pool.count and is_changed:
            raise InputError(
                f"pool {pool.name} is of {_kind(old)} and would become {_kind(pool)}: give the "
                f"new pool another name, or delete the old machines first: `tpuswarm up --scale {pool.name}=0`"
            )


def _kind(pool: PoolSpec) -> str:
    return f"{pool.type} ({pool.how}, {APIS[pool.spec.api]})"


def without_machine(desired: Desired, listing: Listing, text: str) -> Desired:
    own = {machine.name: machine for machine in desired.own(listing.machines)}
    machine = own[resolve_name(text, own)]
    pools = tuple(
        replace(pool, count=max(0, pool.count - 1)) if pool.name == machine.pool else pool for pool in desired.pools
    )
    paused = {name: pool for name, pool in desired.paused.items() if name != machine.name}
    dropped = {**desired.dropped, machine.name: machine.created}
    return replace(desired, pools=pools, paused=paused, dropped=dropped)
