"""`tpuswarm join`: join a running swarm with this machine."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tpuswarm.errors import InputError
from tpuswarm.train.hosts.host_group import PORT
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.storage.folders import is_url

INVITE, INVITE_PREFIX = "TPUSWARM_INVITE", "tps1-"
"""Variable with an invite, and how one begins."""


def join(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="INVITE|ADDRESS|RUN",
            help="An invite (tps1-…, or in TPUSWARM_INVITE, or - for stdin); HOST:PORT, as `train` prints it; gs://….",
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A copy of the file `token` in the run's folder; not with an invite.")
    ] = None,
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
    hours: Annotated[
        float | None,
        typer.Option(min=0.1, help="With an invite: hours that this machine stays; its last work is pushed before."),
    ] = None,
    role: Annotated[
        Literal["member", "aggregators", "both"],
        typer.Option(help="What may run here; aggregators need a run in a bucket, and access to it."),
    ] = "member",
) -> None:
    """Join a running swarm with this machine, until Ctrl-C or the end of the run.

    A run in a bucket is followed to whichever machine its head is on.
    """
    if address is not None and address.startswith(INVITE_PREFIX):
        _hide(address)
    address = address or os.environ.pop(INVITE, None)
    if address is None:
        raise InputError("name what to join: an invite, an address or a run; `-` reads an invite from stdin")
    if address == "-":
        address = sys.stdin.readline().strip()
        if not address.startswith(INVITE_PREFIX):
            raise InputError(f"the first line of stdin is no invite, which begins with {INVITE_PREFIX}")
    if address.startswith(INVITE_PREFIX):
        others = [token_file, hosts, host, hosts_at, ports, of_machine, role != "member"]
        _join_by_invite(address, name, batch, hours, others)
        return
    if hours is not None:
        raise InputError("--hours is for joining with an invite")
    if token_file is None:
        raise InputError(
            f"{address} is no invite (they begin with {INVITE_PREFIX}); to join by address, copy the file `token` of "
            "the run's folder here and name it with --token-file"
        )
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


def _join_by_invite(invite: str, name: str | None, batch: int | None, hours: float | None, others: list[Any]) -> None:
    from tpuswarm.swarm.anywhere.join import join_by_invite

    if any(others):
        raise InputError("with an invite, join takes only --name, --batch and --hours; the invite replaces all others")
    join_by_invite(invite, name, batch, hours, lambda text: echo(text, err=True))


def _hide(invite: str) -> None:
    """Start this command again without the invite in its arguments, which all users of a machine can list."""
    os.environ[INVITE] = invite
    words = [word for word in sys.argv[1:] if word != invite]
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tpuswarm", *words])
