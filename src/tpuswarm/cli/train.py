"""`tpuswarm train`: one recipe on this machine's devices."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import parse_count, parse_seconds
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.train.loop import Result
    from tpuswarm.train.recipe import Recipe


def option(flag: str, text: str) -> Any:
    """A typer option with its help."""
    return typer.Option(flag, help=text, show_default=False)


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A built-in recipe (gpt2-tiny, gpt2-124m, …) or file.py:Recipe.")],
    data: Annotated[str | None, option("--data", "File, folder or URL of text, or `fake`.")] = None,
    steps: Annotated[str | None, option("--steps", "Length of the whole run in steps.")] = None,
    tokens: Annotated[str | None, option("--tokens", "Length of the whole run in tokens, such as 10M.")] = None,
    epochs: Annotated[float | None, option("--epochs", "Length of the whole run in passes over the data.")] = None,
    batch: Annotated[str | None, option("--batch", "Rows of one step, over all devices.")] = None,
    devices: Annotated[str, option("--devices", "all, a number (8) or indices ([5]). Default: all.")] = "all",
    precision: Annotated[str | None, option("--precision", "bf16, f32 or highest. Default: bf16, f32 on CPU.")] = None,
    shard: Annotated[str, option("--shard", "auto, replicate or fsdp. Default: auto.")] = "auto",
    accumulate: Annotated[str | None, option("--accumulate", "Micro-batches of one step.")] = None,
    clip: Annotated[float | None, option("--clip", "Largest norm of the gradient.")] = None,
    freeze: Annotated[str | None, option("--freeze", "Regular expression of parameters that stay as they are.")] = None,
    decay: Annotated[str | None, option("--decay", "Regular expression of parameters with weight decay.")] = None,
    ema: Annotated[float | None, option("--ema", "Moving average of the parameters, such as 0.999.")] = None,
    eval_every: Annotated[str | None, option("--eval-every", "Steps (500) or time (5m) between evaluations.")] = None,
    save_every: Annotated[str, option("--save-every", "Steps (500) or time between checkpoints. Default: 5m.")] = "5m",
    keep: Annotated[int, option("--keep", "Checkpoints that stay. Default: 3.")] = 3,
    notice: Annotated[str, option("--notice", "Time from SIGTERM to the machine's end. Default: 10s.")] = "10s",
    init_from: Annotated[
        str | None, option("--init-from", "Parameters to start from: RUN, gpt2, hf:ORG/NAME, hf:DIR.")
    ] = None,
    run: Annotated[str | None, option("--run", "Directory of the run; an existing one is resumed.")] = None,
    seed: Annotated[int | None, option("--seed", "Of parameters, data order and dropout. Default: 0.")] = None,
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="GPU kernels that repeat bit for bit.")
    ] = None,
    hosts: Annotated[int | None, option("--hosts", "Machines that train together as one program; all of them.")] = None,
    host: Annotated[int | None, option("--host", "Which of these this is, from 0. Default: $TPU_WORKER_ID.")] = None,
    hosts_at: Annotated[
        str | None, option("--hosts-at", "HOST:PORT of host 0. Default: the first of $TPU_WORKER_HOSTNAMES, port 8490.")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Trace a few steps for xprof and TensorBoard.")] = False,
    wandb: Annotated[str | None, option("--wandb", "Project of Weights & Biases that gets every row.")] = None,
    as_json: Annotated[bool, option("--json", "One object on stdout at the end.")] = False,
    members: Annotated[int | None, option("--members", "Train as a swarm of so many members.")] = None,
    devices_per_member: Annotated[
        int | None,
        option("--devices-per-member", "Of --devices; without a TPU or GPU, virtual ones. Default: a share."),
    ] = None,
    cycle: Annotated[int | None, option("--cycle", "Steps of a member between two exchanges. Default: 50.")] = None,
    outer: Annotated[str | None, option("--outer", "average or nesterov: how exchanges change the model.")] = None,
    outer_lr: Annotated[float | None, option("--outer-lr", "Of nesterov. Default: by the number of members.")] = None,
    quantize: Annotated[str | None, option("--quantize", "int8 or int4: fewer bytes on both links.")] = None,
    overlap: Annotated[str | None, option("--overlap", "auto, or 0: wait while an exchange is under way.")] = None,
    ray_address: Annotated[str | None, option("--ray-address", "A Ray cluster that is there already.")] = None,
    accept_code: Annotated[
        bool, typer.Option("--accept-code", help="Go on with changed code or settings, and record the change.")
    ] = False,
) -> None:
    """Train a recipe. The options of the recipe itself are given the same way: --lr 3e-4 --context 256.

    The same --run directory goes on where it stood. With --members it is a swarm: any member may die at any moment.
    """
    from tpuswarm.train.load import find_parent
    from tpuswarm.train.run import CONFIG, read_config
    from tpuswarm.train.trainer import Trainer

    if recipe.startswith("-"):
        raise InputError(f"the recipe comes first: tpuswarm train RECIPE {recipe} …")
    asked = {name: value for name, value in (("data", data), ("seed", seed)) if value is not None}
    if run and "://" in run:
        raise InputError(f"--run takes a local directory, not {run}: a run in a bucket is not built yet")
    folder = Path(run) if run else None
    parent = find_parent(init_from) if init_from else None
    flags = {flag for parameter in context.command.params for flag in parameter.opts if flag.startswith("--")}
    made = make_recipe(recipe, asked, recipe_options(context.args, "train"), flags, folder, parent)
    length = {
        "steps": parse_count(steps, "steps") if steps is not None else None,
        "batch": parse_count(batch, "batch") if batch is not None else None,
    }
    trainer = Trainer(
        devices=devices, shard=shard, precision=precision, clip=clip, freeze=freeze, decay=decay, ema=ema, seed=seed,
        accumulate=parse_count(accumulate, "accumulate") if accumulate is not None else None,
        save_every=save_every, eval_every=eval_every, keep=keep, notice=parse_seconds(notice, "notice"),
        deterministic=deterministic, hosts=hosts, host=host, hosts_at=hosts_at, profile=profile, wandb=wandb,
    )  # fmt: skip
    count = parse_count(tokens, "tokens") if tokens is not None else None
    given = {
        "members": members, "devices_per_member": devices_per_member, "cycle": cycle, "outer": outer,
        "outer_lr": outer_lr, "quantize": quantize, "overlap": overlap, "ray_address": ray_address,
    }  # fmt: skip
    if members is None and folder is not None and (folder / CONFIG).exists() and "swarm" in read_config(folder):
        members = read_config(folder)["swarm"]["members"]
    if members is not None:
        if hosts is not None:
            raise InputError("--hosts is of one program and --members of a swarm, which `tpuswarm join --hosts` joins")
        if profile or wandb is not None:
            raise InputError("--profile and --wandb are of a plain run; they are not built for a swarm")
        from tpuswarm.cli.swarm import train_swarm

        asked_all = trainer.settings(**length, init_from=parent)
        train_swarm(
            made, {**given, "members": members, "accept_code": accept_code}, asked_all, count, epochs, folder, as_json
        )
        return
    if alone := next((name for name, value in given.items() if value is not None), None):
        raise InputError(f"--{alone.replace('_', '-')} is of a swarm; give --members as well, or leave it out")
    if accept_code:
        raise InputError("--accept-code is of a swarm; a plain run goes on with any code and with its own settings")
    if hosts is not None:
        _alone_on_stdout()
    result = trainer.fit(made, tokens=count, epochs=epochs, run=folder, init_from=parent, **length)
    print_result(result, as_json)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


train.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}  # type: ignore[attr-defined]


def _alone_on_stdout() -> None:
    """What libraries print there, as JAX's connections of CPUs do, goes to stderr; our prints still come to stdout."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)


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
                raise InputError(f"{name} needs a value, or is no option; see `tpuswarm {command} --help`")
            value = rest.pop(0)
        found[name.removeprefix("--").replace("-", "_")] = value
    return found


