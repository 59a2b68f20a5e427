"""Load a swarm's run: rebuild its recipe and bring a committed version to devices."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.arithmetic.outer import average_row
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.storage.founding import FOUNDING, read_founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store
from tpuswarm.swarm.storage.verify import newest_whole
from tpuswarm.train.loop.resolve import request
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.program.compiled import Placed, place_program
from tpuswarm.train.program.exchanged import exchanged, with_base
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run.directory import read_config
from tpuswarm.train.run.loaded import LoadedRun
from tpuswarm.train.run.trust import rebuild_recipe


def load_swarm(folder: Path, devices: Sequence[Any], recipe: Recipe | None = None) -> LoadedRun:
    """Load the newest intact version of the run in `folder`, for `recipe` or the run's own.

    Its step is the number of whole batches counted. Raise InputError before the first version, and RunFailed if no
    version is intact.
    """
    config = read_config(folder)
    newest = _newest(folder)
    recipe = recipe or rebuild_recipe(folder)
    placed = place_program(recipe, request(config["train"]), devices)
    shared = on_devices(placed, newest.layout, newest.state)
    state = placed.init(run_key(0), with_base(recipe, placed, shared, config["swarm"].get("base")))
    average = exchanged(placed.program, placed.state).average
    if newest.average and average:
        state = average.put(state, on_devices(placed, newest.layout, newest.average))
    tokens_per_step = config["train"]["batch"] * placed.program.tokens_per_row
    return LoadedRun(folder, config, recipe, placed, state, newest.record.tokens // tokens_per_step, newest.notes)


def shared_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]:
    """Return the shared parameters of the newest intact version by path, their moving average, and a digest.

    The average is empty if the run keeps none. Raise as `load_swarm` does; needs no recipe.
    """
    newest = _newest(folder)
    average = newest.layout.join(newest.average) if newest.average else {}
    return newest.layout.join(newest.state), average, hashlib.sha256("".join(newest.record.state).encode()).hexdigest()


class _Newest(NamedTuple):
    layout: Layout
    record: Record
    state: list[np.ndarray]
    """float32[n] for each fragment."""
    average: list[np.ndarray]
    """float32[n] for each fragment; empty if the run keeps none."""
    notes: list[str]
    """A sentence if a newer version is damaged."""


def _newest(folder: Path) -> _Newest:
    store = Store(folder)
    founding = read_founding(store)
    if founding is None:
        raise InputError(f"{folder} has no {FOUNDING}: it has no commit yet")
    ledger, objects = Ledger(store), Objects(store)
    record, notes = ledger.view().newest, []
    if founding.layout.digest != record.digests.layout:
        raise Corrupt(FOUNDING, store.root, "the commits have another layout")
    try:
        found = _arrays(objects, record)
    except (Missing, Corrupt) as error:
        record = ledger.record(newest_whole(store))
        notes.append(f"{error}; using commit {record.version}, which is intact")
        found = _arrays(objects, record)
    return _Newest(founding.layout, record, *found, notes)


def _arrays(objects: Objects, record: Record) -> tuple[list[np.ndarray], list[np.ndarray]]:
    kept = record.outer if record.kept is not None else ()
    row = average_row(record.downlink)
    state = [objects.get_finite(digest) for digest in record.state]
    return state, [objects.get_array(digest)[row] for digest in kept]


def on_devices(placed: Placed, layout: Layout, fragments: Sequence[np.ndarray]) -> Any:
    """Bring fragments to the devices, as the shared part of a state."""
    shared = exchanged(placed.program, placed.state).get(placed.state)
    layout.require_fit(fragments)
    leaves = zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True)
    return jax.tree.unflatten(
        jax.tree.structure(shared),
        [jax.device_put(layout.leaf(path, fragments), leaf.sharding) for path, leaf in leaves],
    )
