"""`tpuswarm status`: looking at runs; what every command that takes a run shares."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import Json, make_console
from tpuswarm.config.formatting import format_age, format_figure
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.swarm.views.status import Look
    from tpuswarm.train.run.listing import Status

SILENT = 10.0
"""Seconds without a new status.json after which a swarm that lives is not well."""


def status(
    run: Annotated[
        str | None, typer.Argument(help="A run's directory, its name in ./runs, gs://BUCKET/FOLDER, or `last`.")
    ] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw every second until the run ends.")] = False,
) -> None:
    """Show a run, or all runs in ./runs: state, step, loss, speed; for a swarm also its members.

    Where ./swarm.toml trains on a fleet, its run comes with machines, what each of them does and why, and costs.
    """
    if watch and as_json:
        raise InputError("--watch and --json exclude each other: use one of them")
    from tpuswarm.cli.fleet.training_view import training_here

    training = training_here(run) if run is None or "://" in run else None
    if watch:
        if training:
            training.watch(make_console())
        else:
            _watch(run)
        return
    seen = training.see() if training else None
    found = [] if seen and run else _looks(run)
    from tpuswarm.swarm.views.status import Look

    if as_json:
        from tpuswarm.watch.state import State

        objects = [State(each.run, each, None, time.time()).json() for each in found]
        if seen and run:
            print(json.dumps(seen.json()))
        else:
            print(json.dumps(objects[0] if run else {"runs": objects, **({"training": seen.json()} if seen else {})}))
        return
    if seen:
        make_console().print(seen.draw(make_console().width))
    if seen and not found:
        return
    if not found:
        say("no runs in ./runs; start one with `tpuswarm train gpt2-tiny`")
        return
    console = make_console()
    console.print(_drawn(found, run, console.width))
    local = run is not None and "://" not in run
    if local and isinstance(found[0], Look) and found[0].status.address:
        command = f"tpuswarm join {found[0].status.address} --token-file {Path(found[0].run) / 'token'}"
        say(f"to add a machine: `{command}`")


def _looks(run: str | None) -> list[Any]:
    """A `Status` of each plain run, a `Look` of each swarm."""
    from tpuswarm.swarm.views.status import look
    from tpuswarm.train.run.directory import read_config
    from tpuswarm.train.run.listing import find_run, list_runs, status

    found: list[Any] = []
    for folder in [Path(find_run(run))] if run else list_runs():
        try:
            found.append(look(folder) if "swarm" in read_config(folder) else status(folder))
        except InputError as error:
            if run:
                raise
            say(f"not shown: {error}", err=True)
    return found


def _watch(run: str | None) -> None:
    from tpuswarm.train.process.drawn import Drawn

    console = make_console()
    with Drawn(console=console, auto_refresh=False) as live:
        while True:
            found = _looks(run)
            live.update(_drawn(found, run, console.width, console.height - 1), refresh=True)
            if all(each.state != "running" for each in found):
                return
            time.sleep(1)


def _drawn(found: list[Any], run: str | None, width: int, height: int | None = None) -> Any:
    """A table of all; of one that was asked for all that is known. With a height it is made to fit into it."""
    from rich.console import Group
    from rich.text import Text

    from tpuswarm.swarm.views.status import Look
    from tpuswarm.train.look.live import STATES
    from tpuswarm.train.run.listing import folder_called, used

    if not run:
        shown = found if height is None else found[: height - 2]
        more = [Text(f"and {len(found) - len(shown):,} used earlier")] if len(found) > len(shown) else []
        return Group(_table(shown, width), *more)
    [each] = found
    state = (
        f"running, pid {each.pid}"
        if each.pid
        else f"{each.state} {format_age(time.time() - used(folder_called(each.run)))} ago"
    )
    said = [Text(f"{state}{': ' if each.message else ''}{each.message}", STATES.get(each.state, ""))]
    if not isinstance(each, Look):
        return Group(_plain(each, width, height), *said)
    silent = time.time() - each.status.time
    if each.pid and silent > SILENT:
        lost = f"no update for {silent:.0f} s: process {each.pid} does not respond, and this status is that old"
        said.append(Text(lost, style="red"))
    return Group(_swarm(each, width, height and height - len(said)), *said)


def _plain(seen: "Status", width: int, height: int | None) -> Any:
    from tpuswarm.train.look.display import Picture, draw

    picture = Picture(
        title=f"{seen.recipe} on {seen.devices}" if seen.devices else seen.recipe,
        run=seen.run,
        step=seen.step,
        steps=seen.steps,
        tokens_per_step=seen.tokens // max(seen.step, 1),
        unit=seen.unit,
        per_second=(seen.steps - seen.step) / seen.left if seen.left else None,
        loss=seen.loss,
        eval_loss=seen.eval_loss,
        eval_step=seen.eval_step,
        ended=seen.state != "running",
    )
    return draw(picture, seen.elapsed, width, height or 0)


def _swarm(look: "Look", width: int, height: int | None) -> Any:
    from tpuswarm.swarm.views.drawing import About, draw

    about = About(look.recipe, look.run, look.tokens_per_step, look.unit, ended=look.state != "running")
    return draw(about, look.status, (), width, height)


def _table(found: list[Any], width: int) -> Any:
    from tpuswarm.train.look.live import Column, table
    from tpuswarm.train.run.listing import folder_called, used

    columns = [
        Column("run"),
        Column("recipe", rank=5),
        Column("state"),
        Column("pid", right=True, rank=4),
        Column("age", right=True),
        Column("step", right=True, rank=1),
        Column("tokens", right=True, rank=6),
        Column("loss", right=True, rank=2),
        Column("held-out loss", right=True, rank=3),
        Column("speed", right=True, rank=1),
    ]
    rows = [
        (
            each.run,
            each.recipe,
            each.state,
            f"{each.pid}" if each.pid else "",
            "now" if each.state == "running" else format_age(time.time() - used(folder_called(each.run))),
            f"{each.step:,}/{each.steps:,}",
            f"{each.tokens:,}",
            format_figure(each.loss),
            format_figure(each.eval_loss),
            f"{each.tokens_per_s:,.0f} {each.unit}/s" if each.tokens_per_s else "",
        )
        for each in found
    ]
    return table(columns, rows, width)
