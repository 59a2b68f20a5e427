"""Load a run: rebuild its recipe and put its parameters on devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tpuswarm.errors import InputError
from tpuswarm.train.data.placing import place_array
from tpuswarm.train.paths import by_path, describe_mismatch, match_paths
from tpuswarm.train.program.compiled import Placed, place_program
from tpuswarm.train.program.exchanged import read_base, with_base, without_base
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Recipe, State, supports
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.best import best_checkpoint
from tpuswarm.train.run.directory import read_config
from tpuswarm.train.run.parent import not_a_run, parent_folder
from tpuswarm.train.run.trees import swarm_arrays
from tpuswarm.train.run.trust import rebuild_recipe
from tpuswarm.train.settings import differences
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import build_recipe

Agree = Callable[[Callable[[], Mapping[str, str]]], None]
"""Raises InputError unless all hosts have the same facts, like `Agreement.require_equal`."""


def single_host(facts: Callable[[], Mapping[str, str]]) -> None:
    pass


@dataclass(frozen=True)
class LoadedRun:
    folder: Path
    config: dict[str, Any]
    recipe: Recipe
    placed: Placed
    state: State
    step: int
    notes: list[str]
    """A sentence for each damaged checkpoint that was skipped."""


def load_run(
    folder: Path,
    devices: Sequence[Any],
    agree: Agree = single_host,
    best: bool = False,
    recipe: Recipe | None = None,
) -> LoadedRun:
    """Return the newest state of a run.

    best: read the best checkpoint. recipe: use it instead of rebuilding the run's.
    Raises InputError for a folder that is no run, has no intact checkpoint, or whose recipe cannot be rebuilt.
    """
    config = read_config(folder)
    recipe = recipe or rebuild_recipe(folder)
    train = config["train"]
    names = ("batch", "precision", "accumulate", "clip", "freeze", "decay", "ema")
    placed = place_program(recipe, Request(**{name: train.get(name) for name in names}), devices)

    def find() -> tuple[checkpoint.Saved, list[str]]:
        saved, notes = (best_checkpoint(folder), list[str]()) if best else checkpoint.require_intact(folder)
        agree(lambda: _digest_fact(folder, saved.digest))
        return saved, notes

    restore = partial(restore_state, recipe=recipe, placed=placed, recorded=config.get("numerics", {}))
    saved, state, notes = checkpoint.read_unpruned(find, restore)
    return LoadedRun(folder, config, recipe, placed, state, saved.step, notes)


def restore_state(saved: checkpoint.Saved, recipe: Recipe, placed: Placed, recorded: Mapping[str, str]) -> State:
    """Return the state of a checkpoint, with a base model's parameters from its files; recorded: as in `restore`."""
    state = checkpoint.restore(saved, without_base(recipe, placed.program, placed.state), recorded)
    if recipe.base_model is None:
        return state
    exchange = placed.program.exchange()
    return exchange.put(state, with_base(recipe, placed, exchange.get(state), saved.about.get("base")))


def initial_parameters(
    parent: str, only: str | None, recipe: Recipe, onto: Placed, key: jax.Array, agree: Agree = single_host
) -> Any:
    """Return the shared parameters of another run or of a published model, in the shardings of `onto`.

    only: a regular expression; parameters that it does not match come from init with `key`.
    agree: compares digests, because a name may mean different files on different hosts.
    Raises InputError for a missing or extra leaf, another shape, and another meaning (a different tokenizer).
    """
    folder = parent_folder(parent)
    theirs: Mapping[str, Any]
    if folder is None:
        if not supports(recipe, "load_shared"):
            raise not_a_run(parent, recipe.name)
        agree(lambda: _digest_fact(parent, _published_digest(recipe, parent)))
        theirs = by_path(recipe.load_shared(parent, onto.program.exchange().get(onto.state)))
    else:
        theirs = _read_shared(folder, recipe, onto, agree)
    shared = onto.program.exchange().get(onto.state)
    structure, leaves = jax.tree.structure(shared), by_path(shared)
    parameters = onto.program.parameters(onto.state)
    names = [parameter.path for parameter in parameters]
    is_wanted = [True] * len(names)
    if only is not None:  # statistics are matched like the parameters of their layer
        matches = match_paths([*names, *(name.removeprefix("extra/") for name in names)], only, "init-only")
        flags = zip(parameters, matches[: len(names)], matches[len(names) :], strict=True)
        is_wanted = [parameter.base or any(matched) for parameter, *matched in flags]
    ours = {path: leaf for (path, leaf), wanted in zip(leaves.items(), is_wanted, strict=True) if wanted}
    if folder is not None:
        found = theirs if only is None else {path: theirs[path] for path in ours if path in theirs}
        _refuse_other_shapes(folder, found, ours)
    fresh = {} if only is None else by_path(onto.program.exchange().get(onto.init(key)))

    def placed(path: str, like: Any) -> jax.Array:
        if path not in ours:
            return fresh[path]
        array = theirs[path]
        put = jax.device_put if isinstance(array, jax.Array) else place_array
        return put(array, like.sharding)

    return jax.tree.unflatten(structure, [placed(path, leaf) for path, leaf in leaves.items()])


