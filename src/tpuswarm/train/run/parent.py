"""Resolve --init-from: the run or published model whose parameters a new run starts from."""

from pathlib import Path
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.recipe import Recipe, supports
from tpuswarm.train.run.directory import CONFIG, read_config
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import is_url


def find_parent(name: str | Path) -> str:
    """Return the absolute path or URL of a run, or the name of a published model, for the recipe to read.

    Makes the folder in hf:DIR absolute, and also a path without a run.
    """
    if is_url(str(name)):
        return str(name)
    folder = find_run(str(name))
    if (folder / CONFIG).exists():
        return str(folder.resolve())
    kind, colon, place = str(name).partition(":")
    if colon:
        return f"{kind}:{Path(place).expanduser().resolve()}" if Path(place).expanduser().is_dir() else str(name)
    return str(Path(name).expanduser().resolve()) if "/" in str(name) else str(name)  # a removed run


def parent_folder(parent: str) -> Path | None:
    """Return the folder of the run at `parent` (of `find_parent`), or of its copy; None for a published model.

    Raises InputError for a URL without a run.
    """
    folder = download_run(parent, whole=True) if is_url(parent) else Path(parent)
    return folder if (folder / CONFIG).exists() else None


def parent_options(parent: str, maker: Any) -> dict[str, Any]:
    """Return the options that give the parameters at `parent` (of `find_parent`) their meaning, for `maker`'s recipe.

    Raises InputError for a published model if `maker` can only start from runs.
    """
    folder = parent_folder(parent)
    if folder is None:
        if not isinstance(maker, type) or not issubclass(maker, Recipe):
            return {}
        if not supports(maker, "load_shared"):
            raise not_a_run(parent, maker.name)
        return maker.options_at(parent)
    options = read_config(folder)["recipe"]["options"]
    return {name: value for name, value in options.items() if name in getattr(maker, "identity", ())}


def not_a_run(parent: str, name: str) -> InputError:
    return InputError(f"{parent} is not a tpuswarm run (it has no config.toml), and {name} can only start from one")
