"""`batch = "auto"` of a fleet: of each pool the largest that plan finds, as far as they go together."""

import json
import math
from typing import TYPE_CHECKING

from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.config.train_table import Train
    from tpuswarm.fleet.spec.file import SwarmFile

AUTO = "auto"
CHOSEN = "batches.json"
"""In the run's folder in the bucket: the batch of each pool, as `auto` was answered when the run was begun."""


def with_batch(file: "SwarmFile", url: str) -> "SwarmFile":
    """The file with a batch for each pool in the place of `auto`; of a run that has begun, those that it began with.

    Compiles the step for each type of TPU, once: minutes, which `tpuswarm plan` may have spent already. Raises
    InputError where a type has no answer.
    """
    assert file.train is not None
    if file.train.batch != AUTO:
        return file
    return file.model_copy(update={"train": file.train.model_copy(update={"batch": _chosen(file, file.train, url)})})


def _chosen(file: "SwarmFile", train: "Train", url: str) -> dict[str, int] | None:
    from tpuswarm.train.run.directory import CONFIG
    from tpuswarm.train.storage.bucket import Bucket
    from tpuswarm.train.storage.record import read_file

    bucket = Bucket(url)
    pools = [pool.name for pool in file.pool]
    if not bucket.exists(CHOSEN):
        if read_file(bucket.read_if_there, CONFIG) is not None:
            return None  # it was begun with a number: the head goes on with that, and so do its members
        bucket.create(CHOSEN, json.dumps(_largest(file, train)).encode())
    found: dict[str, int] = json.loads(bucket.read(CHOSEN))  # maybe of another laptop's, which was the first
    if found.keys() != set(pools):
        raise InputError(
            f"{url} was begun with batches for the pools {', '.join(found)}, and the file has {', '.join(pools)}: give "
            "batch a table with the same numbers and one for each new pool, which divides the largest"
        )
    return found


def _largest(file: "SwarmFile", train: "Train") -> dict[str, int]:
    from tpuswarm import catalog, recipes
    from tpuswarm.plan.cache import Cache
    from tpuswarm.plan.children import Children, no_compiler
    from tpuswarm.plan.order import Asked, Order, described
    from tpuswarm.train.process.platform import cache_folder

    if reason := no_compiler():
        raise InputError(f'batch = "auto" asks the TPU compiler: {reason}; or give batch a number')
    target, preset = recipes.find(train.recipe)
    options = {**preset, **{name: str(value) for name, value in train.options.items()}}
    shard = train.shard if train.shard != "auto" else None
    asked = Asked(
        target, options, precision=train.precision, shard=shard, accumulate=train.accumulate, freeze=train.freeze
    )
    places = {each.name: described(each) for each in (catalog.find(pool.type) for pool in file.pool)}
    children = Children(Cache(cache_folder("plan")), lambda order, text: say(f"{order.place.name}: {text}", err=True))
    found: dict[str, int] = {}
    for order, answer in children.answers([Order(asked, each, "") for each in places.values()]):
        if not answer.fits or answer.program is None:
            raise InputError(
                f"{train.recipe} does not fit on a {order.place.name}: {answer.problem or answer.smallest}; "
                f"`tpuswarm plan {train.recipe} --on {order.place.name}` says more"
            )
        found[order.place.name] = answer.program.batch
    types = {pool.name: catalog.find(pool.type).name for pool in file.pool}
    devices = {name: places[type_].devices for name, type_ in types.items()}
    return batches_of({name: found[type_] for name, type_ in types.items()}, devices)


def batches_of(most: dict[str, int], devices: dict[str, int]) -> dict[str, int]:
    """The batch of each pool: as near to the largest that it fits as goes with all others dividing the run's.

    most, devices: of each pool, the largest batch that fits one of its members, and its devices. Says what comes of it.
    """
    best: dict[str, int] = {}
    reached = 0.0
    unit = math.lcm(*devices.values())
    for whole in range(unit, max(most.values()) + 1, unit):
        found = {name: _part(whole, most[name], devices[name]) for name in most}
        share = sum(found[name] / most[name] for name in most)
        if all(found.values()) and max(found.values()) == whole and share >= reached:
            best, reached = found, share
    if not best:
        fits = ", ".join(f"{name} {most[name]:,} on {devices[name]} devices" for name in most)
        raise InputError(
            f"no batches go together: each is a multiple of its devices and divides the largest; what fits: {fits}"
        )
    said = ", ".join(f"{name} {best[name]:,} (fits {most[name]:,})" for name in most)
    say(f"batch of each pool's members: {said}")
    return best


def _part(whole: int, most: int, devices: int) -> int:
    """The largest part of a whole batch that fits and gives each device whole rows; 0: none."""
    parts = (whole // count for count in range(-(-whole // most), whole // devices + 1) if whole % count == 0)
    return next((part for part in parts if part % devices == 0), 0)
