"""`tpuswarm ssh`: the user's own OpenSSH in the foreground, started again when its connection was lost."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.train.process.terminal import say, settle

if TYPE_CHECKING:
    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.remote.host import Host

LOST = 255
"""Exit code of OpenSSH where the connection, not the command, has failed."""
SHELL = 'if command -v tmux >/dev/null && tmux new-session -A -s tpuswarm; then exit; fi; exec "${SHELL:-/bin/bash}" -l'
"""A plain shell where there is no tmux, or where it does not know this terminal."""
LONGEST = 15.0
"""Seconds between two tries to come back, at most."""


def log_in(name: str, words: list[str], fleet: str | None) -> int:
    """A shell, or a command, on a worker; its exit code."""
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.store import fleets
    from tpuswarm.remote.attended import line_of

    if shutil.which("ssh") is None:
        raise InputError("`tpuswarm ssh` uses OpenSSH, and there is no program ssh here: install openssh-client")
    routes = open_routes(fleets.find_fleet(fleet)[0])
    host = _host(routes, name)
    shell = not words and sys.stdin.isatty()
    line = line_of(words) if words else SHELL if shell else ""
    with tempfile.TemporaryDirectory() as folder:
        reached = Path(folder) / "reached"
        pause = 1.0
        while True:
            code = _once(routes, host, line, reached)
            if code != LOST or not shell or not reached.exists():
                return code
            say(f"the connection to {host.label} is lost; it is made again until Ctrl-C", err=True)
            time.sleep(pause)
            pause = min(LONGEST, 2 * pause)
            host = _back(routes, name, host)


def _host(routes: "Routes", name: str) -> "Host":
    """The one that is meant; of a slice its first worker."""
    hosts, _ = routes.hosts(name if "/" in name else f"{name}/0")
    return hosts[0]


def _back(routes: "Routes", name: str, host: "Host") -> "Host":
    """Where it is now; where it was, as long as that cannot be told."""
    try:
        return _host(routes, name)
    except TpuswarmError as error:
        say(f"{error}; tried again", err=True)
        return host


def _once(routes: "Routes", host: "Host", line: str, reached: Path) -> int:
    from tpuswarm.remote.openssh import openssh

    words = openssh(host, routes.key)
    if sys.stdin.isatty():
        words += ["-t"]
    settle()
    words += ["-o", "PermitLocalCommand=yes", "-o", f"LocalCommand=touch {reached}", "-o", "LogLevel=ERROR"]
    return subprocess.call([*words, f"{host.user}@{host.address}", *([line] if line else [])])
