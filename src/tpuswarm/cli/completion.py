"""Complete recipes, their options, runs and values in the shell."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tpuswarm.config.limits import CHOICES

Complete = Callable[[str], list[str]]
"""Returns the words that begin with the typed letters."""


def complete_choices(option: str) -> Complete:
    """Complete the values of an option with few."""
    return lambda incomplete: _beginning_with(incomplete, CHOICES[option])


def complete_recipes(incomplete: str) -> list[str]:
    """Return built-in recipes, and files that may hold one."""
    from tpuswarm.recipes import BUILT_IN

    files = sorted(str(path) for kind in ("*.toml", "*.py") for path in Path().glob(kind))
    return _beginning_with(incomplete, [*BUILT_IN, *files])


def complete_runs(incomplete: str) -> list[str]:
    """Return the names of the runs in ./runs, the most recently used first, or their folders after `runs/`."""
    from tpuswarm.train.run.directory import RUNS
    from tpuswarm.train.run.listing import list_runs

    runs = list_runs(RUNS)
    return _beginning_with(incomplete, [*(run.name for run in runs), *map(str, runs)])


def complete_run_folders(incomplete: str) -> list[str]:
    """Return the folders of the runs in ./runs, for options that take no name."""
    return [word for word in complete_runs(incomplete) if "/" in word]


def recipe_option_names(recipe: str) -> list[str]:
    """Return the options of a built-in recipe; of others none, since their files would be executed."""
    from tpuswarm import recipes
    from tpuswarm.train.user_code import find_maker, option_types

    if recipe not in recipes.BUILT_IN:
        return []
    return [f"--{name.replace('_', '-')}" for name in option_types(find_maker(recipes.find(recipe)[0]))]


def _beginning_with(incomplete: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
