"""`tpuswarm train --members` and `join`: many members, one model."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.config.formatting import format_figure, token_unit
from tpuswarm.errors import InputError
from tpuswarm.train.hosts.several import PORT
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.swarm.supervision.start import SwarmResult


def print_result(result: "SwarmResult", as_json: bool) -> None:
    """The end of a run on stdout."""
    from tpuswarm.train.run.directory import read_config
    from tpuswarm.train.run.life import stopped_sentence
    from tpuswarm.train.storage.folders import shown as called

    if as_json:
        facts = {"run": called(result.run), "ended": result.ended.how, "message": result.ended.message}
        print(json.dumps({**facts, "version": result.version, "tokens": result.tokens, "metrics": result.metrics}))
        return
    if result.ended.how == "stopped":
        say(stopped_sentence(result.run, result.ended.message))
        return
    shown = "".join(
        f", {text} {format_figure(result.metrics[name])}"
        for name, text in (("loss", "training loss"), ("eval_loss", "held-out loss"))
        if result.metrics.get(name) is not None
    )
    run = called(result.run)
    counted = f"{result.tokens:,} {token_unit(read_config(result.run)['chosen']['tokens_per_row'])}"
    say(f"{run} finished at commit {result.version}: {counted}{shown}; {result.run / 'report.html'}")


def join(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS|RUN", help="HOST:PORT, as printed by `train --members`; or gs://….")
    ],
    token_file: Annotated[Path, typer.Option("--token-file", help="A copy of the file `token` in the run's folder.")],
    hosts: Annotated[
        int | None, typer.Option(help="Hosts that form one member, such as a slice's; run this on each.")
    ] = None,
    host: Annotated[int | None, typer.Option(help="Number of this host, from 0.")] = None,
    hosts_at: Annotated[str | None, typer.Option(help="Address of host 0, HOST:PORT.")] = None,
    name: Annotated[str | None, typer.Option(help="What the swarm calls this machine. Default: its own name.")] = None,
    of_machine: Annotated[
        bool, typer.Option("--of-machine", help="Ask Google's metadata server for the name and the hosts of a slice.")
    ] = False,
    ports: Annotated[
        str | None, typer.Option("--ports", metavar="FIRST-LAST", help="TCP ports on which Ray listens. Default: any.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a step here: the run's batch, or what divides it.")
    ] = None,
) -> None:
    """Join a running swarm with this machine, until Ctrl-C or the end of the run.

    A run in a bucket is followed to whichever machine its head is on.
    """
    from tpuswarm.swarm.engines.ports import parse_ports
    from tpuswarm.swarm.member.group import Group
    from tpuswarm.swarm.supervision.join import join as join_swarm
    from tpuswarm.swarm.supervision.join import join_run
    from tpuswarm.train.storage.folders import is_url

    if of_machine:
        from tpuswarm.swarm.engines.notice import machine_here

        here = machine_here()
        name, many = name or here.name, len(here.hosts) > 1
        hosts, host, hosts_at = (
            (len(here.hosts), here.number, f"{here.hosts[0]}:{PORT}") if many else (None, None, None)
        )
    listens = parse_ports(ports)
    options = {"--hosts": hosts, "--host": host, "--hosts-at": hosts_at}
    missing = [name for name, value in options.items() if value is None]
    group = None
    if hosts is not None and host is not None and hosts_at is not None:
        group = Group(hosts_at, hosts, host, str(token_file.resolve()))
    elif len(missing) < len(options):
        raise InputError(f"a member of several hosts also needs {' and '.join(missing)}")
    if is_url(address):
        join_run(address, name, group, token_file, lambda text: say(text, err=True), listens, batch)
        return
    join_swarm(address, name, group, token_file, lambda text: say(text, err=True), listens, batch)