def _read_shared(folder: Path, recipe: Recipe, onto: Placed, agree: Agree) -> Mapping[str, Any]:
    """Return the shared arrays of a run by the paths in the shared parameters of `recipe`."""
    config = read_config(folder)
    if "swarm" in config:
        _refuse_other_meaning(folder, recipe, config["recipe"]["options"])
        theirs, _, digest = swarm_arrays(folder)
        agree(lambda: _digest_fact(folder, digest))
        if recipe.base_model is None:
            return theirs
        return by_path(read_base(recipe, onto, config["swarm"].get("base"))) | theirs
    config = config["recipe"]
    if not config["target"]:
        return _read_shared_by_path(folder, recipe, onto, agree)
    is_same = config["target"] == recipe.target  # its code is running already
    own = build_recipe(config["target"], config["options"], folder) if is_same else rebuild_recipe(folder)
    loaded = load_run(folder, list(onto.mesh.devices.flat), agree, recipe=own)
    _refuse_other_meaning(folder, recipe, loaded.recipe.options())
    return by_path(loaded.placed.program.exchange().get(loaded.state))


def _published_digest(recipe: Recipe, parent: str) -> str:
    if not supports(recipe, "shared_digest"):
        raise InputError(
            f"{recipe.name} has no shared_digest, by which hosts compare their {parent}: define it next to "
            "load_shared, or start from a run"
        )
    return recipe.shared_digest(parent)


def _read_shared_by_path(folder: Path, recipe: Recipe, onto: Placed, agree: Agree) -> Mapping[str, Any]:
    """Read a run whose recipe was built in a program, and find its shared arrays by their paths in our state."""
    _refuse_other_meaning(folder, recipe, read_config(folder)["recipe"]["options"])
    saved, arrays, _ = checkpoint.read_unpruned(lambda: checkpoint.require_intact(folder), checkpoint.read_arrays)
    agree(lambda: _digest_fact(folder, saved.digest))
    shared = onto.program.exchange().get(onto.state)
    names = {id(leaf): name for name, leaf in by_path(onto.state).items()}
    if not all(id(leaf) in names for leaf in jax.tree.leaves(shared)):
        raise InputError(
            f"{shown(folder)} was made in a program, so its parameters are found by their paths, and the exchange of "
            f"{recipe.name} returns arrays without a path in its state: train the other run from a file, file.py:recipe"
        )
    ours = {names[id(leaf)]: path for path, leaf in by_path(shared).items()}
    roots, own = {name.partition("/")[0] for name in ours}, set(names.values()) - set(ours)
    theirs = {name: array for name, array in arrays.items() if name.partition("/")[0] in roots and name not in own}
    return {ours.get(name, name): array for name, array in theirs.items()}


def _refuse_other_meaning(folder: Path, recipe: Recipe, theirs: Mapping[str, Any]) -> None:
    """Raise InputError if an option, the tokenizer for example, gives the run's parameters another meaning."""
    there, here = ({name: options.get(name) for name in recipe.identity} for options in (theirs, recipe.options()))
    if found := differences(there, here):
        raise InputError(f"the parameters of {shown(folder)} do not fit this recipe: {'; '.join(found)}")


def _refuse_other_shapes(folder: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    there, here = ({name: leaf.shape for name, leaf in tree.items()} for tree in (theirs, ours))
    if different := describe_mismatch(there, here, "parameters"):
        raise InputError(f"{shown(folder)} holds a different model: {different}")


def _digest_fact(parent: str | Path, digest: str) -> dict[str, str]:
    return {f"parameters at {shown(parent) if isinstance(parent, Path) else parent}": digest}
