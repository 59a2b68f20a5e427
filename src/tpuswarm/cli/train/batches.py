"""Choose the batches of a fleet's pools, and check before anything is rented that a step runs on their machines."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuswarm import catalog, recipes
from tpuswarm.config.toml_file import parse_toml
from tpuswarm.config.train_table import Train
from tpuswarm.errors import InputError
from tpuswarm.fleet.spec.file import SwarmFile
from tpuswarm.plan.compile.cache import PlanCache
from tpuswarm.plan.compile.pool import CompilePool, no_compiler
from tpuswarm.plan.compile.request import CompileRequest, CompileResult, PlanOptions, describe_target
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.program.request import default_batch
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run import schema
from tpuswarm.train.run.directory import CONFIG
from tpuswarm.train.settings import differences
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.storage.record import read_file

AUTO = "auto"
BATCHES_FILE = "batches.json"
"""In the run's folder in the bucket: the batch that `auto` chose for each pool."""


def with_default_batch(file: SwarmFile, recipe: Recipe) -> SwarmFile:
    """Give [train] the recipe's batch, rounded up so that the devices of every pool divide it."""
    assert file.train is not None
    if file.train.batch is not None:
        return file
    return _with_batch(file, default_batch(recipe, math.lcm(*_devices(file).values()), file.train.accumulate))


def check_batches(file: SwarmFile) -> None:
    """Raise InputError for a batch that the devices of a pool's machine do not divide."""
    assert file.train is not None
    batch, accumulate = file.train.batch, file.train.accumulate or 1
    if batch is None or batch == AUTO:
        return
    for pool, devices in _devices(file).items():
        rows = batch[pool] if isinstance(batch, dict) else int(batch)
        unit = devices * accumulate
        if rows % unit:
            shared = unit if isinstance(batch, dict) else math.lcm(*_devices(file).values()) * accumulate
            parts = f"{devices} devices" + (f" x {accumulate} micro-batches" if accumulate > 1 else "")
            raise InputError(
                f"a batch of {rows:,} rows does not divide evenly over the {parts} of a machine of pool {pool}: use "
                f"{math.ceil(rows / shared) * shared:,}"
            )


def resolve_batches(file: SwarmFile, url: str, recipe: Recipe) -> SwarmFile:
    """Give [train] a number for each pool, or one for all; a run that has begun keeps its own.

    Compiles the step once for each type of TPU, which takes minutes, for `batch = "auto"` and on Google Cloud. Raises
    InputError if it does not run on a pool's machines.
    """
    assert file.train is not None
    if file.train.batch == AUTO:
        return _with_batch(file, _read_or_choose(file, file.train, url))
    if (begun := read_begun(url)) is not None:
        _require_same_run(file.train, url, begun)
    if begun is not None and file.train.batch is None:
        file = _with_batch(file, begun["batch"])
        try:
            check_batches(file)
        except InputError as error:
            raise InputError(f"{url} began with its batch, and {error} in a new run (`run` in [train])") from error
        return file
    file = with_default_batch(file, recipe)
    check_batches(file)
    if file.provider == "google":  # the local cloud's machines have this computer's memory
        _check_memory(file)
    return file


def read_begun(url: str) -> dict[str, Any] | None:
    """Return the settings of a run in a bucket; None before it begins. Raise InputError if they are damaged."""
    config = read_file(Bucket(url).read_if_there, CONFIG)
    if config is None:
        return None
    try:
        text = config.decode(errors="replace")
        return parse_toml(text, Path(CONFIG), schema.Config).train.model_dump()
    except InputError as error:
        raise InputError(f"{url}/{error}; restore a copy of it, or name another `run` in [train]") from error


def _require_same_run(train: Train, url: str, begun: Mapping[str, Any]) -> None:
    """Raise InputError for settings that no resumed swarm may change: its head would refuse them."""
    batch = max(train.batch.values()) if isinstance(train.batch, dict) else train.batch
    if changed := differences(begun, {"batch": batch, "seed": train.seed}):
        raise InputError(
            f"{url} is a different run: {' and '.join(changed)}; put it back, or name another `run` in [train]"
        )


def _with_batch(file: SwarmFile, batch: int | dict[str, int] | None) -> SwarmFile:
    assert file.train is not None
    return file.model_copy(update={"train": file.train.model_copy(update={"batch": batch})})


def _devices(file: SwarmFile) -> dict[str, int]:
    """Return the devices of a machine of each pool."""
    return {pool.name: catalog.find(pool.type).devices for pool in file.pool}


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
    types = {pool.name: catalog.find(pool.type).name for pool in file.pool}
    largest: dict[str, int] = {}
    for type_, result in _compile(train, dict.fromkeys(types.values())).items():
        if result.program is None or not result.fits:
            raise InputError(f"the batch for a {type_} is unknown: {result.problem}; make batch a number")
        largest[type_] = result.program.batch
    return choose_batches({pool: largest[type_] for pool, type_ in types.items()}, _devices(file))


def _check_memory(file: SwarmFile) -> None:
    """Compile the step with the file's batches; raise InputError if it does not fit on one of the types."""
    train = file.train
    assert train is not None
    if reason := no_compiler():
        echo(f"note: memory was not checked: {reason}", err=True)
        return
    rows: dict[str, int | None] = {}
    for pool in file.pool:
        type_, batch = catalog.find(pool.type).name, train.batch
        own = batch[pool.name] if isinstance(batch, dict) else batch
        assert isinstance(own, int)
        rows[type_] = max(own, rows.get(type_) or 0)
    for type_, result in _compile(train, rows).items():
        if result.fits is None:
            echo(f"note: memory of a {type_} was not checked: {result.problem}", err=True)


def _compile(train: Train, rows: Mapping[str, int | None]) -> dict[str, CompileResult]:
    """Compile the step for each type of TPU with its rows, or the most that fit. Raise InputError if they do not."""
    target, preset = recipes.find(train.recipe)
    options = {**preset, **{name: str(value) for name, value in train.options.items()}}
    if ":" in train.recipe and train.data is not None:  # a built-in recipe has the same step for all data
        options["data"] = train.data
    shard = train.shard if train.shard != "auto" else None
    requests = [
        CompileRequest(
            PlanOptions(target, options, batch, train.precision, shard, train.accumulate, train.freeze, train.ema),
            describe_target(catalog.find(type_)),
        )
        for type_, batch in rows.items()
    ]
    compile_pool = CompilePool(
        PlanCache(cache_folder("plan")), lambda request, text: echo(f"{request.target.name}: {text}", err=True)
    )
    results: dict[str, CompileResult] = {}
    for request, result in compile_pool.results(requests):
        name = request.target.name
        if result.fits is False:
            batch = "" if request.options.batch is None else f" with a batch of {request.options.batch:,} rows"
            raise InputError(
                f"{train.recipe} does not fit on a {name}{batch}: {result.problem or result.smallest}. Details: "
                f"`tpuswarm plan {train.recipe} --on {name}`"
            )
        results[name] = result
    return results


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
