"""`tpuswarm join`: join a running swarm with this machine."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tpuswarm.errors import InputError
from tpuswarm.train.hosts.host_group import PORT
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.storage.folders import is_url


def join(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS|RUN", help="HOST:PORT, as printed by `train --members`; or gs://….")
    ],
    token_file: Annotated[Path, typer.Option(help="A copy of the file `token` in the run's folder.")],
    hosts: Annotated[
        int | None, typer.Option(help="Hosts that form one member, such as a slice's; run this on each.")
    ] = None,
    host: Annotated[int | None, typer.Option(help="Number of this host, from 0.")] = None,
    hosts_at: Annotated[str | None, typer.Option(help="Address of host 0, HOST:PORT.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this machine in the swarm. Default: its own name.")] = None,
    of_machine: Annotated[
        bool, typer.Option("--of-machine", help="Read the name and the hosts of a slice from Google's metadata server.")
    ] = False,
    ports: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="TCP ports on which Ray listens. Default: any.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a step here: the run's batch, or a divisor.")
    ] = None,
    role: Annotated[
        Literal["member", "aggregators", "both"],
        typer.Option(help="What may run here; aggregators need a run in a bucket, and access to it."),
    ] = "member",
) -> None:
    """Join a running swarm with this machine, until Ctrl-C or the end of the run.

    A run in a bucket is followed to whichever machine its head is on.
    """
    from tpuswarm.swarm.engines.ports import parse_ports
    from tpuswarm.swarm.member.group import Group
    from tpuswarm.swarm.supervision import join as joining

    if of_machine:
        from tpuswarm.train.process.metadata import read_local_machine

        machine = read_local_machine()
        if machine is None:
            raise InputError("no metadata server answers: this machine is not Google's, so omit --of-machine")
        name, count = name or machine.name, len(machine.hosts)
        hosts = host = hosts_at = None
        if count > 1:
            hosts, host, hosts_at = count, machine.number, f"{machine.hosts[0]}:{PORT}"
    ray_ports = parse_ports(ports)
    options = {"--hosts": hosts, "--host": host, "--hosts-at": hosts_at}
    missing = [option for option, value in options.items() if value is None]
    group = None
    if hosts is not None and host is not None and hosts_at is not None:
        group = Group(hosts_at, hosts, host, str(token_file.resolve()))
    elif len(missing) < len(options):
        raise InputError(f"a member of several hosts also needs {' and '.join(missing)}")
    if role == "aggregators" and (group or batch):
        raise InputError("--role aggregators has no member here: omit --hosts and --batch")
    start = joining.join_run if is_url(address) else joining.join
    start(address, name, group, token_file, lambda text: echo(text, err=True), ray_ports, batch, role)
