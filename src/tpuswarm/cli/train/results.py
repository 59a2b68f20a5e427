"""Describe a training before it begins, and print its end."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuswarm.cli.train.train_options import TrainOptions
from tpuswarm.config.formatting import format_figure, token_unit
from tpuswarm.config.train_table import LENGTH_KEYS
from tpuswarm.train.process.terminal import say
from tpuswarm.train.run.directory import has_begun, read_config
from tpuswarm.train.run.life import stopped_sentence
from tpuswarm.train.run.listing import status
from tpuswarm.train.storage.folders import shown

if TYPE_CHECKING:
    from tpuswarm.swarm.supervision.start import SwarmResult
    from tpuswarm.train.loop.result import Result


def print_result(result: "Result", as_json: bool) -> None:
    if as_json:
        facts = {"run": shown(result.run), "ended": result.ended, "step": result.step, "steps": result.steps}
        print(json.dumps({**facts, "message": result.message, "metrics": result.metrics}))
    elif not result.run.exists():
        end = "passed: two steps, an evaluation, a checkpoint" if result.ended == "finished" else "was stopped"
        say(f"the fast dev run {end}; nothing was kept")
    elif result.ended == "stopped":
        say(stopped_sentence(result.run, result.message))
    else:
        losses = _losses(result.metrics, "loss")
        end = f"{shown(result.run)} finished at step {result.step} of {result.steps}"
        say(f"{end}: {', '.join(losses)}; {result.run / 'report.html'}")


def print_swarm_result(result: "SwarmResult", as_json: bool) -> None:
    if as_json:
        facts = {"run": shown(result.run), "ended": result.ended.how, "message": result.ended.message}
        print(json.dumps({**facts, "version": result.version, "tokens": result.tokens, "metrics": result.metrics}))
    elif result.ended.how == "stopped":
        say(stopped_sentence(result.run, result.ended.message))
    else:
        tokens = f"{result.tokens:,} {token_unit(read_config(result.run)['chosen']['tokens_per_row'])}"
        facts_text = ", ".join([tokens, *_losses(result.metrics, "training loss")])
        say(f"{shown(result.run)} finished at commit {result.version}: {facts_text}; {result.run / 'report.html'}")


def _losses(metrics: Mapping[str, Any], loss_name: str) -> list[str]:
    names = {"loss": loss_name, "eval_loss": "held-out loss"}
    return [f"{text} {format_figure(metrics[name])}" for name, text in names.items() if metrics.get(name) is not None]


def describe_dry_run(options: TrainOptions) -> dict[str, str]:
    """Describe a training without JAX and without a trace on disk. Raises InputError for an unusable folder."""
    table, recipe, folder = options.table, options.recipe, options.folder
    begun = read_config(folder) if folder is not None and has_begun(folder) else None
    defaults: Mapping[str, Any] = begun["train"] if begun else recipe.defaults
    facts = {"recipe": recipe.name, "data": table.data or ("as before" if begun else "the recipe's own")}
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

    run: Any = read_run(folder) if "swarm" in config else status(folder)
    return f"{run.state} at step {run.step:,} of {run.steps:,}"
