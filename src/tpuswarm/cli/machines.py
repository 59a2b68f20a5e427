"""Machines to plan for, as swarm.toml has them: its pools with what they train, or its grants."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.config.train import Train
    from tpuswarm.fleet.file import SwarmFile


class Machines(NamedTuple):
    """By type, in the order of the file."""

    counts: dict[str, int]
    free: frozenset[str]
    """Types of which grants cover all."""
    notes: tuple[str, ...]


def planned(path: Path) -> "tuple[Train, Machines]":
    """What a file's [train] asks for, and the machines of its pools. Raises InputError for what it lacks."""
    from tpuswarm.cli.asked import check_options

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
    return file.train, Machines(counts, frozenset(), ())


def granted(path: Path) -> Machines:
    """What the grants of a file cover now. Raises InputError where they cover nothing."""
    now = time.time()
    counts: dict[str, int] = {}
    notes = []
    for grant in _read(path).grant:
        if grant.expires is not None and grant.expires <= now:
            continue
        counts[grant.type] = counts.get(grant.type, 0) + grant.count
        until = "" if grant.expires is None else f", until {datetime.fromtimestamp(grant.expires, UTC):%Y-%m-%d}"
        notes.append(f"{grant.count:,} {grant.type} ({grant.how}) in {grant.zone}{until}")
    if not counts:
        raise InputError(
            f"{path} has no [[grant]] that still holds, so nothing is free; `plan RECIPE --on …` shows prices"
        )
    return Machines(counts, frozenset(counts), tuple(notes))


def _read(path: Path) -> "SwarmFile":
    from tpuswarm.config.toml_file import at_line
    from tpuswarm.fleet.checks import problems
    from tpuswarm.fleet.file import read_swarm

    file = read_swarm(path)
    for place, sentence in problems(file, time.time()):
        if place[0] in ("pool", "train"):
            raise InputError(at_line(path, place, sentence))
    return file
