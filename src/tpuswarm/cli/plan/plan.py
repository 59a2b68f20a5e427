"""`tpuswarm plan`: does it fit, how fast at best, at what price, on TPUs you have not rented yet."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import make_console, option
from tpuswarm.cli.plan.pools import Machines, granted, planned
from tpuswarm.cli.train.recipe import make_recipe, recipe_options
from tpuswarm.config.units import check_number, parse_count
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.plan.estimate import Estimate
    from tpuswarm.plan.order import Order
    from tpuswarm.plan.outlook import Outlook
    from tpuswarm.plan.row import Row

USUAL = ("v2-8", "v3-8", "v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8")
"""Without --on: of each generation the slice called 8, which is one host."""


def plan(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="A built-in recipe (gpt2-tiny, gpt2-124m, …), file.py:Recipe, or swarm.toml.")
    ],
    on: Annotated[
        list[str] | None, option("--on", "A TPU, by any of its names; repeatable. Default: the 8 of each generation.")
    ] = None,
    batch: Annotated[
        str, option("--batch", "Rows of one step over all devices, or auto: the largest micro-batch. Default: auto.")
    ] = "auto",
    precision: Annotated[str | None, option("--precision", "bf16, f32 or highest. Default: bf16.")] = None,
    shard: Annotated[str | None, option("--shard", "auto, replicate or fsdp. Default: auto.")] = None,
    accumulate: Annotated[str | None, option("--accumulate", "Micro-batches per step. Default: as few as fit.")] = None,
    freeze: Annotated[str | None, option("--freeze", "Freeze parameters whose path matches this regex.")] = None,
    ema: Annotated[float | None, option("--ema", "Keep a moving average of the parameters, e.g. 0.999.")] = None,
    members: Annotated[
        int | None, option("--members", "Plan a swarm of this many: traffic, its price, the head.")
    ] = None,
    tokens: Annotated[str | None, option("--tokens", "Tokens to train on, e.g. 10B: adds hours and dollars.")] = None,
    mine: Annotated[
        bool,
        typer.Option("--mine", help="On what the grants in ./swarm.toml cover: it is free, and all of it one swarm."),
    ] = False,
    free: Annotated[bool, typer.Option("--free", help="The TPUs are free, for example a grant.")] = False,
    as_json: Annotated[bool, option("--json", "Print one JSON object.")] = False,
) -> None:
    """Compile a recipe's training step for TPUs you have not rented: what fits, how fast at best, at what price.

    A swarm.toml names both: its [train] and the types of its pools. The recipe's own options work too: --context 512.
    """
    from tpuswarm import catalog, recipes
    from tpuswarm.config.limits import check_settings
    from tpuswarm.plan.cache import Cache
    from tpuswarm.plan.children import Children, no_compiler, other_libtpu
    from tpuswarm.plan.order import Asked, Order, described
    from tpuswarm.plan.row import Row, document
    from tpuswarm.train.process.platform import cache_folder

    if recipe.startswith("-"):
        raise InputError(f"the recipe comes first: tpuswarm plan RECIPE {recipe} …")
    title, words, machines = recipe, recipe_options(context.args, "plan"), None
    if recipe.endswith(".toml"):
        if on or mine:
            raise InputError(f"{recipe} names the TPUs: leave {'--on' if on else '--mine'} out, or name a recipe")
        said, machines = planned(Path(recipe))
        recipe, words = said.recipe, {name: str(value) for name, value in said.options.items()} | words
        if batch == "auto" and said.batch is not None and not isinstance(said.batch, dict):
            batch = str(said.batch)
        precision, shard = precision or said.precision, shard or (said.shard if said.shard != "auto" else None)
        accumulate = accumulate or (None if said.accumulate is None else str(said.accumulate))
        freeze, ema = freeze or said.freeze, said.ema if ema is None else ema
        tokens = tokens or (None if said.tokens is None else str(said.tokens))
    elif mine:
        if on:
            raise InputError("--on and --mine exclude each other: the grants say which TPUs")
        machines = granted(Path("swarm.toml"))
    if machines and members is not None:
        raise InputError("--members is for one type of TPU each; here the file says how many there are")
    target, preset = recipes.find(recipe)
    if ":" not in recipe:  # a file of the user's is only read where it is compiled: it imports JAX
        make_recipe(recipe, {}, words, context)
    asked = Asked(
        target,
        {**preset, **words},
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
    reason = no_compiler()
    slices = {each.name: each for each in map(catalog.find, machines.counts if machines else on or USUAL)}
    own = machines.batches if machines and batch == "auto" else {}
    orders = [
        Order(replace(asked, batch=own.get(each.name, asked.batch)), described(each), reason)
        for each in slices.values()
    ]
    wanted = None if tokens is None else parse_count(tokens, "tokens")
    rows: dict[str, Row] = {}
    with _shown(title, orders, as_json) as show:
        children = Children(Cache(cache_folder("plan")), show.say)
        for order, found in children.answers(orders):
            rows[order.place.name] = row = Row(slices[order.place.name], found, wanted, free or mine)
            show.row(row)
    for note in (reason, "" if reason else other_libtpu(), children.unkept):
        if note:
            say(f"note: {note}", err=True)
    ordered = [rows[name] for name in slices]
    counts = machines.counts if machines else dict.fromkeys(slices, members or 0)
    swarms = _swarms(ordered, counts) if members is not None or sum(counts.values()) > 1 else {}
    if as_json:
        whole = document(title, asked, ordered)
        for row_object in whole["rows"]:
            if swarm := swarms.get(row_object["accelerator"]):
                row_object["swarm"] = swarm.document()
        if machines:
            whole["together"] = _outlook(machines, ordered, wanted, free).document()
        print(json.dumps(whole))
    elif swarms:
        from tpuswarm.plan.estimate import tables

        for count in dict.fromkeys(each.members for each in swarms.values()):
            for each in tables([swarm for swarm in swarms.values() if swarm.members == count]):
                make_console().print("", each)
    if machines and not as_json:
        for note in machines.notes:
            say(f"granted: {note}")
        if len(swarms) > 1:
            say("Machines of all types may train one model: what they do a second, and their traffic, add up.")
        unit = next((row.unit for row in ordered if row.found.program), "tokens")
        _show_outlook(_outlook(machines, ordered, wanted, free), unit)
    if all(each.found.fits is None and each.found.program is None for each in ordered):
        raise RunFailed(f"no answer for {recipe} on any of these: {ordered[0].found.problem}")


plan.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}  # type: ignore[attr-defined]


def _swarms(rows: list["Row"], counts: dict[str, int]) -> dict[str, "Estimate"]:
    from tpuswarm.plan.estimate import estimate

    made = {row.accelerator.name: estimate(row, counts[row.accelerator.name]) for row in rows}
    return {name: swarm for name, swarm in made.items() if swarm}


def _outlook(machines: Machines, rows: list["Row"], tokens: int | None, free: bool) -> "Outlook":
    """A machine hands over what it trained with each push of a swarm, or alone with each checkpoint."""
    from tpuswarm.plan.outlook import outlook
    from tpuswarm.swarm.processes.plan import CYCLE

    groups = [replace(each, dollars=0.0) for each in machines.groups] if free else machines.groups
    speeds = {row.accelerator.name: row.speed for row in rows if row.speed}
    alone = sum(machines.counts.values()) == 1
    kept_s = 300.0 if alone or not speeds else CYCLE * min(each.seconds.high for each in speeds.values())
    rates = {name: each.tokens_per_s for name, each in speeds.items()}
    return outlook(groups, rates, kept_s, tokens, time.time())


def _show_outlook(found: "Outlook", unit: str) -> None:
    from tpuswarm.plan.outlook import sentences, table

    if found.groups:
        make_console().print("", table(found, unit))
        for each in sentences(found, unit):
            say(each)


class _Show:
    """Lines on stderr as answers come, the whole table on stdout at the end."""

    def __init__(self, title: str, orders: list["Order"], as_json: bool):
        self._title, self._orders, self._as_json = title, orders, as_json
        self._rows: dict[str, Row] = {}
        self._doing: dict[str, str] = {order.place.name: "waiting" for order in orders}

    def say(self, order: "Order", text: str) -> None:
        """What a compilation is at."""
        say(f"{order.place.name}: {text}", err=True)

    def row(self, row: "Row") -> None:
        """An answer."""
        self._rows[row.accelerator.name] = row
        say(f"{row.accelerator.name}: {row.sentence}", err=True)

    def draw(self) -> Any:
        """The table with what is known so far."""
        from tpuswarm.plan.table import table

        return table(self._title, [(name, self._rows.get(name), doing) for name, doing in self._doing.items()])

    def close(self) -> None:
        """The last word."""
        if not self._as_json and self._rows:
            make_console().print(self.draw())


class _LiveShow(_Show):
    """On a terminal: the table, drawn anew as answers come."""

    def __init__(self, title: str, orders: list["Order"]):
        from tpuswarm.train.process.drawn import Drawn

        super().__init__(title, orders, False)
        self._live = Drawn(get_renderable=self.draw, console=make_console(), refresh_per_second=2)
        self._live.start()

    def say(self, order: "Order", text: str) -> None:
        """What a compilation is at."""
        self._doing[order.place.name] = text

    def row(self, row: "Row") -> None:
        """An answer."""
        self._rows[row.accelerator.name] = row

    def close(self) -> None:
        """Leave the table on the screen."""
        self._live.stop()


@contextmanager
def _shown(title: str, orders: list["Order"], as_json: bool) -> Iterator[_Show]:
    show = _LiveShow(title, orders) if make_console().is_terminal and not as_json else _Show(title, orders, as_json)
    try:
        yield show
    finally:
        show.close()
