"""What `train` was asked, in its words and in a file: checked before anything heavy is imported."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from tpuswarm.cli.train.recipe import make_recipe, recipe_options
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.config.train_table import Train
    from tpuswarm.train.recipe import Recipe

SWARM = (
    "members", "devices_per_member", "cycle", "outer", "outer_lr", "quantize", "overlap", "ray_address", "dashboard",
)  # fmt: skip
"""Options that a run of members has and a plain one has not."""
FIT = (
    "devices", "shard", "precision", "accumulate", "clip", "freeze", "decay", "ema", "seed", "save_every",
    "eval_every", "eval_batch", "keep", "keep_best", "grace", "deterministic", "overfit_batches", "fast_dev_run",
    "profile", "wandb",
)  # fmt: skip
"""Those that a Trainer takes."""


class Asked(NamedTuple):
    """A training, as far as it is known without JAX."""

    table: "Train"
    recipe: "Recipe"
    folder: Path | None
    parent: str | None
    """Where its parameters come from, as find_parent has it."""
    swarm: dict[str, Any] | None
    """None for a plain run."""
    with_lr: "Callable[[float], Recipe] | None" = None
    """With `--lr auto`, the recipe at the learning rate that is found."""


def ask(context: typer.Context) -> Asked:
    """All of it; raises InputError for what cannot be done on any machine."""
    from tpuswarm.train.hosts.several import several
    from tpuswarm.train.look.wandb_log import require
    from tpuswarm.train.optional import LooksForData
    from tpuswarm.train.run.directory import require_usable
    from tpuswarm.train.run.parent import find_parent
    from tpuswarm.train.storage.copy import folder_for

    words = context.params
    if words["recipe"].startswith("-"):
        raise InputError(f"the recipe comes first: tpuswarm train RECIPE {words['recipe']} …")
    table = _table(words, recipe_options(context.args, "train"))
    folder = folder_for(table.run) if table.run else None
    if folder:
        require_usable(folder)
    swarm = _swarm(table, folder, words)
    several(words["hosts"], words["host"], words["hosts_at"])
    if words["hosts"] is not None and table.run and "://" in table.run:
        raise InputError(
            f"--hosts saves on a disk that all hosts share, and {table.run} is a bucket; use a folder on such a disk"
        )
    if table.wandb is not None:
        require()
    parent = find_parent(table.init_from) if table.init_from else None
    given = {name: value for name in ("data", "seed") if (value := getattr(table, name)) is not None}
    options = dict(table.options)
    looks = _looks_for_rate(table, options, folder, swarm is not None or words["hosts"] is not None)

    def made(**more: str) -> "Recipe":
        return make_recipe(table.recipe, dict(given), options | more, context, folder, parent)

    recipe = made()
    if isinstance(recipe, LooksForData):
        recipe.require_data()
    return Asked(table, recipe, folder, parent, swarm, (lambda rate: made(lr=repr(rate))) if looks else None)


def _looks_for_rate(table: "Train", options: dict[str, Any], folder: Path | None, several: bool) -> bool:
    """Whether a learning rate is to be found first, and `auto` taken out of the options; a run that has begun has one.

    Of a recipe that has no option `lr`, `auto` is left for the sentence that says so.
    """
    from tpuswarm import recipes
    from tpuswarm.train.run.directory import CONFIG
    from tpuswarm.train.user_code import find_maker, option_types

    if options.get("lr") != "auto" or "lr" not in option_types(find_maker(recipes.find(table.recipe)[0])):
        return False
    if several:
        raise InputError("--lr auto looks in one process: find it without --members and --hosts, and give --lr that")
    if table.batch == "auto":
        raise InputError("--lr auto looks at the batch of the run: give --batch a number, or --lr")
    del options["lr"]
    return folder is None or not (folder / CONFIG).exists()


def _table(words: dict[str, Any], options: dict[str, str]) -> "Train":
    """The words of the command, over those of the file where it names one."""
    from pydantic import ValidationError

    from tpuswarm.config.limits import option_name
    from tpuswarm.config.train_table import LENGTH_KEYS, Train, read_train
    from tpuswarm.config.validation_errors import describe_error

    given = {name: words[name] for name in Train.model_fields if words.get(name) is not None}
    if given["recipe"].endswith(".toml"):
        path = Path(given.pop("recipe"))
        file = read_train(path).model_dump(exclude_unset=True)
        check_options(path, file)
        if not given.keys().isdisjoint(LENGTH_KEYS):
            file = {name: value for name, value in file.items() if name not in LENGTH_KEYS}
        options = file.pop("options", {}) | options
        given = file | given
    try:
        table = Train(**given | {"options": options})
        if isinstance(table.batch, dict):
            raise InputError("a batch for each pool is for a file with pools: give batch a number")
        return table
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise InputError(str(first["ctx"]["error"])) from error
        raise InputError(f"--{option_name(str(first['loc'][0]))} {describe_error(first)}") from error


def check_options(path: Path, file: dict[str, Any]) -> None:
    """Raise InputError with the line of the file for an option that its recipe does not take."""
    from tpuswarm import recipes
    from tpuswarm.config.nearest import did_you_mean
    from tpuswarm.config.toml_file import locate_error
    from tpuswarm.train.user_code import find_maker, option_types, typed

    types = option_types(find_maker(recipes.find(file["recipe"])[0]))
    for name, value in file.get("options", {}).items():
        try:
            if name not in types:
                raise InputError(f"{file['recipe']} has no option {name}; {did_you_mean(name, types)}")
            typed(name, value, types[name])
        except InputError as error:
            raise InputError(locate_error(path, ("train", "options", name), str(error))) from error


def _swarm(table: "Train", folder: Path | None, words: dict[str, Any]) -> dict[str, Any] | None:
    """The options of a swarm, where it is to be one."""
    from tpuswarm.swarm.engines.ports import parse_ports
    from tpuswarm.train.run.directory import CONFIG, read_config

    given = {name: getattr(table, name) for name in SWARM}
    if table.members is None and folder is not None and (folder / CONFIG).exists() and "swarm" in read_config(folder):
        given["members"] = read_config(folder)["swarm"]["members"]
    if given["members"] is None:
        if alone := next((name for name, value in given.items() if value is not None), None):
            raise InputError(f"--{alone.replace('_', '-')} needs --members")
        if words["token_file"] is not None:
            raise InputError("--token-file needs --members")
        for name in ("expect", "ports"):
            if words[name] is not None:
                raise InputError(f"--{name} needs --members")
        return None
    if words["hosts"] is not None:
        raise InputError(
            "--hosts and --members exclude each other; the hosts of a member come with `tpuswarm join --hosts`"
        )
    if table.profile:
        raise InputError(
            "--profile is for one process; to trace a member: `tpuswarm profile RUN --member m0` while it runs"
        )
    if table.batch == "auto":
        raise InputError("--batch auto is for one process: give --batch a number; `tpuswarm plan` says what fits")
    if table.overfit_batches or table.fast_dev_run:
        raise InputError("--overfit-batches and --fast-dev-run check a model in one process: leave --members out")
    if table.keep_best is not None:
        raise InputError("--keep-best does not work with --members: `tpuswarm ledger` has every version's place")
    own = {"expect": words["expect"], "ports": parse_ports(words["ports"])}
    return {**given, "wandb": table.wandb, "accept_code": words["accept_code"], "token": words["token_file"], **own}
