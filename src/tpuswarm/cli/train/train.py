"""`tpuswarm train`: train one recipe on this machine's devices, or on a fleet."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.completion import complete_choices, complete_recipes, complete_run_folders
from tpuswarm.cli.console import make_console, option
from tpuswarm.cli.train.detach import start_detached
from tpuswarm.cli.train.next_command import print_next
from tpuswarm.cli.train.train_options import TRAINER_OPTIONS, TrainOptions, read_options
from tpuswarm.config.formatting import format_figure, token_unit
from tpuswarm.config.train_table import LENGTH_KEYS
from tpuswarm.train.process import platform
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import has_begun, read_config, require_not_in_use
from tpuswarm.train.run.life import stopped_sentence
from tpuswarm.train.run.listing import read_status
from tpuswarm.train.storage.folders import shown

if TYPE_CHECKING:
    from tpuswarm.swarm.supervision.start import SwarmResult
    from tpuswarm.train.loop.result import Result

REPORT = "report.html"
LENGTH, HOW, KEPT = "Data and length", "How it trains", "The run"
HOSTS, SWARM, FLEET = "Several machines as one program", "A swarm", "With a fleet"


def train(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="gpt2-tiny, gpt2-124m, …, file.py:Recipe, or a file.toml. Default: that of --run.",
            autocompletion=complete_recipes,
        ),
    ] = None,
    data: Annotated[
        list[str] | None, option("Text: a file, folder or URL, or `fake`. Several are mixed: a.txt:0.7.", LENGTH)
    ] = None,
    steps: Annotated[str | None, option("Length of the whole run, in steps.", LENGTH)] = None,
    tokens: Annotated[str | None, option("Length of the whole run, in tokens, e.g. 10M.", LENGTH)] = None,
    epochs: Annotated[float | None, option("Length of the run, in passes over the data.", LENGTH)] = None,
    batch: Annotated[str | None, option("Rows per step of all devices; auto: as many as fit.", LENGTH)] = None,
    init_from: Annotated[
        str | None,
        option("Start from these parameters: RUN, gpt2, hf:ORG/NAME or hf:DIR.", LENGTH, values=complete_run_folders),
    ] = None,
    init_only: Annotated[str | None, option("Take only parameters whose path matches this regex.", LENGTH)] = None,
    seed: Annotated[int | None, option("Random seed: parameters, data order, dropout. Default: 0.", LENGTH)] = None,
    devices: Annotated[str | None, option("all, a number (8) or indices ([5]). Default: all.", HOW)] = None,
    precision: Annotated[
        str | None,
        option("bf16, f32 or highest. Default: bf16, f32 on CPU.", HOW, values=complete_choices("precision")),
    ] = None,
    shard: Annotated[
        str | None, option("auto, replicate or fsdp. Default: auto.", HOW, values=complete_choices("shard"))
    ] = None,
    accumulate: Annotated[str | None, option("Micro-batches per step.", HOW)] = None,
    clip: Annotated[float | None, option("Clip the gradient to this norm.", HOW)] = None,
    freeze: Annotated[str | None, option("Freeze parameters whose path matches this regex.", HOW)] = None,
    decay: Annotated[
        str | None, option("Decay parameters whose path matches this regex, by --weight-decay.", HOW)
    ] = None,
    ema: Annotated[float | None, option("Keep a moving average of the parameters, e.g. 0.999.", HOW)] = None,
    deterministic: Annotated[bool | None, option("Use deterministic GPU kernels.", HOW, flag="--deterministic")] = None,
    run: Annotated[
        str | None, option("Run directory; an existing one is resumed.", KEPT, values=complete_run_folders)
    ] = None,
    eval_every: Annotated[str | None, option("Steps (500) or time (5m) between evaluations.", KEPT)] = None,
    eval_batch: Annotated[str | None, option("Rows of a batch in evaluations. Default: as in a step.", KEPT)] = None,
    save_every: Annotated[str | None, option("Steps (500) or time between checkpoints. Default: 5m.", KEPT)] = None,
    keep: Annotated[int | None, option("Checkpoints to keep. Default: 3.", KEPT)] = None,
    keep_best: Annotated[
        str | None, option("Keep the checkpoint of the best evaluation too: eval_loss, eval_accuracy:max.", KEPT)
    ] = None,
    grace: Annotated[
        str | None, option("Grace period: time from SIGTERM until the machine is gone. Default: 10s.", KEPT)
    ] = None,
    fast_dev_run: Annotated[
        bool | None, option("Two steps, an evaluation and a checkpoint; nothing is kept.", HOW, flag="--fast-dev-run")
    ] = None,
    overfit_batches: Annotated[
        int | None, option("Train and evaluate on the first so many batches alone.", HOW)
    ] = None,
    profile: Annotated[
        bool | None, option("Trace a few steps for xprof and TensorBoard.", KEPT, flag="--profile")
    ] = None,
    wandb: Annotated[str | None, option("Log every row to this Weights & Biases project.", KEPT)] = None,
    as_json: Annotated[bool, option("Print one JSON object at the end.", KEPT, flag="--json")] = False,
    detach: Annotated[
        bool, option("Go on in the background, also when the terminal closes.", KEPT, flag="--detach")
    ] = False,
    dry: Annotated[
        bool, option("Show what would be trained, and where; change nothing.", KEPT, flag="--dry-run")
    ] = False,
    hosts: Annotated[int | None, option("Hosts that train together as one program. Default: a slice's.", HOSTS)] = None,
    host: Annotated[int | None, option("Number of this host, from 0. Default: the slice's.", HOSTS)] = None,
    hosts_at: Annotated[
        str | None,
        option("Address of host 0, HOST:PORT. Default: worker 0 of the slice, port 8590.", HOSTS),
    ] = None,
    members: Annotated[
        int | None, option("Train as a swarm of this many members; 0: only those that join.", SWARM)
    ] = None,
    devices_per_member: Annotated[
        int | None,
        option("Devices of each member; without a TPU or GPU, virtual ones. Default: an equal share.", SWARM),
    ] = None,
    cycle: Annotated[int | None, option("Steps of a member between two pushes. Default: 50.", SWARM)] = None,
    outer: Annotated[
        str | None, option("Outer rule: average or nesterov (DiLoCo).", SWARM, values=complete_choices("outer"))
    ] = None,
    outer_lr: Annotated[
        float | None, option("Learning rate of nesterov. Default: by the number of members.", SWARM)
    ] = None,
    quantize: Annotated[
        str | None,
        option("int8 or int4: send fewer bytes, in both directions.", SWARM, values=complete_choices("quantize")),
    ] = None,
    overlap: Annotated[
        str | None, option("auto, or 0: wait while a push is in flight.", SWARM, values=complete_choices("overlap"))
    ] = None,
    ray_address: Annotated[str | None, option("Use this existing Ray cluster.", SWARM)] = None,
    dashboard: Annotated[
        bool | None, option("Serve Ray's own dashboard, to this machine alone.", SWARM, flag="--dashboard")
    ] = None,
    token_file: Annotated[
        Path | None, option("File with the secret of all who join. Default: made for the run.", SWARM)
    ] = None,
    expect: Annotated[
        int | None,
        option("Members that will join, from any machine. Default: 0, and Ray listens to this one only.", SWARM),
    ] = None,
    ports: Annotated[
        str | None, option("TCP ports on which Ray listens, such as 20000-20999. Default: any.", SWARM)
    ] = None,
    keep_payloads: Annotated[
        str | None, option("Commits whose payloads are kept, or all: for `ledger rebuild`. Default: 20.", SWARM)
    ] = None,
    listen: Annotated[
        str | None, option("HOST:PORT on which this machine admits members from anywhere, by HTTPS.", SWARM)
    ] = None,
    address: Annotated[
        str | None,
        option("Where they reach it: HOST:PORT, or a tunnel's https:// address. Default: a Google VM's own.", SWARM),
    ] = None,
    paid: Annotated[bool, option("Pay for TPUs that no grant covers.", FLEET, flag="--paid")] = False,
    yes: Annotated[bool, option("Rent the machines of the fleet without asking.", FLEET, flag="--yes")] = False,
    accept_code: Annotated[
        bool, option("Resume although the code (in a swarm, also settings) changed.", KEPT, flag="--accept-code")
    ] = False,
) -> None:
    """Train a recipe. Its own options work too: --lr 3e-4 --context 256.

    The same --run directory resumes. With --members it is a swarm: any member may die at any moment. A swarm.toml with
    machines trains on all of them.
    """
    if recipe and recipe.endswith(".toml"):  # imported here, since other trainings need no fleet
        from tpuswarm.cli.train.train_fleet import train_on_fleet
        from tpuswarm.fleet.spec.file import asks_for_machines

        if asks_for_machines(Path(recipe)):
            train_on_fleet(context, Path(recipe), yes, paid, detach, dry, accept_code)
            return
    options = read_options(context)
    if dry:
        _print_dry_run(options, as_json)
        return
    if detach:
        start_detached(options, as_json)
        return
    if options.folder and options.hosts is None:  # with several hosts, host 0 uses the folder
        require_not_in_use(options.folder)
    signal = _train_swarm(options, as_json) if options.swarm is not None else _train_here(options, context.params)
    if signal is not None:
        raise typer.Exit(128 + signal)


train.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}  # type: ignore[attr-defined]


def _print_dry_run(options: TrainOptions, as_json: bool) -> None:
    facts, preview = describe_dry_run(options), options.recipe.preview(quick=True)
    if as_json:
        print(json.dumps(facts | ({"preview": preview} if preview else {})))
        return
    for name, text in facts.items():
        echo(f"{name:12}{text}", hang=12)
    if preview:
        from tpuswarm.train.look.preview import print_preview

        print_preview(make_console(), preview)
    echo("nothing was done")


def _make_trainer(options: TrainOptions, **more: Any) -> Any:
    platform.load_jax()
    with waiting("loading JAX's libraries", delay_s=0.0):
        from tpuswarm.train.trainer import Trainer

    return Trainer(**{name: getattr(options.table, name) for name in TRAINER_OPTIONS}, **more)


def _train_here(options: TrainOptions, params: dict[str, Any]) -> int | None:
    """Train in this process; return the signal that stopped it."""
    group = options.hosts
    hosts = {"hosts": group.count, "host": group.index, "hosts_at": group.address} if group else {"hosts": 1}
    trainer = _make_trainer(options, **hosts, accept_code=params["accept_code"])
    if group:
        _send_libraries_to_stderr()
    recipe = options.recipe
    init = {"init_from": options.parent, "init_only": options.table.init_only}
    if options.with_lr is not None:
        lr = float(f"{trainer.find_lr(recipe, batch=options.table.batch, **init).lr:.1e}")
        echo(f"learning rate {lr:g}: the loss falls fastest there, of 100 steps from 1e-06 to 1", err=True)
        recipe = options.with_lr(lr)
    length = {name: getattr(options.table, name) for name in ("steps", "tokens", "epochs", "batch")}
    result = trainer.fit(recipe, run=options.folder, **init, **length)
    print_result(result, params["as_json"])
    is_leader = (result.run / REPORT).exists()
    if result.ended == "finished" and is_leader and not params["as_json"]:
        print_next(result.run, recipe)
    return result.signal


def _train_swarm(options: TrainOptions, as_json: bool) -> int | None:
    """Train in several processes; return the signal that stopped them."""
    table = options.table
    settings = _make_trainer(options).settings(table.steps, table.batch, options.parent, table.init_only)
    with waiting("loading Ray", delay_s=0.0):
        from tpuswarm.swarm.supervision import decide, start
    swarm = decide.SwarmOptions(**options.swarm or {})
    result = start.train(options.recipe, swarm, settings, table.tokens, table.epochs, options.folder)
    print_swarm_result(result, as_json)
    if result.ended.how == "finished" and not as_json:
        print_next(result.run, options.recipe)
    return result.ended.signal


def _send_libraries_to_stderr() -> None:
    # JAX prints about the connections between hosts
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)


def print_result(result: "Result", as_json: bool) -> None:
    if as_json:
        facts = {"run": shown(result.run), "ended": result.ended, "step": result.step, "steps": result.steps}
        print(json.dumps({**facts, "message": result.message, "metrics": result.metrics}))
    elif not result.run.exists():
        end = "passed: two steps, an evaluation, a checkpoint" if result.ended == "finished" else "was stopped"
        echo(f"the fast dev run {end}; nothing was kept")
    elif result.ended == "stopped":
        echo(stopped_sentence(result.run, result.message))
    else:
        losses = _losses(result.metrics, "loss")
        end = f"{shown(result.run)} finished at step {result.step} of {result.steps}"
        report = result.run / REPORT  # host 0 alone writes it
        echo(f"{end}: {', '.join(losses)}{f'; {report}' if report.exists() else ''}")


def print_swarm_result(result: "SwarmResult", as_json: bool) -> None:
    if as_json:
        facts = {"run": shown(result.run), "ended": result.ended.how, "message": result.ended.message}
        print(json.dumps({**facts, "version": result.version, "tokens": result.tokens, "metrics": result.metrics}))
    elif result.ended.how == "stopped":
        echo(stopped_sentence(result.run, result.ended.message))
    else:
        tokens = f"{result.tokens:,} {token_unit(read_config(result.run)['chosen']['tokens_per_row'])}"
        facts_text = ", ".join([tokens, *_losses(result.metrics, "training loss")])
        echo(f"{shown(result.run)} finished at commit {result.version}: {facts_text}; {result.run / 'report.html'}")


def _losses(metrics: Mapping[str, Any], loss_name: str) -> list[str]:
    names = {"loss": loss_name, "eval_loss": "held-out loss"}
    return [f"{text} {format_figure(metrics[name])}" for name, text in names.items() if metrics.get(name) is not None]


def describe_dry_run(options: TrainOptions) -> dict[str, str]:
    """Describe a training without JAX and without a trace on disk. Raises InputError for an unusable folder."""
    table, recipe, folder = options.table, options.recipe, options.folder
    begun = read_config(folder) if folder is not None and has_begun(folder) else None
    defaults: Mapping[str, Any] = begun["train"] if begun else recipe.defaults
    facts = {
        "recipe": recipe.name,
        "data": (table.data or "").replace("\n", ", ") or ("as before" if begun else "the recipe's own"),
    }
    length = next((name for name in LENGTH_KEYS if getattr(table, name) is not None), None)
    if length:
        facts["length"] = f"{getattr(table, length):,} {length}"
    elif "steps" in defaults:
        facts["length"] = f"{defaults['steps']:,} steps"
    if table.batch == "auto" and not begun:
        facts["batch"] = "as many rows as fit, found by compiling"
    elif batch := (None if table.batch == "auto" else table.batch) or defaults.get("batch"):
        facts["batch"] = f"{batch:,} rows per step" + ("" if table.batch or begun else ", or more to suit the devices")
    facts["devices"] = f"{table.devices}, sharding {table.shard}"
    if options.swarm is not None:
        facts["swarm"] = f"{options.swarm['members']} members"
    if options.parent is not None:
        which = f"parameters that match {table.init_only!r}" if table.init_only else "all parameters"
        facts["parameters"] = f"{which} of {table.init_from}"
    if folder is None:
        facts["run"] = f"a new folder in ./runs, {recipe.name}-N"
    else:
        facts["run"] = f"{folder}, {_run_state(folder, begun) if begun else 'new'}"
    return facts


def _run_state(folder: Path, config: Mapping[str, Any]) -> str:
    from tpuswarm.swarm.views.status import read_run

    run: Any = read_run(folder) if "swarm" in config else read_status(folder)
    return f"{run.state} at step {run.step:,} of {run.steps:,}"
