"""`tpuswarm ssh`, `forward` and `ssh-config`: reach machines with OpenSSH and other programs."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.console import FleetOption
from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.hosts.ssh_config import config_file, host_alias, render_config
from tpuswarm.fleet.hosts.targets import find_targets
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote import forward as forwarding
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host, openssh_command
from tpuswarm.remote.paths import command_line, in_environment
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.stop import end_quietly
from tpuswarm.train.process.terminal import clear_temporary_line, echo

CONNECTION_LOST = 255
"""Exit code of OpenSSH if the connection failed, and not the command."""
SHELL = 'if command -v tmux >/dev/null && tmux new-session -A -s tpuswarm; then exit; fi; exec "${SHELL:-/bin/bash}" -l'
"""A plain shell without tmux, or if tmux does not know this terminal."""
MAX_BACKOFF_S = 15.0
CONFIG_LINE = "Include ~/.ssh/tpuswarm.d/*.config"


def ssh(
    name: Annotated[str, typer.Argument(metavar="NAME[/WORKER]", help="A machine; without a worker its first.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[-- CMD]", help="Instead of a shell.")] = None,
    fleet: FleetOption = None,
) -> None:
    """Log in to a machine with your own OpenSSH: in tmux, if it is installed, so that the session survives.

    Reconnects after a lost connection, also if the machine has a new address.
    """
    if shutil.which("ssh") is None:
        raise InputError("`tpuswarm ssh` needs OpenSSH; install openssh-client")
    routes = open_routes(find_fleet(fleet)[0])
    host = _find_host(routes, name)
    is_shell = not words and sys.stdin.isatty()
    line = in_environment(command_line(words)) if words else SHELL if is_shell else ""
    with tempfile.TemporaryDirectory() as folder:
        connected = Path(folder) / "connected"
        pause_s = 1.0
        while True:
            code = _run_openssh(routes, host, line, connected)
            if code != CONNECTION_LOST or not is_shell or not connected.exists():
                raise typer.Exit(code)
            echo(f"connection to {host.label} lost; reconnecting until Ctrl-C", err=True)
            time.sleep(pause_s)
            pause_s = min(MAX_BACKOFF_S, 2 * pause_s)
            try:
                host = _find_host(routes, name)
            except TpuswarmError as error:
                echo(f"{error}; retrying", err=True)


def _find_host(routes: Routes, name: str) -> Host:
    hosts, _ = routes.hosts(name if "/" in name else f"{name}/0")
    return hosts[0]


def _run_openssh(routes: Routes, host: Host, line: str, connected: Path) -> int:
    words = openssh_command(host, routes.key)
    if sys.stdin.isatty():
        words += ["-t"]
    clear_temporary_line()
    words += ["-o", "PermitLocalCommand=yes", "-o", f"LocalCommand=touch {connected}", "-o", "LogLevel=ERROR"]
    return subprocess.call([*words, f"{host.user}@{host.address}", *([line] if line else [])])


def forward(
    name: Annotated[str, typer.Argument(help="A machine, or NAME/2 for one of its workers.")],
    port: Annotated[
        str, typer.Argument(metavar="PORT[:PORT]", help="The local port, and the remote one if it differs.")
    ],
    fleet: FleetOption = None,
) -> None:
    """Forward a port of a machine to this computer until Ctrl-C, from loopback to loopback. Reconnects by itself."""
    local, remote = forwarding.parse_ports(port)
    end_quietly()
    routes = open_routes(find_fleet(fleet)[0])

    async def find() -> Host:
        return await asyncio.to_thread(find_one_host, routes, name)

    async def run() -> None:
        async with Connections(routes.key) as connections:
            await forwarding.forward(connections, find, local, remote, echo)

    asyncio.run(run())


def find_one_host(routes: Routes, name: str) -> Host:
    """Return the named worker, or the machine's first. Raises InputError for several machines."""
    hosts, _ = routes.hosts(name)
    if len(machines := sorted({host.label.partition("/")[0] for host in hosts})) > 1:
        raise InputError(f"{name} is {len(machines)} machines; name one, such as {machines[0]}")
    return hosts[0]


def ssh_config(fleet: FleetOption = None) -> None:
    """Write an ssh config with which VS Code, rsync, scp and ssh find every machine, even after a preemption."""
    routes = open_routes(find_fleet(fleet)[0])
    snapshot = routes.snapshot()
    users = routes.users(snapshot)
    file = config_file(routes.fleet)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, render_config(routes.fleet, routes.key, users), is_shared=True)
    for reason in find_targets("all", snapshot.document.desired, snapshot.listing).away:
        echo(f"not now: {reason}")
    count = f"{len(users)} host{'s' * (len(users) != 1)}"
    echo(f"wrote {file} with {count}; later commands update it when machines come and go")
    user_config = file.parent.parent / "config"
    if not user_config.exists() or CONFIG_LINE not in user_config.read_text(encoding="utf-8").splitlines():
        echo(f"add this line once, at the top of {user_config}: `{CONFIG_LINE}`")
    label = next(iter(users))
    echo(f"then: `ssh {label}`, `scp FILE {host_alias(label)}:` (for scp, rsync and VS Code with a dot for the slash)")
