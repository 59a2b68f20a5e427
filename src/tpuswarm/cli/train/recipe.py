"""A recipe by its name, with the options of its own that a command was given."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tpuswarm.config.nearest import nearest_name
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.train.recipe import Recipe


def recipe_options(words: list[str], command: str) -> dict[str, str]:
    """`--name value` and `--name=value` pairs that are not the command's own; InputError for anything else."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            raise InputError(f"unexpected argument {word!r}; options are written --name value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{name} needs a value, or is not an option; see `tpuswarm {command} --help`")
            value = rest.pop(0)
        found[name.removeprefix("--").replace("-", "_")] = value
    return found


def make_recipe(
    name: str,
    asked: dict[str, Any],
    extra: dict[str, Any],
    context: typer.Context,
    folder: Path | None = None,
    parent: str | None = None,
) -> "Recipe":
    """The recipe by name with its options, for the command of `context`; `asked`: its data and seed, where given.

    What is not asked is as it was in `folder`, where that is a run already; else what gives parameters their meaning is
    as in `parent`, the run or published model whose parameters are taken over.
    """
    from tpuswarm import recipes
    from tpuswarm.train.optional import identity_of
    from tpuswarm.train.run.directory import CONFIG, read_config
    from tpuswarm.train.run.parent import parent_folder, parent_options
    from tpuswarm.train.settings import differences, refuse_differences
    from tpuswarm.train.user_code import absolute_target, build_recipe, find_maker, option_types

    target, preset = recipes.find(name)
    maker = find_maker(target)
    types = option_types(maker)
    if "seed" not in types:
        asked.pop("seed", None)
    wrong = next((key for key in (*asked, *extra) if key not in types), None)
    if wrong is not None:
        if wrong == "data":
            raise InputError(f"{name} takes no --data; it has its own")
        flags = {each for parameter in context.command.params for each in parameter.opts if each.startswith("--")}
        known = {f"--{key.replace('_', '-')}" for key in types} | flags
        flag = f"--{wrong.replace('_', '-')}"
        command, near = context.command.name, nearest_name(flag, known)
        way = f"did you mean {near}?" if near else f"`tpuswarm {command} {name} --help` lists them"
        raise InputError(f"neither {command} nor {name} has an option {flag}; {way}")
    stored: dict[str, Any] = {}
    home, lacking = None, None
    ours = {"recipe": absolute_target(target)}
    if folder is not None and (folder / CONFIG).exists():
        config = read_config(folder)["recipe"]
        refuse_differences(folder, differences({"recipe": config["target"]}, ours))
        stored, home = config["options"], folder
    elif parent is not None:
        stored, home = parent_options(parent, maker), parent_folder(parent) or Path(parent)
        lacking = next(iter(identity_of(maker)), None)
    options = {**stored, **preset, **asked, **extra}
    if lacking and lacking not in options:
        say(
            f"note: {parent} has no {lacking}, so {name} uses its usual one; set --{lacking} if the parameters were "
            "trained with another",
            err=True,
        )
    return build_recipe(target, options, home)
