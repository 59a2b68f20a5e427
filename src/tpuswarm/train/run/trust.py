"""Build the recipe of a run that may be a stranger's: code that does not ship with tpuswarm needs consent."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpuswarm.errors import InputError
from tpuswarm.train.process.computer import state_folder
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run.directory import CONFIG, read_config
from tpuswarm.train.storage.folders import shown
from tpuswarm.train.user_code import build_recipe, check_recipe_file, file_digest, find_maker, is_marked

SHIPPED = "tpuswarm.recipes."
TRUSTED = "trusted-recipes"
"""A file of this computer, with a line for each recipe that the user has named on a command line or consented to."""


def rebuild_recipe(folder: Path, options: Mapping[str, Any] | None = None, trust: bool = False) -> Recipe:
    """Build the recipe of a run; `options` override its own. trust: the user consents, now and until its file changes.

    Raises InputError without consent, before any code of the run is executed.
    """
    recipe = read_config(folder)["recipe"]
    target, options = recipe["target"], {**recipe["options"], **(options or {})}
    require_trust(folder, trust)
    try:
        built = build_recipe(target, options, folder, named_by_user=is_remembered(target))
    except InputError as error:
        raise InputError(f"{folder / CONFIG}: {error}") from error
    if trust:
        remember(target)
    return built


def require_trust(folder: Path, trust: bool = False) -> None:
    """Raise InputError if a run's recipe does not ship with tpuswarm and the user has not consented to its code."""
    target = read_config(folder)["recipe"]["target"]
    if not target:
        raise InputError(
            f"{shown(folder)} was trained by a Python program; to use it here, put its recipe into a file and train "
            "file.py:Recipe"
        )
    if (place := target.rpartition(":")[0]).endswith(".py"):
        check_recipe_file(Path(place))
    if not (trust or is_trusted(target)):
        raise InputError(
            f"{shown(folder)} executes code that is not part of tpuswarm: {target} and what it imports. Read it; if "
            "you trust it, add --trust to sample, evaluate or export (remembered until that file changes)"
        )


def is_trusted(target: str) -> bool:
    is_file = target.rpartition(":")[0].endswith(".py")
    is_shipped = target.startswith(SHIPPED) and not is_file and is_marked(find_maker(target), target)
    return is_shipped or is_remembered(target)


def is_remembered(target: str) -> bool:
    try:
        return _key(target) in (state_folder() / TRUSTED).read_text(encoding="utf-8").splitlines()
    except OSError:
        return False


def remember(target: str) -> None:
    """Remember that the user has named this recipe, or consented to it; a changed file needs consent again."""
    if not is_trusted(target):
        with suppress(OSError), (state_folder() / TRUSTED).open("a", encoding="utf-8") as file:  # else asked again
            file.write(f"{_key(target)}\n")


def _key(target: str) -> str:
    """Return the digest of a recipe's file and the name in it; the target itself for a module."""
    return f"{digest} {target.rpartition(':')[2]}" if (digest := file_digest(target)) else target
