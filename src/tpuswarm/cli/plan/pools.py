"""Read from swarm.toml which machines to plan for: its pools, or its grants. Add GPUs of the user's own."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tpuswarm.catalog import Gpu, find, find_hardware, usual_slice
from tpuswarm.cli.train.train_options import check_options
from tpuswarm.config.toml_file import locate_error
from tpuswarm.config.train_table import Train
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.money import GrantCover, chips_of, describe_grant, is_generation, quota_key, tpu_price
from tpuswarm.fleet.spec.checks import find_problems
from tpuswarm.fleet.spec.desired_from_file import list_grants
from tpuswarm.fleet.spec.file import SwarmFile, read_swarm
from tpuswarm.fleet.training import pool_batches
from tpuswarm.plan.outlook import MachineGroup


class Machines(NamedTuple):
    """Machines by TPU type, in the order of the file."""

    counts: dict[str, int]
    groups: tuple[MachineGroup, ...]
    notes: tuple[str, ...]
    batches: dict[str, int]
    """Rows of a step, by type, if [train] has a batch for each pool; of two pools of a type the larger."""


def read_pools(path: Path) -> tuple[Train, Machines]:
    """Return [train] and the machines of the pools. Raises InputError if either is missing."""
    file = _read_file(path)
    if file.train is None:
        raise InputError(f"{path} has no [train] to plan; add one, or name the recipe: `plan RECIPE --on …`")
    if not file.pool:
        raise InputError(f"{path} has no [[pool]] to plan for; add one, or name a TPU: `plan RECIPE --on …`")
    check_options(path, {"recipe": file.train.recipe, "options": dict(file.train.options)})
    counts: dict[str, int] = {}
    for pool in file.pool:
        counts[pool.type] = counts.get(pool.type, 0) + pool.count
    batches: dict[str, int] = {}
    for name, batch in pool_batches(file).items():
        type_ = next(pool.type for pool in file.pool if pool.name == name)
        batches[type_] = max(batch, batches.get(type_, 0))
    return file.train, Machines(counts, tuple(_list_groups(file)), (), batches)


def add_own_gpus(machines: Machines, names: Sequence[str], source: str) -> Machines:
    """Add GPUs that join the machines of `source`. Raises InputError for a TPU, which `source` names."""
    counts, groups = dict(machines.counts), list(machines.groups)
    for gpu, count in Counter(map(find_hardware, names)).items():
        if not isinstance(gpu, Gpu):
            raise InputError(f"{source} names the TPUs: --on adds only GPUs of your own to them, not {gpu.name}")
        counts[gpu.name] = count
        groups.append(MachineGroup(gpu.name, "", "your own", count))
    return machines._replace(counts=counts, groups=tuple(groups))


def _list_groups(file: SwarmFile) -> Iterator[MachineGroup]:
    """Split each pool, in its first zone, into machines under grants (until the first one ends) and paid machines."""
    grants = list_grants(file)
    cover = GrantCover(grants, time.time())
    for pool in file.pool:
        type_, zone, is_spot = pool.type, pool.zones[0], pool.how == "spot"
        if free := sum(cover.claim(pool.wanted[0]) for _ in range(pool.count)):
            own_key = quota_key(type_, zone, is_spot)
            own_grants = [grant for grant in grants if quota_key(grant.type, grant.zone, grant.spot) == own_key]
            ends = min((grant.expires for grant in own_grants if grant.expires), default=None)
            yield MachineGroup(type_, zone, pool.how, free, ends=ends)
        if paid := pool.count - free:
            price = tpu_price(type_, zone, is_spot)
            yield MachineGroup(type_, zone, pool.how, paid, None if price is None else paid * price)


def read_grants(path: Path) -> Machines:
    """Return the machines that grants cover now. Raises InputError if there are none."""
    now = time.time()
    counts: dict[str, int] = {}
    groups, notes = [], []
    for grant in _read_file(path).grant:
        if grant.expires is not None and grant.expires <= now:
            continue
        tpu = usual_slice(grant.type) if is_generation(grant.type) else find(grant.type)
        count = grant.count * chips_of(grant.type) // tpu.chips
        counts[tpu.name] = counts.get(tpu.name, 0) + count
        groups.append(MachineGroup(tpu.name, grant.zone, grant.how, count, ends=grant.expires))
        until = "" if grant.expires is None else f", until {datetime.fromtimestamp(grant.expires, UTC):%Y-%m-%d}"
        as_slices = f", as {count:,} {tpu.name}" if is_generation(grant.type) else ""
        notes.append(f"{describe_grant(grant.type, grant.count)} ({grant.how}) in {grant.zone}{as_slices}{until}")
    if not counts:
        raise InputError(f"{path} has no [[grant]] that is valid now. For prices: `plan RECIPE --on …`")
    return Machines(counts, tuple(groups), tuple(notes), {})


def _read_file(path: Path) -> SwarmFile:
    file = read_swarm(path)
    for place, sentence in find_problems(file, time.time()):
        if place[0] in ("pool", "train"):
            raise InputError(locate_error(path, place, sentence))
    return file
