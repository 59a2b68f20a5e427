"""`tpuswarm status`, `sample`, `evaluate`: looking at runs."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.swarm.status import Look

PIPE_WIDTH = 240
"""Columns of a file or a pipe."""
SILENT = 10.0
"""Seconds without a new status.json after which a swarm that lives is not well."""
Run = Annotated[str, typer.Argument(help="A run's directory, its name in ./runs, or `last`.")]
Json = Annotated[bool, typer.Option("--json", help="One object on stdout.")]


def status(
    run: Annotated[str | None, typer.Argument(help="A run's directory, its name in ./runs, or `last`.")] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Every second, until the run ends.")] = False,
) -> None:
    """Show a run, or without RUN all of them in ./runs: state, step, loss, tokens/s; of a swarm also its members."""
    if watch and as_json:
        raise InputError("--watch draws a table again and again, --json prints one object: use one of them")
    if watch:
        _watch(run)
        return
    found = _looks(run)
    from tpuswarm.train.run import Status

    if as_json:
        objects = [asdict(each) if isinstance(each, Status) else each.json() for each in found]
        print(json.dumps(objects[0] if run else {"runs": objects}))
        return
    if not found:
        print("no runs in ./runs; start one with `tpuswarm train gpt2-tiny`")
        return
    make_console().print(_drawn(found, run))


def make_console() -> Any:
    """Standard output; wide where it is no terminal, so that nothing is folded in a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _looks(run: str | None) -> list[Any]:
    """A `Status` of each plain run, a `Look` of each swarm."""
    from tpuswarm.swarm.status import look
    from tpuswarm.train.run import find_run, list_runs, read_config, status

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

    with Live(_drawn(_looks(run), run), console=make_console(), auto_refresh=False) as live:
        while True:
            found = _looks(run)
            live.update(_drawn(found, run), refresh=True)
            if all(each.state != "running" for each in found):
                return
            time.sleep(1)


def _drawn(found: list[Any], run: str | None) -> Any:
    """A table of all; of one that was asked for also its message and, of a swarm, its members and alarms."""
    from rich.console import Group
    from rich.text import Text

    from tpuswarm.swarm.status import Look

    parts = [_table(found)]
    if run:
        [each] = found
        parts += [Text(each.message)] if each.message else []
        parts += _swarm(each) if isinstance(each, Look) else []
    return Group(*parts)


def _swarm(look: "Look") -> list[Any]:
    from rich.text import Text

    from tpuswarm.swarm.runtime.screen import facts_table, members_table

    silent = time.time() - look.status.time
    said = [f"alarm: {each}" for each in look.status.alarms]
    if look.pid and silent > SILENT:
        said.append(f"no news for {silent:.0f} s: process {look.pid} does not answer, and what is shown is that old")
    return ["", facts_table(look.status), "", members_table(look.status), *(Text(each, style="red") for each in said)]


def _table(found: list[Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("run", "recipe", "state", "step", "tokens", "loss", "held-out loss", "tokens/s"):
        table.add_column(name, justify="left" if name in ("run", "recipe", "state") else "right")
    for each in found:
        losses = ["–" if value is None else f"{value:.4f}" for value in (each.loss, each.eval_loss)]
        speed = "–" if each.tokens_per_s is None else f"{each.tokens_per_s:,.0f}"
        state = f"running, pid {each.pid}" if each.pid else each.state
        table.add_row(each.run, each.recipe, state, f"{each.step:,}/{each.steps:,}", f"{each.tokens:,}", *losses, speed)
    return table


def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 draws as the model says.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Another seed, another sample.")] = 0,
    as_json: Json = False,
) -> None:
    """Let a trained model write."""
    if tokens < 1 or temperature < 0:
        raise InputError(f"tokens must be above 0 and temperature not below 0, not {tokens} and {temperature}")
    loaded = load(run, None)
    text = loaded.recipe.sample(loaded.state, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        print(json.dumps({"run": run, "step": loaded.step, "prompt": prompt, "text": text}))
    else:
        print(prompt + text)


def evaluate(
    run: Run,
    data: Annotated[str | None, typer.Option(help="All of this data; without it, the run's held-out part.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a trained model on data."""
    loaded = load(run, data)
    from tpuswarm.train.evaluate import evaluate as measure
    from tpuswarm.train.user_code import blame

    with blame(f"the data of {loaded.recipe.name} failed"):
        source: Any = loaded.recipe.data("all" if data else "validation")
    if getattr(source, "rows_per_epoch", None) is None:
        raise InputError(f"the data of {loaded.recipe.name} has no rows_per_epoch, so no end to evaluate to")
    devices = loaded.placed.mesh.size
    batch = -(-loaded.config["train"]["batch"] // devices) * devices
    found = measure(loaded.placed, loaded.state, source, batch)
    assert found is not None
    values, rows = found
    if as_json:
        print(json.dumps({"run": run, "step": loaded.step, "rows": rows, **values}))
    else:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"{run} at step {loaded.step}: {shown} over {rows:,} rows of {data or 'the held-out data'}")


def load(run: str, data: str | None) -> Any:
    """A run's newest state on all devices, with `data` in the place of its own."""
    from tpuswarm.swarm.load import is_swarm, load_swarm
    from tpuswarm.train import platform
    from tpuswarm.train.load import load_run
    from tpuswarm.train.run import find_run

    folder = Path(find_run(run))
    read = load_swarm if is_swarm(folder) else load_run
    loaded = read(folder, platform.local_devices(), {"data": data} if data else None)
    for note in loaded.notes:
        typer.echo(note, err=True)
    return loaded
