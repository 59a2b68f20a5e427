"""A run read back: its recipe rebuilt, its parameters on devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tpuswarm.errors import InputError
from tpuswarm.train import checkpoint
from tpuswarm.train.fit import Placed, Request, place
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.recipe import Recipe, State
from tpuswarm.train.run import CONFIG, read_config
from tpuswarm.train.settings import differences
from tpuswarm.train.user_code import build_recipe

Agree = Callable[[Callable[[], Mapping[str, str]]], None]
"""Raises InputError unless all hosts of a program give the same facts, as `Together.agree` does."""


def alone(facts: Callable[[], Mapping[str, str]]) -> None:
    """Agree with nobody: there is one host."""


@dataclass(frozen=True)
class LoadedRun:
    """A run's newest whole checkpoint on devices."""

    folder: Path
    config: dict[str, Any]
    recipe: Recipe
    placed: Placed
    state: State
    step: int
    notes: list[str]
    """A sentence for each damaged checkpoint passed over."""


def load_run(
    folder: Path, devices: Sequence[Any], options: Mapping[str, Any] | None = None, agree: Agree = alone
) -> LoadedRun:
    """The recipe (with `options` in place of its own) and newest state of the run in `folder`.

    Raises InputError where it is no run, cannot be rebuilt, or has no whole checkpoint.
    """
    config = read_config(folder)
    if not config["recipe"]["target"]:
        raise InputError(
            f"{folder} was trained by a Python program; to use it here, put its recipe into a file and train "
            "file.py:Recipe"
        )
    saved, notes = checkpoint.newest(folder / "checkpoints")
    if saved is None:
        raise InputError(f"{folder} has no intact checkpoint" + "".join(f"; {note}" for note in notes))
    agree(lambda: _begun_with(folder, saved.digest))
    recipe = build_recipe(config["recipe"]["target"], {**config["recipe"]["options"], **(options or {})}, folder)
    train = config["train"]
    names = ("batch", "precision", "accumulate", "clip", "freeze", "decay", "ema")
    placed = place(recipe, Request(**{name: train.get(name) for name in names}), devices)
    return LoadedRun(folder, config, recipe, placed, checkpoint.restore(saved, placed.state), saved.step, notes)


def load_parameters(parent: str, recipe: Recipe, onto: Placed, agree: Agree = alone) -> Any:
    """The shared parameters of another run, or of a published model that the recipe reads, in the shardings of `onto`.

    What one name means may differ from host to host (a disk of its own, an older cache): they agree on what they read.
    Raises InputError where a leaf is missing, extra or of another shape, and where it means something else (another
    tokenizer), naming the first.
    """
    if not (Path(parent) / CONFIG).exists():
        agree(lambda: _begun_with(parent, recipe.shared_digest(parent)))
        return recipe.load_shared(parent, onto.program.exchange().get(onto.state))
    folder = Path(parent)
    if "swarm" in read_config(folder):
        raise InputError(
            f"--init-from cannot read a swarm's run yet: run `tpuswarm export {folder} OUT`, then use "
            "--init-from hf:OUT"
        )
    loaded = load_run(folder, list(onto.mesh.devices.flat), agree=agree)
    meant = [{name: each.options().get(name) for name in recipe.identity} for each in (loaded.recipe, recipe)]
    if found := differences(*meant):
        raise InputError(f"the parameters of {folder} do not fit this recipe: {'; '.join(found)}")
    theirs, ours = loaded.placed.program.exchange().get(loaded.state), onto.program.exchange().get(onto.state)
    shapes = [dict(zip(leaf_paths(tree), _shapes(tree), strict=True)) for tree in (theirs, ours)]
    wrong = sorted(name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name))
    if wrong:
        name = wrong[0]
        raise InputError(
            f"{folder} holds a different model: {len(wrong)} parameters differ, the first {name} "
            f"({shapes[0].get(name, 'missing')} there, {shapes[1].get(name, 'missing')} here)"
        )
    return jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), theirs, ours)


def _begun_with(parent: str | Path, digest: str) -> dict[str, str]:
    return {f"parameters at {parent}": digest}


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(tree)]
