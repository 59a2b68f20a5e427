"""A pytree to a file and back, and the arrays of a run without its recipe: `save` and `load`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.numpy import save as to_bytes

from tpuswarm.errors import InputError
from tpuswarm.train.data.arrays import to_numpy
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.paths import by_path, leaf_paths, other_model
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import configure_jax
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.best import best_checkpoint
from tpuswarm.train.run.directory import CONFIG, read_config
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.storage.copy import bring
from tpuswarm.train.storage.folders import is_url
from tpuswarm.train.user_code import find_maker

SUFFIX = ".safetensors"
SWARM = "tpuswarm.swarm.storage.load:shared_arrays"
"""Reads the run of a swarm; found by its name, as recipes are: this room knows of no swarm."""


@entry_point
def save(tree: Any, file: str | Path) -> None:
    """Write a pytree of arrays to FILE.safetensors, each under its path; other libraries read it too.

    The file is there whole or not at all. Raises InputError for another suffix, for leaves that are no arrays of
    numbers, for two leaves of one path, and where it cannot be written.
    """
    if is_url(str(file)):
        raise InputError(f"{file}: a pytree is saved on a disk; give a path, and copy the file from there")
    file = Path(file)
    if file.suffix != SUFFIX:
        raise InputError(f"{file}: a pytree is saved as a {SUFFIX} file; name it {file.with_suffix(SUFFIX).name}")
    leaves = [np.asarray(leaf, order="C") for leaf in jax.tree.leaves(to_numpy(tree))]
    names = leaf_paths(tree)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two leaves have the path {twice[0]}: rename a key that has a slash in it")
    if both := _both(names):
        raise InputError(f"{both} is a leaf, and another's path begins with it: rename a key that has a slash in it")
    for name, leaf in zip(names, leaves, strict=True):
        try:
            to_bytes({name: leaf.ravel()[:0]})
        except SafetensorError as error:
            raise InputError(
                f"{name} ({leaf.dtype.name}) is no array of numbers that a {SUFFIX} file holds: leave it out"
            ) from error
    try:
        write_atomically(file, to_bytes(dict(zip(names, leaves, strict=True))))
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from error


@entry_point
def load(place: str | Path, like: Any = None, best: bool = False) -> Any:
    """The pytree in FILE.safetensors, or the state of a run's newest whole checkpoint, as NumPy arrays.

    place: a file, or a run as commands name it: a folder, a name in ./runs, `last`, gs://…. The state of a recipe of
    `supervised` has `params`, `opt`, `ema` and `extra`; of a swarm's run it is `params` (and `extra`), what its members
    share, and `ema`, of the newest whole version. best: the checkpoint that `keep_best` kept, in place of the newest.
    like: a tree whose structure the result gets, of arrays or shapes, or a dict of some of those keys, {"params": …};
    None: dicts in dicts, a list by its indices.
    Raises InputError for what is no such thing, for a checkpoint that is damaged, and for another path or shape than in
    `like`.
    """
    if str(place).endswith(SUFFIX):
        try:
            arrays = load_file(place)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{place} cannot be read: {error}") from error
    else:
        configure_jax()  # checkpoints ask JAX for its devices
        name = str(place)
        folder = bring(name, whole=True) if is_url(name) else find_run(name)
        arrays = checkpoint.read_arrays(best_checkpoint(folder)) if best else _of_run(folder)
        if isinstance(like, Mapping):
            arrays = {path: array for path, array in arrays.items() if path.partition("/")[0] in like}
    if like is not None:
        return _like(arrays, like, str(place))
    if both := _both(arrays):
        raise InputError(f"{place} has an array {both}, and others whose path begins with it: say which with like=")
    return _nested(arrays)


def swarm_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]:
    """What the members of the swarm in `folder` share by path, its moving average (or nothing), and its digest.

    InputError where there is no version.
    """
    found: tuple[dict[str, np.ndarray], dict[str, np.ndarray], str] = find_maker(SWARM)(folder)
    return found


def _of_run(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} is no run: it has no {CONFIG}")
    if "swarm" not in read_config(folder):
        return checkpoint.read_arrays(checkpoint.require_intact(folder)[0])
    shared, average, _ = swarm_arrays(folder)
    if {path.partition("/")[0] for path in shared} == {"params", "extra"}:  # with mutable state it says which is which
        named = {path.removeprefix("params/"): array for path, array in average.items() if path.startswith("params/")}
    else:
        shared, named = {f"params/{path}": array for path, array in shared.items()}, average
    return shared | {f"ema/{path}": array for path, array in named.items()}


def _both(names: Iterable[str]) -> str | None:
    """What would be an array and a dict of others in one tree, if anything."""
    names = set(names)
    folders = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
    return min(folders & names, default=None)


def _nested(arrays: Mapping[str, np.ndarray]) -> Any:
    if arrays.keys() == {""}:  # the tree was one leaf
        return arrays[""]
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, name = path.split("/")
        node = tree
        for each in parents:
            node = node.setdefault(each, {})
        node[name] = array
    return tree


def _like(arrays: Mapping[str, np.ndarray], like: Any, place: str) -> Any:
    there, here = ({path: np.shape(leaf) for path, leaf in each.items()} for each in (arrays, by_path(like)))
    if different := other_model(there, here):
        raise InputError(f"{place} holds another tree: {different}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in here])
