"""`tpuswarm plan`: what fits on TPUs and GPUs that are not rented yet, how fast at best, and at what price."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm import catalog, recipes
from tpuswarm.cli.completion import complete_choices, complete_recipes
from tpuswarm.cli.console import make_console, option
from tpuswarm.cli.plan.models import list_models
from tpuswarm.cli.plan.pools import Machines, add_own_gpus, read_grants, read_pools
from tpuswarm.cli.train.train_options import make_recipe, recipe_options
from tpuswarm.config.formatting import format_duration
from tpuswarm.config.limits import check_settings
from tpuswarm.config.train_table import Train
from tpuswarm.config.units import check_number, parse_count
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.plan import outlook
from tpuswarm.plan.compile.cache import PlanCache
from tpuswarm.plan.compile.pool import CompilePool, no_compiler, no_gpu_compiler, other_libtpu
from tpuswarm.plan.compile.request import CompileRequest, PlanOptions, describe_target
from tpuswarm.plan.row import Row, plan_document
from tpuswarm.plan.swarm import SwarmEstimate, estimate_swarm, swarm_tables
from tpuswarm.plan.table import plan_table
from tpuswarm.swarm.processes.run_plan import DEFAULT_CYCLE_STEPS
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.terminal import echo

DEFAULT_TPUS = ("v2-8", "v3-8", "v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8")
"""The slice called 8 of each generation, which is one host."""
CHECKPOINT_INTERVAL_S = 300.0
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def plan(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A built-in recipe (gpt2-tiny, gpt2-124m, …), a published model (qwen3-0.6b, hf:ORG/NAME), "
            "file.py:Recipe, or swarm.toml. Without it: all published models, on --on.",
            autocompletion=complete_recipes,
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        option(
            "A TPU or GPU, by any name; repeatable. Default: the 8 of each TPU. Beside a file or --mine: your GPUs."
        ),
    ] = None,
    batch: Annotated[
        str, option("Rows of one step over all devices, or auto: the largest micro-batch. Default: auto.")
    ] = "auto",
    precision: Annotated[
        str | None, option("bf16, f32 or highest. Default: bf16.", values=complete_choices("precision"))
    ] = None,
    shard: Annotated[
        str | None, option("auto, replicate or fsdp. Default: auto.", values=complete_choices("shard"))
    ] = None,
    accumulate: Annotated[str | None, option("Micro-batches per step. Default: as few as fit.")] = None,
    freeze: Annotated[str | None, option("Freeze parameters whose path matches this regex.")] = None,
    ema: Annotated[float | None, option("Keep a moving average of the parameters, e.g. 0.999.")] = None,
    members: Annotated[int | None, option("Plan a swarm of this many: traffic, its price, the head.")] = None,
    tokens: Annotated[str | None, option("Tokens to train on, e.g. 10B: adds hours and dollars.")] = None,
    mine: Annotated[
        bool, typer.Option("--mine", help="On the free TPUs of the grants in ./swarm.toml, all in one swarm.")
    ] = False,
    free: Annotated[bool, typer.Option("--free", help="The TPUs are free, for example a grant.")] = False,
    as_json: Annotated[bool, option("Print one JSON object.", flag="--json")] = False,
) -> None:
    """Compile a training step for TPUs or GPUs you have not rented: what fits, how fast at best, at what price.

    A swarm.toml names both: its [train] and the types of its pools. The recipe's own options work too: --context 512.
    """
    if recipe is None or recipe.startswith("-"):
        if not on or mine or members is not None:
            raise InputError(
                "the recipe comes first: tpuswarm plan RECIPE …; without one, --on and options such as --lora 16 list "
                "the published models that fit"
            )
        words = recipe_options([*([recipe] if recipe else []), *context.args], "plan")
        count = None if tokens is None else parse_count(tokens, "tokens")
        list_models(
            on, words, batch, PlanOptions("", {}, None, precision, shard, None, freeze, ema), count, free, as_json
        )
        return
    title, recipe_words, machines = recipe, recipe_options(context.args, "plan"), None
    if recipe.endswith(".toml"):
        if mine:
            raise InputError(f"{recipe} names the TPUs: leave --mine out, or name a recipe")
        train, machines = read_pools(Path(recipe))
        recipe = train.recipe
        recipe_words = {name: str(value) for name, value in train.options.items()} | recipe_words
        batch = _batch_of(train) if batch == "auto" else batch
        precision, shard = precision or train.precision, shard or (train.shard if train.shard != "auto" else None)
        accumulate = accumulate or (None if train.accumulate is None else str(train.accumulate))
        freeze, ema = freeze or train.freeze, train.ema if ema is None else ema
        tokens = tokens or (None if train.tokens is None else str(train.tokens))
    elif mine:
        machines = read_grants(Path("swarm.toml"))
    if machines and on:
        machines = add_own_gpus(machines, on, title if title.endswith(".toml") else "--mine")
    if machines and members is not None:
        raise InputError("--members does not go with a file or --mine, which give the number of machines")
    target, preset = recipes.find(recipe)
    if ":" not in recipe:  # a user's file may import JAX, so only the compiling process reads it
        make_recipe(recipe, {}, recipe_words, context)
    options = PlanOptions(
        target,
        {**preset, **recipe_words},
        batch=None if batch == "auto" else parse_count(batch, "batch"),
        precision=precision,
        shard=shard,
        accumulate=None if accumulate is None else parse_count(accumulate, "accumulate"),
        freeze=freeze,
        ema=ema,
    )
    if members is not None:
        check_number(members, "members", least=1)
    check_settings({"ema": ema})
    targets = machines.counts if machines else on or DEFAULT_TPUS
    hardware = {found.name: found for found in map(catalog.find_hardware, targets)}
    batches = machines.batches if machines and batch == "auto" else {}
    token_count = None if tokens is None else parse_count(tokens, "tokens")
    rows = _compile(title, options, hardware, batches, token_count, free or mine, as_json)
    counts = machines.counts if machines else dict.fromkeys(hardware, members or 0)
    swarms: dict[str, SwarmEstimate] = {}
    if members is not None or sum(counts.values()) > 1:
        estimates = {row.accelerator.name: estimate_swarm(row, counts[row.accelerator.name]) for row in rows}
        swarms = {name: swarm for name, swarm in estimates.items() if swarm}
    forecast = _forecast(machines, rows, token_count, free) if machines else None
    if as_json:
        _print_json(plan_document(title, options, rows), swarms, forecast)
    else:
        _print_swarms(swarms)
        if machines and forecast:
            _print_forecast(machines, forecast, rows, len(swarms) > 1)
    if all(row.result.fits is None and row.result.program is None for row in rows):
        raise RunFailed(f"no answer for {recipe}: {rows[0].result.problem}")


plan.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}  # type: ignore[attr-defined]


def _batch_of(train: Train) -> str:
    return "auto" if train.batch is None or isinstance(train.batch, dict) else str(train.batch)


def _compile(
    title: str,
    options: PlanOptions,
    hardware: dict[str, catalog.Hardware],
    batches: dict[str, int],
    tokens: int | None,
    is_free: bool,
    as_json: bool,
) -> list[Row]:
    """Compile the step for each TPU and GPU and show the answers; return them in the given order."""
    gpus = {name: found for name, found in hardware.items() if isinstance(found, catalog.Gpu)}
    for name, gpu in gpus.items():
        if reason := no_gpu_compiler(gpu):
            raise InputError(f"--on {name}: {reason}")
    reason = "" if len(gpus) == len(hardware) else no_compiler()
    requests = [
        CompileRequest(
            replace(options, batch=batches.get(name, options.batch)),
            describe_target(found),
            "" if name in gpus else reason,
        )
        for name, found in hardware.items()
    ]
    rows: dict[str, Row] = {}
    with _open_view(title, requests, as_json) as view:
        pool = CompilePool(PlanCache(cache_folder("plan")), view.show_state)
        for request, result in pool.results(requests):
            name = request.target.name
            rows[name] = Row(hardware[name], result, tokens, is_free)
            view.show_row(rows[name])
    for note in (reason, "" if reason or len(gpus) == len(hardware) else other_libtpu(), pool.cache_error):
        if note:
            echo(f"note: {note}", err=True)
    return [rows[name] for name in hardware]


def _forecast(machines: Machines, rows: list[Row], tokens: int | None, free: bool) -> outlook.Outlook:
    """Forecast the training. A preemption loses the work since the last push; alone, since the last checkpoint."""
    groups = [replace(group, dollars=0.0) for group in machines.groups] if free else machines.groups
    speeds = {row.accelerator.name: row.speed for row in rows if row.speed}
    save_interval_s = CHECKPOINT_INTERVAL_S
    if speeds and sum(machines.counts.values()) > 1:
        save_interval_s = DEFAULT_CYCLE_STEPS * min(speed.seconds.high for speed in speeds.values())
    rates = {name: speed.tokens_per_s for name, speed in speeds.items()}
    return outlook.make_outlook(groups, rates, save_interval_s, tokens, time.time())


def _print_json(whole: dict[str, Any], swarms: dict[str, SwarmEstimate], forecast: outlook.Outlook | None) -> None:
    for row in whole["rows"]:
        if swarm := swarms.get(row["accelerator"]):
            row["swarm"] = swarm.document()
    if forecast:
        whole["together"] = forecast.document()
    print(json.dumps(whole))


def _print_swarms(swarms: dict[str, SwarmEstimate]) -> None:
    for count in dict.fromkeys(swarm.members for swarm in swarms.values()):
        for swarm_table in swarm_tables([swarm for swarm in swarms.values() if swarm.members == count]):
            make_console().print("", swarm_table)


def _print_forecast(machines: Machines, forecast: outlook.Outlook, rows: list[Row], has_types: bool) -> None:
    for note in machines.notes:
        echo(f"granted: {note}")
    if has_types:
        echo("Machines of all types can train one model: their speeds and their traffic add up.")
    if forecast.groups:
        unit = next((row.unit for row in rows if row.result.program), "tokens")
        make_console().print("", outlook.outlook_table(forecast, unit))
        for sentence in outlook.outlook_sentences(forecast, unit):
            echo(sentence)


class _View:
    """Shows answers as they come: on a terminal in a table that is redrawn, elsewhere as lines on stderr."""

    def __init__(self, title: str, requests: list[CompileRequest]):
        self._title = title
        self._states: dict[str, str] = {request.target.name: "waiting" for request in requests}
        self._started_at: dict[str, float] = {}
        self.rows: dict[str, Row] = {}
        self.is_live = False

    def show_state(self, request: CompileRequest, state: str) -> None:
        self._states[request.target.name] = state
        self._started_at.setdefault(request.target.name, time.monotonic())
        if not self.is_live:
            echo(f"{request.target.name}: {state}", err=True)

    def show_row(self, row: Row) -> None:
        self.rows[row.accelerator.name] = row
        if not self.is_live:
            echo(f"{row.accelerator.name}: {row.sentence}", err=True)

    def draw(self) -> Any:
        return plan_table(self._title, [(name, self.rows.get(name), self._progress(name)) for name in self._states])

    def _progress(self, name: str) -> str:
        """Return the state of a compilation, with its elapsed time and a mark that turns."""
        if name not in self._started_at:
            return self._states[name]
        elapsed_s = time.monotonic() - self._started_at[name]
        return f"{SPINNER[int(2 * elapsed_s) % len(SPINNER)]} {self._states[name]} … {format_duration(elapsed_s)}"


@contextmanager
def _open_view(title: str, requests: list[CompileRequest], as_json: bool) -> Iterator[_View]:
    console, view = make_console(), _View(title, requests)
    if console.is_terminal and not as_json:
        from tpuswarm.train.process.live_region import LiveRegion

        with LiveRegion(get_renderable=view.draw, console=console, refresh_per_second=2):
            view.is_live = True
            yield view
        return
    try:
        yield view
    finally:
        if view.rows and not as_json:
            console.print(view.draw())
