"""Machines to plan for, as swarm.toml has them: its pools with what they train, or its grants."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.config.train_table import Train
    from tpuswarm.fleet.spec.file import SwarmFile
    from tpuswarm.plan.outlook import MachineGroup


class Machines(NamedTuple):
    """By type, in the order of the file."""

    counts: dict[str, int]
    groups: tuple["MachineGroup", ...]
    notes: tuple[str, ...]
    batches: dict[str, int]
    """Rows of a step, by type, where [train] says so for each pool: of two pools of a type the larger."""


def planned(path: Path) -> "tuple[Train, Machines]":
    """What a file's [train] asks for, and the machines of its pools. Raises InputError for what it lacks."""
    from tpuswarm.cli.train.train_options import check_options
    from tpuswarm.fleet.training import pool_batches

    file = _read(path)
    if file.train is None:
        raise InputError(
            f"{path} has no [train], so there is nothing to plan; or name the recipe: `plan RECIPE --on …`"
        )
    if not file.pool:
        raise InputError(f"{path} has no [[pool]], so there is nothing to plan for")
    check_options(path, {"recipe": file.train.recipe, "options": dict(file.train.options)})
    counts: dict[str, int] = {}
    for pool in file.pool:
        counts[pool.type] = counts.get(pool.type, 0) + pool.count
    batches: dict[str, int] = {}
    for name, batch in pool_batches(file).items():
        type_ = next(pool.type for pool in file.pool if pool.name == name)
        batches[type_] = max(batch, batches.get(type_, 0))
    return file.train, Machines(counts, tuple(_groups(file)), (), batches)


def _groups(file: "SwarmFile") -> Iterator["MachineGroup"]:
    """Of each pool in its first zone: what grants cover, which ends with the first of them, and what is paid for."""
    from tpuswarm.fleet.decide.money import GrantCover, quota_key, tpu_price
    from tpuswarm.fleet.spec.desired_from_file import list_grants
    from tpuswarm.plan.outlook import MachineGroup

    grants = list_grants(file)
    cover = GrantCover(grants, time.time())
    for pool in file.pool:
        type_, zone, spot = pool.type, pool.zones[0], pool.how == "spot"
        if free := sum(cover.claim(type_, zone, pool.how) for _ in range(pool.count)):
            own = quota_key(type_, zone, spot)
            ends = [
                each.expires for each in grants if each.expires and quota_key(each.type, each.zone, each.spot) == own
            ]
            yield MachineGroup(type_, zone, pool.how, free, ends=min(ends, default=None))
        if paid := pool.count - free:
            price = tpu_price(type_, zone, spot)
            yield MachineGroup(type_, zone, pool.how, paid, None if price is None else paid * price)


def granted(path: Path) -> Machines:
    """What the grants of a file cover now. Raises InputError where they cover nothing."""
    from tpuswarm.plan.outlook import MachineGroup

    now = time.time()
    counts: dict[str, int] = {}
    groups, notes = [], []
    for grant in _read(path).grant:
        if grant.expires is not None and grant.expires <= now:
            continue
        counts[grant.type] = counts.get(grant.type, 0) + grant.count
        groups.append(MachineGroup(grant.type, grant.zone, grant.how, grant.count, ends=grant.expires))
        until = "" if grant.expires is None else f", until {datetime.fromtimestamp(grant.expires, UTC):%Y-%m-%d}"
        notes.append(f"{grant.count:,} {grant.type} ({grant.how}) in {grant.zone}{until}")
    if not counts:
        raise InputError(
            f"{path} has no [[grant]] that still holds, so nothing is free; `plan RECIPE --on …` shows prices"
        )
    return Machines(counts, tuple(groups), tuple(notes), {})


def _read(path: Path) -> "SwarmFile":
    from tpuswarm.config.toml_file import locate_error
    from tpuswarm.fleet.spec.checks import find_problems
    from tpuswarm.fleet.spec.file import read_swarm

    file = read_swarm(path)
    for place, sentence in find_problems(file, time.time()):
        if place[0] in ("pool", "train"):
            raise InputError(locate_error(path, place, sentence))
    return file
