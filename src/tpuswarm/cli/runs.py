"""`tpuswarm status`, `sample`, `evaluate`: looking at runs."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm.errors import InputError

Run = Annotated[str, typer.Argument(help="A run's directory, its name in ./runs, or `last`.")]
Json = Annotated[bool, typer.Option("--json", help="One object on stdout.")]


def status(
    run: Annotated[str | None, typer.Argument(help="A run's directory, its name in ./runs, or `last`.")] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Every second, until the run ends.")] = False,
) -> None:
    """Show a run, or without RUN all of them in ./runs: state, step, loss, tokens/s."""
    if watch and as_json:
        raise InputError("--watch draws a table again and again, --json prints one object: use one of them")
    if watch:
        _watch(run)
        return
    found = _statuses(run)
    if as_json:
        print(json.dumps(found[0] if run else {"runs": found}))
        return
    if not found:
        print("no runs in ./runs; start one with `tpuswarm train gpt2-tiny`")
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table(found))
    for message in (each["message"] for each in found if run and each["message"]):
        console.print(message, markup=False, soft_wrap=True)


def _statuses(run: str | None) -> list[dict[str, Any]]:
    from tpuswarm.train.run import find_run, list_runs, status

    return [asdict(status(folder)) for folder in ([find_run(run)] if run else list_runs())]


def _watch(run: str | None) -> None:
    from rich.console import Console
    from rich.live import Live

    with Live(_table(_statuses(run)), console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            found = _statuses(run)
            live.update(_table(found), refresh=True)
            if all(each["state"] != "running" for each in found):
                return
            time.sleep(1)


def _table(found: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("run", "recipe", "state", "step", "tokens", "loss", "held-out loss", "tokens/s"):
        table.add_column(name, justify="left" if name in ("run", "recipe", "state") else "right")
    for each in found:
        losses = ["–" if each[name] is None else f"{each[name]:.4f}" for name in ("loss", "eval_loss")]
        speed = "–" if each["tokens_per_s"] is None else f"{each['tokens_per_s']:,.0f}"
        state = f"running, pid {each['pid']}" if each["pid"] else each["state"]
        steps = f"{each['step']:,}/{each['steps']:,}"
        table.add_row(each["run"], each["recipe"], state, steps, f"{each['tokens']:,}", *losses, speed)
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
    loaded = _load(run, None)
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
    loaded = _load(run, data)
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


def _load(run: str, data: str | None) -> Any:
    from tpuswarm.train import platform
    from tpuswarm.train.load import load_run
    from tpuswarm.train.run import find_run

    loaded = load_run(Path(find_run(run)), platform.local_devices(), {"data": data} if data else None)
    for note in loaded.notes:
        typer.echo(note, err=True)
    return loaded
