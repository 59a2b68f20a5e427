"""Read and check the options of `train` and `plan`, before anything heavy is imported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import typer
from pydantic import ValidationError

from tpuswarm import recipes
from tpuswarm.catalog import public_models
from tpuswarm.config.limits import option_name
from tpuswarm.config.nearest import did_you_mean, nearest_name
from tpuswarm.config.toml_file import locate_error
from tpuswarm.config.train_table import LENGTH_KEYS, Train, read_train
from tpuswarm.config.validation_errors import describe_error
from tpuswarm.errors import InputError
from tpuswarm.swarm.engines.ports import parse_ports
from tpuswarm.train.hosts.host_group import HostGroup, find_host_group
from tpuswarm.train.look.wandb_log import require_wandb
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.run.directory import CONFIG, has_begun, read_config, require_usable
from tpuswarm.train.run.parent import find_parent, parent_folder, parent_options
from tpuswarm.train.run.trust import remember, require_trust
from tpuswarm.train.settings import differences, refuse_differences
from tpuswarm.train.storage.copy import refreshed_folder
from tpuswarm.train.user_code import absolute_target, build_recipe, find_maker, option_types, parse_option

SWARM_OPTIONS = (
    "members", "devices_per_member", "cycle", "outer", "outer_lr", "quantize", "overlap", "ray_address", "dashboard",
)  # fmt: skip
TRAINER_OPTIONS = (
    "devices", "shard", "precision", "accumulate", "clip", "freeze", "decay", "ema", "seed", "save_every",
    "eval_every", "eval_batch", "keep", "keep_best", "grace", "deterministic", "overfit_batches", "fast_dev_run",
    "profile", "wandb",
)  # fmt: skip


class TrainOptions(NamedTuple):
    """A training, described without JAX."""

    table: Train
    recipe: Recipe
    folder: Path | None
    parent: str | None
    """The run or published model whose parameters it starts from."""
    swarm: dict[str, Any] | None
    """None for a plain run."""
    hosts: HostGroup | None
    """None for a run of one host."""
    with_lr: Callable[[float], Recipe] | None = None
    """With `--lr auto`: makes the recipe for the learning rate that was found."""


def read_options(context: typer.Context) -> TrainOptions:
    """Read and check all options of `train`. Raises InputError for what no machine can do."""
    params = context.params
    if (params["recipe"] or "").startswith("-"):
        raise InputError(f"the recipe comes first: tpuswarm train RECIPE {params['recipe']} …")
    params |= {"recipe": params["recipe"] or _recipe_of_run(params["run"]), "data": [*(params["data"] or ())] or None}
    table = _read_table(params, recipe_options(context.args, "train"))
    folder = refreshed_folder(table.run) if table.run else None
    if folder:
        require_usable(folder)
    swarm = _swarm_options(table, folder, params)
    hosts = None
    if swarm is None:
        told = params["hosts"], params["host"], params["hosts_at"]
        hosts = find_host_group(*told, run=table.run, devices=table.devices, is_dev_run=bool(table.fast_dev_run))
    if table.wandb is not None:
        require_wandb()
    parent = find_parent(table.init_from) if table.init_from else None
    given = {name: value for name in ("data", "seed") if (value := getattr(table, name)) is not None}
    options = dict(table.options)
    finds_lr = _takes_lr_auto(table, options, folder, swarm is not None or hosts is not None)

    def make(**more: str) -> Recipe:
        return make_recipe(table.recipe, dict(given), options | more, context, folder, parent)

    recipe = make()
    recipe.require_data()
    with_lr = (lambda lr: make(lr=repr(lr))) if finds_lr else None
    return TrainOptions(table, recipe, folder, parent, swarm, hosts, with_lr)


def _recipe_of_run(run: str | None) -> str:
    """Return the recipe that a run began with. Raises InputError without one."""
    folder = refreshed_folder(run) if run else None
    if run is None or folder is None or not has_begun(folder):
        begun = "" if run is None else f"{run} has not begun, so "
        recipes_named = "such as gpt2-tiny, or file.py:NAME with your own"
        raise InputError(f"{begun}name a recipe first: tpuswarm train RECIPE, {recipes_named}")
    require_trust(folder)
    recipe = read_config(folder)["recipe"]
    is_built_in = recipe["name"] in recipes.BUILT_IN and recipes.find(recipe["name"])[0] == recipe["target"]
    return str(recipe["name"] if is_built_in else recipe["target"])


def _takes_lr_auto(table: Train, options: dict[str, Any], folder: Path | None, has_processes: bool) -> bool:
    """Remove `lr: auto` from the options; return whether a learning rate has to be found before the run begins."""
    if options.get("lr") != "auto" or "lr" not in option_types(find_maker(recipes.find(table.recipe)[0])):
        return False
    if has_processes:
        raise InputError("--lr auto works in one process: find it without --members and --hosts, then give --lr")
    if table.batch == "auto":
        raise InputError("--lr auto needs the batch of the run: give --batch a number, or --lr")
    del options["lr"]
    return folder is None or not (folder / CONFIG).exists()


def _read_table(params: dict[str, Any], options: dict[str, str]) -> Train:
    """Merge the options of the command and of its file. The command wins."""
    given = {name: params[name] for name in Train.model_fields if params.get(name) is not None}
    if given["recipe"].endswith(".toml"):
        path = Path(given.pop("recipe"))
        file = read_train(path).model_dump(exclude_unset=True)
        check_options(path, file)
        if not given.keys().isdisjoint(LENGTH_KEYS):
            file = {name: value for name, value in file.items() if name not in LENGTH_KEYS}
        options = file.pop("options", {}) | options
        given = file | given
    if model := public_models().get(given["recipe"].lower()):
        given["recipe"] = f"hf:{model.repository}"
    if given["recipe"].startswith("hf:"):  # go on from its weights
        given = {"init_from": given["recipe"]} | given
    try:
        table = Train(**given | {"options": options})
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise InputError(str(first["ctx"]["error"])) from error
        raise InputError(f"--{option_name(str(first['loc'][0]))} {describe_error(first)}") from error
    if isinstance(table.batch, dict):
        raise InputError("batch must be a number; a batch for each pool needs a file with pools")
    return table


def check_options(path: Path, file: dict[str, Any]) -> None:
    """Raise InputError, with its line, for an option in a file that its recipe does not take."""
    types = option_types(find_maker(recipes.find(file["recipe"])[0]))
    for name, value in file.get("options", {}).items():
        try:
            if name not in types:
                raise InputError(f"{file['recipe']} has no option {name}; {did_you_mean(name, types)}")
            parse_option(name, value, types[name])
        except InputError as error:
            raise InputError(locate_error(path, ("train", "options", name), str(error))) from error


def _swarm_options(table: Train, folder: Path | None, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the options of a swarm; None for a plain run."""
    given = {name: getattr(table, name) for name in SWARM_OPTIONS}
    if table.members is None and folder is not None and (folder / CONFIG).exists() and "swarm" in read_config(folder):
        given["members"] = read_config(folder)["swarm"]["members"]
    own = {name: params[name] for name in ("token_file", "expect", "ports", "keep_payloads", "listen", "address")}
    if given["members"] is None:
        if needless := next((name for name, value in {**given, **own}.items() if value is not None), None):
            raise InputError(f"--{needless.replace('_', '-')} needs --members")
        return None
    if params["hosts"] is not None:
        raise InputError(
            "--hosts and --members exclude each other; a member of several hosts joins with `tpuswarm join --hosts`"
        )
    if table.profile:
        raise InputError("--profile is for one process; trace a member with `tpuswarm profile RUN --member m0`")
    if table.batch == "auto":
        raise InputError("--batch auto is for one process; give a number, as `tpuswarm plan` shows what fits")
    if table.overfit_batches or table.fast_dev_run:
        raise InputError("--overfit-batches and --fast-dev-run check a model in one process; leave --members out")
    if table.keep_best is not None:
        raise InputError("--keep-best does not work with --members; `tpuswarm ledger` lists all versions")
    return {
        **given,
        "wandb": table.wandb,
        "accept_code": params["accept_code"],
        "token": own["token_file"],
        "expect": own["expect"],
        "keep_payloads": own["keep_payloads"],
        "listen": own["listen"],
        "address": own["address"],
        "ports": parse_ports(own["ports"]),
    }


