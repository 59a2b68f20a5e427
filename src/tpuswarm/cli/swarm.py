"""`tpuswarm train --members` and `join`: many members, one model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.config.shown import significant
from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.swarm.runtime.start import SwarmResult


def print_result(result: "SwarmResult", as_json: bool) -> None:
    """The end of a run on stdout."""
    from tpuswarm.train.run import stopped_sentence

    if as_json:
        facts = {"run": str(result.run), "ended": result.ended.how, "message": result.ended.message}
        print(json.dumps({**facts, "version": result.version, "tokens": result.tokens, "metrics": result.metrics}))
        return
    if result.ended.how == "stopped":
        print(stopped_sentence(result.run, result.ended.message))
        return
    shown = "".join(
        f", {text} {significant(result.metrics[name])}"
        for name, text in (("loss", "training loss"), ("eval_loss", "held-out loss"))
        if result.metrics.get(name) is not None
    )
    end = f"{result.run} finished at commit {result.version}: {result.tokens:,} tokens"
    print(f"{end}{shown}; {result.run / 'report.html'}")


def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT, as printed by `train --members`.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="A copy of the file `token` in the run's folder.")],
    hosts: Annotated[
        int | None, typer.Option(help="Hosts that form one member, such as a slice's; run this on each.")
    ] = None,
    host: Annotated[int | None, typer.Option(help="Number of this host, from 0.")] = None,
    hosts_at: Annotated[str | None, typer.Option(help="Address of host 0, HOST:PORT.")] = None,
) -> None:
    """Join a running swarm with this machine, until Ctrl-C or the end of the run."""
    from tpuswarm.swarm.runtime.group import Group
    from tpuswarm.swarm.runtime.join import join as join_swarm

    options = {"--hosts": hosts, "--host": host, "--hosts-at": hosts_at}
    missing = [name for name, value in options.items() if value is None]
    group = None
    if hosts is not None and host is not None and hosts_at is not None:
        group = Group(hosts_at, hosts, host, str(token_file.resolve()))
    elif len(missing) < len(options):
        raise InputError(f"a member of several hosts also needs {' and '.join(missing)}")
    join_swarm(address, group, token_file, lambda text: typer.echo(text, err=True))
