"""`tpuswarm train --members` and `join`: many members, one model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.swarm.runtime.start import SwarmResult
    from tpuswarm.train.recipe import Recipe


def train_swarm(
    recipe: "Recipe",
    swarm: dict[str, Any],
    asked: dict[str, Any],
    tokens: int | None,
    epochs: float | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Train as a swarm; ends the command with 128 + N where signal N stopped it."""
    from tpuswarm.swarm.runtime.start import Asked, train

    result = train(recipe, Asked(**swarm), asked, tokens, epochs, folder)
    print_result(result, as_json)
    if result.ended.signal is not None:
        raise typer.Exit(128 + result.ended.signal)


def print_result(result: "SwarmResult", as_json: bool) -> None:
    """The end of a run on stdout."""
    if as_json:
        facts = {"run": str(result.run), "ended": result.ended.how, "message": result.ended.message}
        print(json.dumps({**facts, "version": result.version, "tokens": result.tokens, "metrics": result.metrics}))
        return
    shown = "".join(
        f", {text} {result.metrics[name]:.4f}"
        for name, text in (("loss", "loss"), ("eval_loss", "held-out loss"))
        if result.metrics.get(name) is not None
    )
    report = f"; {result.run / 'report.html'}" if result.ended.how == "finished" else ""
    print(f"{result.run} {result.ended.how} at version {result.version}: {result.tokens:,} tokens{shown}{report}")


def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT, as `train --members` says it.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="A copy of the file `token` in the run's folder.")],
    hosts: Annotated[
        int | None, typer.Option(help="Machines that are one member together, as those of a slice; all of them join.")
    ] = None,
    host: Annotated[int | None, typer.Option(help="Which of these this one is, from 0.")] = None,
    hosts_at: Annotated[str | None, typer.Option(help="HOST:PORT where host 0 listens for the other hosts.")] = None,
) -> None:
    """Make this machine a member of a running swarm, until Ctrl-C or the end of the run."""
    from tpuswarm.swarm.runtime.group import Group
    from tpuswarm.swarm.runtime.join import join as join_swarm

    options = {"--hosts": hosts, "--host": host, "--hosts-at": hosts_at}
    missing = [name for name, value in options.items() if value is None]
    group = None
    if hosts is not None and host is not None and hosts_at is not None:
        group = Group(hosts_at, hosts, host, str(token_file.resolve()))
    elif len(missing) < len(options):
        raise InputError(f"a member of several hosts needs {', '.join(options)}: give {' and '.join(missing)} as well")
    join_swarm(address, group, token_file, lambda text: typer.echo(text, err=True))
