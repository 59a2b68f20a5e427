"""`tpuswarm ssh`: run the user's own OpenSSH, and reconnect after a lost connection."""

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
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.attended import line_of
from tpuswarm.remote.host import Host
from tpuswarm.remote.openssh import openssh
from tpuswarm.train.process.terminal import say, settle

CONNECTION_LOST = 255
"""Exit code of OpenSSH if the connection failed, and not the command."""
SHELL = 'if command -v tmux >/dev/null && tmux new-session -A -s tpuswarm; then exit; fi; exec "${SHELL:-/bin/bash}" -l'
"""A plain shell without tmux, or if tmux does not know this terminal."""
MAX_BACKOFF_S = 15.0


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
    line = line_of(words) if words else SHELL if is_shell else ""
    with tempfile.TemporaryDirectory() as folder:
        connected = Path(folder) / "connected"
        pause_s = 1.0
        while True:
            code = _run_openssh(routes, host, line, connected)
            if code != CONNECTION_LOST or not is_shell or not connected.exists():
                raise typer.Exit(code)
            say(f"connection to {host.label} lost; reconnecting until Ctrl-C", err=True)
            time.sleep(pause_s)
            pause_s = min(MAX_BACKOFF_S, 2 * pause_s)
            try:
                host = _find_host(routes, name)
            except TpuswarmError as error:
                say(f"{error}; retrying", err=True)


def _find_host(routes: Routes, name: str) -> Host:
    hosts, _ = routes.hosts(name if "/" in name else f"{name}/0")
    return hosts[0]


def _run_openssh(routes: Routes, host: Host, line: str, connected: Path) -> int:
    words = openssh(host, routes.key)
    if sys.stdin.isatty():
        words += ["-t"]
    settle()
    words += ["-o", "PermitLocalCommand=yes", "-o", f"LocalCommand=touch {connected}", "-o", "LogLevel=ERROR"]
    return subprocess.call([*words, f"{host.user}@{host.address}", *([line] if line else [])])