def make_recipe(
    name: str, asked: dict[str, Any], extra: dict[str, str], flags: set[str], folder: Path | None, parent: str | None
) -> "Recipe":
    """The recipe by name with its options; `flags` are those of the command itself.

    What is not asked is as it was in `folder`, where that is a run already; else what gives parameters their meaning is
    as in `parent`, the run or published model whose parameters are taken over.
    """
    from tpuswarm import recipes
    from tpuswarm.train.load import parent_options
    from tpuswarm.train.run import CONFIG, read_config
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
            raise InputError(f"{name} takes no --data; it brings its own")
        known = {f"--{key.replace('_', '-')}" for key in types} | flags
        flag = f"--{wrong.replace('_', '-')}"
        raise InputError(f"neither train nor {name} has an option {flag}; {did_you_mean(flag, known)}")
    stored: dict[str, Any] = {}
    home, lacking = None, None
    ours = {"recipe": absolute_target(target)}
    if folder is not None and (folder / CONFIG).exists():
        config = read_config(folder)["recipe"]
        refuse_differences(folder, differences({"recipe": config["target"]}, ours))
        stored, home = config["options"], folder
    elif parent is not None:
        stored, home = parent_options(parent, maker), Path(parent)
        lacking = next(iter(getattr(maker, "identity", ())), None)
    options = {**stored, **preset, **asked, **extra}
    if lacking and lacking not in options:
        print(
            f"note: {parent} brings no {lacking}, so {name} takes its usual one; give --{lacking} if the parameters "
            "were trained with another",
            file=sys.stderr,
        )
    return build_recipe(target, options, home)


def print_result(result: "Result", as_json: bool) -> None:
    """The end of a run on stdout."""
    if as_json:
        facts = {"run": str(result.run), "ended": result.ended, "step": result.step, "steps": result.steps}
        print(json.dumps({**facts, "message": result.message, "metrics": result.metrics}))
        return
    shown = [
        f"{text} {result.metrics[name]:.4f}"
        for name, text in (("loss", "loss"), ("eval_loss", "held-out loss"))
        if result.metrics.get(name) is not None
    ]
    report = f"; {result.run / 'report.html'}" if result.ended == "finished" else ""
    print(f"{result.run} {result.ended} at step {result.step} of {result.steps}: {', '.join(shown)}{report}")
