"""`tpuswarm status`: show a run, or all runs."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm.cli.completion import complete_runs
from tpuswarm.cli.console import RUN_HELP, Json, make_console
from tpuswarm.cli.fleet.fleet_training import find_fleet_training
from tpuswarm.config.formatting import format_age, format_figure
from tpuswarm.errors import InputError
from tpuswarm.swarm.views.status import RunView, read_run
from tpuswarm.train.process.stop import end_quietly
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.directory import read_config
from tpuswarm.train.run.listing import (
    Status,
    find_run,
    folder_from_name,
    last_used_at,
    list_runs,
    read_newest_evaluation,
    read_newest_updates,
)
from tpuswarm.train.run.listing import read_status as plain_status
from tpuswarm.watch.state import State

SILENT_S = 10.0
"""After this time without a new status.json, a swarm's process does not respond."""
REDRAW_INTERVAL_S = 1.0


def status(
    run: Annotated[str | None, typer.Argument(help=RUN_HELP, autocompletion=complete_runs)] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw every second until the run ends.")] = False,
) -> None:
    """Show a run, or all runs in ./runs: state, step, loss, speed; for a swarm also its members.

    If ./swarm.toml trains on a fleet, its run comes with the machines, what each does and why, and the cost.
    """
    if watch and as_json:
        raise InputError("--watch and --json exclude each other")
    console = make_console()
    training = find_fleet_training(run) if run is None or "://" in run else None
    if watch:
        end_quietly()
        if training:
            training.watch(console)
        else:
            _watch(run, console)
        return
    state = training.read() if training else None
    found = [] if state and run else _read_runs(run)
    if run and found:
        from tpuswarm.swarm.views.missing_rows import missing_rows  # imports NumPy

        found = [replace(found[0], missing_rows=missing_rows(folder_from_name(found[0].run)))]
    if as_json:
        print(json.dumps(_json_object(run, found, state)))
        return
    if state:
        console.print(state.draw(console.width))
        if not found:
            return
    if not found:
        echo("no runs in ./runs; start one: `tpuswarm train gpt2-tiny`")
        return
    console.print(_draw(found, run, console.width))
    if run is not None and "://" not in run and isinstance(found[0], RunView) and found[0].status.address:
        token = Path(found[0].run) / "token"
        echo(f"to add a machine: `tpuswarm join {found[0].status.address} --token-file {token}`")


def _json_object(run: str | None, found: list[Any], state: State | None) -> dict[str, Any]:
    if state and run:
        return state.json()
    objects = [State(one.run, one, None, time.time()).json() for one in found]
    return objects[0] if run else {"runs": objects, **({"training": state.json()} if state else {})}


def _read_runs(run: str | None) -> list[Any]:
    """Return a `Status` for each plain run and a `RunView` for each swarm."""
    found: list[Any] = []
    for folder in [Path(find_run(run))] if run else list_runs():
        try:
            found.append(read_run(folder) if "swarm" in read_config(folder) else plain_status(folder))
        except InputError as error:
            if run:
                raise
            echo(f"left out: {error}", err=True)
    return found


def _watch(run: str | None, console: Any) -> None:
    from tpuswarm.train.process.live_region import LiveRegion

    with LiveRegion(console=console, auto_refresh=False) as live:
        while True:
            found = _read_runs(run)
            live.update(_draw(found, run, console.width, console.height - 1), refresh=True)
            if all(one.state != "running" for one in found):
                return
            time.sleep(REDRAW_INTERVAL_S)


def _draw(found: list[Any], run: str | None, width: int, height: int | None = None) -> Any:
    """Draw a table of all runs, or all facts of the named run; with a height, so that it fits."""
    from rich.console import Group
    from rich.text import Text

    from tpuswarm.train.look.widgets import STATE_COLORS

    if not run:
        rows = found if height is None else found[: height - 2]
        more = [Text(f"and {len(found) - len(rows):,} older runs")] if len(found) > len(rows) else []
        return Group(_table(rows, width), *more)
    [one] = found
    state = f"running, pid {one.pid}" if one.pid else f"{one.state} {_age_of(one)} ago"
    lines = [Text(f"{state}{': ' if one.message else ''}{one.message}", STATE_COLORS.get(one.state, ""))]
    if one.missing_rows:
        lines.append(Text(one.missing_rows, "yellow"))
    if not isinstance(one, RunView):
        return Group(_draw_plain(one, width, height), *lines)
    silent_s = time.time() - one.status.time
    if one.pid and silent_s > SILENT_S:
        lines.append(Text(f"process {one.pid} does not respond; this status is {silent_s:.0f} s old", style="red"))
    return Group(_draw_swarm(one, width, height and height - len(lines)), *lines)


def _age_of(run: Any) -> str:
    return format_age(time.time() - last_used_at(folder_from_name(run.run)))


def _draw_plain(run: Status, width: int, height: int | None) -> Any:
    from tpuswarm.train.look.display import SmoothedLoss, ViewState, draw_run, own_metrics

    folder = folder_from_name(run.run)
    updates, evaluation = read_newest_updates(folder), read_newest_evaluation(folder)
    picture = ViewState(
        title=f"{run.recipe} on {run.devices}" if run.devices else run.recipe,
        run=run.run,
        step=run.step,
        steps=run.steps,
        tokens_per_step=run.tokens // max(run.step, 1),
        unit=run.unit,
        steps_per_s=(run.steps - run.step) / run.left if run.left else None,
        loss=run.loss,
        smoothed_loss=SmoothedLoss(row["loss"] for row in updates if row["loss"] is not None).value,
        eval_loss=run.eval_loss,
        eval_step=run.eval_step,
        metrics=own_metrics({**(updates[-1] if updates else {}), **evaluation}),
        ended=run.state != "running",
    )
    return draw_run(picture, run.elapsed, width, height or 0)


def _draw_swarm(run: RunView, width: int, height: int | None) -> Any:
    from tpuswarm.swarm.views.drawing import About, draw

    about = About(run.recipe, run.run, run.tokens_per_step, run.unit, ended=run.state != "running")
    return draw(about, run.status, (), width, height)


def _table(runs: list[Any], width: int) -> Any:
    from tpuswarm.train.look.widgets import Column, make_table

    columns = [
        Column("run"), Column("recipe", rank=5), Column("state"), Column("pid", right=True, rank=4),
        Column("age", right=True), Column("step", right=True, rank=1), Column("tokens", right=True, rank=6),
        Column("loss", right=True, rank=2), Column("held-out loss", right=True, rank=3),
        Column("speed", right=True, rank=1),
    ]  # fmt: skip
    rows = [
        (
            run.run,
            run.recipe,
            run.state,
            f"{run.pid}" if run.pid else "",
            "now" if run.state == "running" else _age_of(run),
            f"{run.step:,}/{run.steps:,}",
            f"{run.tokens:,}",
            format_figure(run.loss),
            format_figure(run.eval_loss),
            f"{run.tokens_per_s:,.0f} {run.unit}/s" if run.tokens_per_s else "",
        )
        for run in runs
    ]
    return make_table(columns, rows, width)
