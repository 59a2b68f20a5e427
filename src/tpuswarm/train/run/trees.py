"""Save a pytree to a file; load one from a file, or from a run without its recipe."""

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
from tpuswarm.train.paths import by_path, describe_mismatch, leaf_paths
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import configure_jax
from tpuswarm.train.run import checkpoint
from tpuswarm.train.run.best import best_checkpoint
from tpuswarm.train.run.directory import CONFIG, read_config
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import is_url
from tpuswarm.train.user_code import find_maker

SUFFIX = ".safetensors"
SWARM_LOADER = "tpuswarm.swarm.storage.load:shared_arrays"
"""Imported by name, because train/ may not import swarm/."""


@entry_point
def save(tree: Any, file: str | Path) -> None:
    """Write a pytree of arrays to FILE.safetensors, each under its path, atomically; other libraries can read it.

    Raises InputError for another suffix, for leaves that are not numeric arrays, for two leaves with the same path,
    and if the file cannot be written.
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
    if clash := _leaf_and_branch(names):
        raise InputError(f"{clash} is a leaf, and another's path begins with it: rename a key that has a slash in it")
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
    """Return the pytree in FILE.safetensors, or the state in a run's newest intact checkpoint, as NumPy arrays.

    place: a file, or a run: a folder, a name in ./runs, `last`, gs://….
    The state of a `supervised` recipe has `params`, `opt`, `ema` and `extra`. For a swarm it has the shared `params`
    (and `extra`) and `ema` of the newest intact version.
    like: a tree of arrays or shapes that gives the structure, or a dict of some of those keys, {"params": …}. Default:
    nested dicts, with indices as keys of a list.
    best: read the checkpoint that `keep_best` kept.
    Raises InputError if `place` is neither, if the checkpoint is damaged, and for a path or shape that is not in
    `like`.
    """
    if str(place).endswith(SUFFIX):
        try:
            arrays = load_file(place)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{place} cannot be read: {error}") from error
    else:
        configure_jax()  # reading checkpoints starts JAX
        name = str(place)
        folder = download_run(name, whole=True) if is_url(name) else find_run(name)
        arrays = _read_arrays(lambda: (best_checkpoint(folder), [])) if best else _of_run(folder)
        if isinstance(like, Mapping):
            arrays = {path: array for path, array in arrays.items() if path.partition("/")[0] in like}
    if like is not None:
        return _like(arrays, like, str(place))
    if clash := _leaf_and_branch(arrays):
        raise InputError(f"{place} has an array {clash}, and others whose path begins with it: say which with like=")
    return _to_nested_dicts(arrays)


def swarm_arrays(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]:
    """Return a swarm's shared arrays by path, their moving average (may be empty), and a digest.

    Raises InputError before the first version.
    """
    arrays: tuple[dict[str, np.ndarray], dict[str, np.ndarray], str] = find_maker(SWARM_LOADER)(folder)
    return arrays


def _of_run(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} is no run: it has no {CONFIG}")
    if "swarm" not in read_config(folder):
        return _read_arrays(lambda: checkpoint.require_intact(folder))
    shared, average, _ = swarm_arrays(folder)
    if {path.partition("/")[0] for path in shared} == {"params", "extra"}:  # the recipe has mutable state
        ema = {path.removeprefix("params/"): array for path, array in average.items() if path.startswith("params/")}
    else:
        shared, ema = {f"params/{path}": array for path, array in shared.items()}, average
    return shared | {f"ema/{path}": array for path, array in ema.items()}


def _read_arrays(find: checkpoint.Find) -> dict[str, np.ndarray]:
    return checkpoint.read_unpruned(find, checkpoint.read_arrays)[1]


def _leaf_and_branch(paths: Iterable[str]) -> str | None:
    """Return a path that is both an array and the start of another path."""
    paths = set(paths)
    branches = {path[:index] for path in paths for index, letter in enumerate(path) if letter == "/"}
    return min(branches & paths, default=None)


def _to_nested_dicts(arrays: Mapping[str, np.ndarray]) -> Any:
    if arrays.keys() == {""}:  # the tree was one leaf
        return arrays[""]
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    return tree


def _like(arrays: Mapping[str, np.ndarray], like: Any, place: str) -> Any:
    there, here = ({path: np.shape(leaf) for path, leaf in tree.items()} for tree in (arrays, by_path(like)))
    if different := describe_mismatch(there, here):
        raise InputError(f"{place} holds another tree: {different}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in here])