def recipe_options(words: list[str], command: str) -> dict[str, str]:
    """Return the `--name value` and `--name=value` pairs. Raises InputError for anything else."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            raise InputError(f"unexpected argument {word!r}; options are written --name value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{name} needs a value, or is not an option. See `tpuswarm {command} --help`")
            value = rest.pop(0)
        found[_option_key(name)] = value
    return found


def _option_key(word: str) -> str:
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def make_recipe(
    name: str,
    given: dict[str, Any],
    options: dict[str, Any],
    context: typer.Context,
    folder: Path | None = None,
    parent: str | None = None,
) -> Recipe:
    """Make a recipe with its options. `given`: the data and the seed, if the command names them.

    Other options are those of `folder` if it is a run, else those of `parent` that give its parameters their meaning.
    """
    target, preset = recipes.find(name)
    maker = find_maker(target)
    types = option_types(maker)
    if "seed" not in types:
        given.pop("seed", None)
    if unknown := next((key for key in (*given, *options) if key not in types), None):
        raise InputError(_unknown_option(name, unknown, types, context))
    stored: dict[str, Any] = {}
    home, missing = None, None
    if folder is not None and (folder / CONFIG).exists():
        config = read_config(folder)["recipe"]
        refuse_differences(folder, differences({"recipe": config["target"]}, {"recipe": absolute_target(target)}))
        stored, home = config["options"], folder
        if unknown := next((key for key in stored if key not in types), None):
            raise InputError(f"{folder / CONFIG}: {name} has no option {unknown}; {did_you_mean(unknown, types)}")
    elif parent is not None:
        stored, home = parent_options(parent, maker), parent_folder(parent) or Path(parent)
        missing = next(iter(getattr(maker, "identity", ())), None)
    recipe_arguments = {**stored, **preset, **given, **options}
    if missing and missing not in recipe_arguments:
        echo(
            f"note: {parent} has no {missing}, so {name} uses its default; set --{missing} if the parameters were "
            "trained with another",
            err=True,
        )
    recipe = build_recipe(target, recipe_arguments, home)
    remember(recipe.target)
    return recipe


def _unknown_option(recipe: str, key: str, types: dict[str, Any], context: typer.Context) -> str:
    if key == "data":
        return f"{recipe} takes no --data; it has its own"
    typed = next((word.partition("=")[0] for word in context.args if _option_key(word) == key), key)
    known = {f"--{name.replace('_', '-')}" for name in types}
    known |= {name for parameter in context.command.params for name in parameter.opts if name.startswith("--")}
    command, suggestion = context.command.name, nearest_name(typed, known)
    hint = f"did you mean {suggestion}?" if suggestion else f"`tpuswarm {command} {recipe} --help` lists them"
    return f"neither {command} nor {recipe} has an option {typed}; {hint}"
