"""`tpuswarm status`, `sample`, `evaluate`: looking at runs."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.config.shown import age, significant
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.train.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.swarm.status import Look
    from tpuswarm.train.listing import Status

PIPE_WIDTH = 240
"""Columns of a file or a pipe."""
SILENT = 10.0
"""Seconds without a new status.json after which a swarm that lives is not well."""
Run = Annotated[str, typer.Argument(help="A run's directory, its name in ./runs, or `last`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def status(
    run: Annotated[str | None, typer.Argument(help="A run's directory, its name in ./runs, or `last`.")] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw every second until the run ends.")] = False,
) -> None:
    """Show a run, or all runs in ./runs: state, step, loss, speed; for a swarm also its members."""
    if watch and as_json:
        raise InputError("--watch and --json exclude each other: use one of them")
    if watch:
        _watch(run)
        return
    found = _looks(run)
    from tpuswarm.swarm.status import Look
    from tpuswarm.train.listing import Status

    if as_json:
        objects = [asdict(each) if isinstance(each, Status) else each.json() for each in found]
        print(json.dumps(objects[0] if run else {"runs": objects}))
        return
    if not found:
        print("no runs in ./runs; start one with `tpuswarm train gpt2-tiny`")
        return
    console = make_console()
    console.print(_drawn(found, run, console.width))
    if run and isinstance(found[0], Look) and found[0].status.address:
        command = f"tpuswarm join {found[0].status.address} --token-file {Path(found[0].run) / 'token'}"
        console.print(f"to add a machine: {command}", soft_wrap=True, markup=False)


def make_console() -> Any:
    """Standard output; wide where it is no terminal, so that nothing is folded in a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _looks(run: str | None) -> list[Any]:
    """A `Status` of each plain run, a `Look` of each swarm."""
    from tpuswarm.swarm.status import look
    from tpuswarm.train.listing import find_run, list_runs, status
    from tpuswarm.train.run import read_config

    found: list[Any] = []
    for folder in [Path(find_run(run))] if run else list_runs():
        try:
            found.append(look(folder) if "swarm" in read_config(folder) else status(folder))
        except InputError as error:
            if run:
                raise
            typer.echo(f"not shown: {error}", err=True)
    return found


def _watch(run: str | None) -> None:
    from rich.live import Live

    console = make_console()
    with Live(console=console, auto_refresh=False) as live:
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

    from tpuswarm.swarm.status import Look
    from tpuswarm.train.listing import used
    from tpuswarm.train.live import STATES

    if not run:
        shown = found if height is None else found[: height - 2]
        more = [Text(f"and {len(found) - len(shown):,} used earlier")] if len(found) > len(shown) else []
        return Group(_table(shown, width), *more)
    [each] = found
    state = f"running, pid {each.pid}" if each.pid else f"{each.state} {age(time.time() - used(Path(each.run)))} ago"
    said = [Text(f"{state}{': ' if each.message else ''}{each.message}", STATES.get(each.state, ""))]
    if not isinstance(each, Look):
        return Group(_plain(each, width), *said)
    silent = time.time() - each.status.time
    if each.pid and silent > SILENT:
        lost = f"no update for {silent:.0f} s: process {each.pid} does not respond, and this status is that old"
        said.append(Text(lost, style="red"))
    return Group(_swarm(each, width, height and height - len(said)), *said)


def _plain(seen: "Status", width: int) -> Any:
    from tpuswarm.train.display import Picture, draw

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
    return draw(picture, seen.elapsed, width)


def _swarm(look: "Look", width: int, height: int | None) -> Any:
    from tpuswarm.swarm.drawing import About, draw

    about = About(look.recipe, look.run, look.tokens_per_step, look.unit, ended=look.state != "running")
    return draw(about, look.status, (), width, height)


def _table(found: list[Any], width: int) -> Any:
    from tpuswarm.train.listing import used
    from tpuswarm.train.live import Column, table

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
            "now" if each.state == "running" else age(time.time() - used(Path(each.run))),
            f"{each.step:,}/{each.steps:,}",
            f"{each.tokens:,}",
            significant(each.loss),
            significant(each.eval_loss),
            f"{each.tokens_per_s:,.0f} {each.unit}/s" if each.tokens_per_s else "",
        )
        for each in found
    ]
    return table(columns, rows, width)


def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0: always the most likely token; 1: the model's own distribution.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Another seed gives another text.")] = 0,
    as_json: Json = False,
) -> None:
    """Generate text with a trained model."""
    from tpuswarm.config.limits import check

    check_number(tokens, "tokens", least=1)
    check_number(temperature, "temperature", least=0)
    check({"seed": seed})
    loaded = load(run, None)
    with waiting("generating"):
        text = loaded.recipe.sample(loaded.state, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        print(json.dumps({"run": str(loaded.folder), "step": loaded.step, "prompt": prompt, "text": text}))
    else:
        print(prompt + text)


def evaluate(
    run: Run,
    data: Annotated[str | None, typer.Option(help="Use all of this data instead of the run's held-out part.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the loss of a trained model on data."""
    loaded = load(run, data)
    from tpuswarm.train.evaluate import evaluate as measure
    from tpuswarm.train.user_code import blame

    with blame(f"the data of {loaded.recipe.name} failed"), waiting("reading the data"):
        source: Any = loaded.recipe.data("all" if data else "validation")
    if getattr(source, "rows_per_epoch", None) is None:
        raise InputError(f"the data of {loaded.recipe.name} has no rows_per_epoch, so evaluation would never end")
    devices = loaded.placed.mesh.size
    batch = -(-loaded.config["train"]["batch"] // devices) * devices
    with waiting("evaluating") as far:
        found = measure(loaded.placed, loaded.state, source, batch, far=far)
    assert found is not None
    values, rows = found
    if as_json:
        print(json.dumps({"run": str(loaded.folder), "step": loaded.step, "rows": rows, **values}))
    else:
        shown = ", ".join(f"{name} {significant(value)}" for name, value in values.items())
        print(f"{loaded.folder} at step {loaded.step:,}: {shown} over {rows:,} rows of {data or 'the held-out data'}")


def load(run: str, data: str | None) -> Any:
    """A run's newest state on all devices, with `data` in the place of its own."""
    from tpuswarm.train import platform
    from tpuswarm.train.listing import find_run
    from tpuswarm.train.run import read_config

    folder = Path(find_run(run))
    swarm = "swarm" in read_config(folder)
    platform.load_jax()
    from tpuswarm.swarm.load import load_swarm
    from tpuswarm.train.load import load_run

    with waiting(f"reading {folder}"):
        read = load_swarm if swarm else load_run
        loaded = read(folder, platform.local_devices(), {"data": data} if data else None)
    for note in loaded.notes:
        typer.echo(note, err=True)
    return loaded
