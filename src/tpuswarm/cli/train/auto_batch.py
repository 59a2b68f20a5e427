"""`batch = "auto"` of a fleet: choose the largest batches of its pools that divide each other."""

import json
import math

from tpuswarm import catalog, recipes
from tpuswarm.config.train_table import Train
from tpuswarm.errors import InputError
from tpuswarm.fleet.spec.file import SwarmFile
from tpuswarm.plan.compile.cache import PlanCache
from tpuswarm.plan.compile.pool import CompilePool, no_compiler
from tpuswarm.plan.compile.request import CompileRequest, PlanOptions, describe_target
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.directory import CONFIG
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.storage.record import read_file

AUTO = "auto"
BATCHES_FILE = "batches.json"
"""In the run's folder in the bucket: the batch that `auto` chose for each pool."""


def resolve_auto_batch(file: SwarmFile, url: str) -> SwarmFile:
    """Replace `batch = "auto"` by a batch for each pool; a run that has begun keeps its batches.

    Compiles the step once for each type of TPU, which takes minutes. Raises InputError if the model fits on none.
    """
    assert file.train is not None
    if file.train.batch != AUTO:
        return file
    batches = _read_or_choose(file, file.train, url)
    return file.model_copy(update={"train": file.train.model_copy(update={"batch": batches})})


def _read_or_choose(file: SwarmFile, train: Train, url: str) -> dict[str, int] | None:
    bucket = Bucket(url)
    pools = [pool.name for pool in file.pool]
    if not bucket.exists(BATCHES_FILE):
        if read_file(bucket.read_if_there, CONFIG) is not None:
            return None  # the run began with a number, which its head and members keep
        bucket.create(BATCHES_FILE, json.dumps(_choose(file, train)).encode())
    batches: dict[str, int] = json.loads(bucket.read(BATCHES_FILE))  # another computer may have been first
    if batches.keys() != set(pools):
        raise InputError(
            f"{url} began with batches for the pools {', '.join(batches)}, and the file has {', '.join(pools)}. Make "
            "batch a table with these numbers, and for each new pool one that divides the largest."
        )
    return batches


def _choose(file: SwarmFile, train: Train) -> dict[str, int]:
    if reason := no_compiler():
        raise InputError(f'batch = "auto" needs the TPU compiler: {reason}; or make batch a number')
    target, preset = recipes.find(train.recipe)
    recipe_options = {**preset, **{name: str(value) for name, value in train.options.items()}}
    shard = train.shard if train.shard != "auto" else None
    options = PlanOptions(
        target, recipe_options, precision=train.precision, shard=shard, accumulate=train.accumulate, freeze=train.freeze
    )
    tpus = {tpu.name: describe_target(tpu) for tpu in (catalog.find(pool.type) for pool in file.pool)}
    compile_pool = CompilePool(
        PlanCache(cache_folder("plan")), lambda request, text: echo(f"{request.target.name}: {text}", err=True)
    )
    largest: dict[str, int] = {}
    for request, result in compile_pool.results([CompileRequest(options, tpu, "") for tpu in tpus.values()]):
        name = request.target.name
        if not result.fits or result.program is None:
            raise InputError(
                f"{train.recipe} does not fit on a {name}: {result.problem or result.smallest}. Details: "
                f"`tpuswarm plan {train.recipe} --on {name}`"
            )
        largest[name] = result.program.batch
    types = {pool.name: catalog.find(pool.type).name for pool in file.pool}
    devices = {pool: tpus[type_].devices for pool, type_ in types.items()}
    return choose_batches({pool: largest[type_] for pool, type_ in types.items()}, devices)


def choose_batches(largest: dict[str, int], devices: dict[str, int]) -> dict[str, int]:
    """Choose for each pool a batch that divides the run's and is as near to its largest as possible.

    `largest`: the largest batch that fits a member of each pool; `devices`: the devices of such a member.
    """
    best: dict[str, int] = {}
    best_share = 0.0
    step = math.lcm(*devices.values())
    for run_batch in range(step, max(largest.values()) + 1, step):
        batches = {pool: _largest_part(run_batch, largest[pool], devices[pool]) for pool in largest}
        share = sum(batches[pool] / largest[pool] for pool in largest)
        if all(batches.values()) and max(batches.values()) == run_batch and share >= best_share:
            best, best_share = batches, share
    if not best:
        fits = ", ".join(f"{pool} {largest[pool]:,} on {devices[pool]} devices" for pool in largest)
        raise InputError(
            "no batches suit all pools: each must be a multiple of its devices and divide the largest. "
            f"What fits: {fits}"
        )
    chosen = ", ".join(f"{pool} {best[pool]:,} (fits {largest[pool]:,})" for pool in largest)
    echo(f"batch of each pool's members: {chosen}")
    return best


def _largest_part(run_batch: int, limit: int, devices: int) -> int:
    counts = range(-(-run_batch // limit), run_batch // devices + 1)
    parts = (run_batch // count for count in counts if run_batch % count == 0)
    return next((part for part in parts if part % devices == 0), 0)
