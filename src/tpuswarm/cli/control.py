"""`tpuswarm logs` and `stop`: what a run says, and its end."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.runs import Run
from tpuswarm.errors import InputError, RunFailed

LOOK = 0.5
"""Seconds between two looks at a run's files."""
PATIENCE = 60.0
"""Seconds after which a run that was asked to stop should have."""


def logs(
    run: Run,
    name: Annotated[str | None, typer.Argument(help="One process: coordinator, aggregator-0, m0, …")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Show what happened in a run, in words, and what its processes said."""
    from tpuswarm.swarm.logs import Logs
    from tpuswarm.train.run import find_run, holder, read_config

    folder = Path(find_run(run))
    read_config(folder)
    found = Logs(folder, name)
    if found.elsewhere:
        print(f"this is what the run knows of {name}: its own words lie on its machine, in Ray's logs", file=sys.stderr)
    try:
        while True:
            alive = follow and holder(folder) is not None
            for line in found.new():
                print(line)
            sys.stdout.flush()
            if not alive:
                return
            time.sleep(LOOK)
    except BrokenPipeError:  # whoever read has seen enough; nothing may be written at the end either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def stop(run: Run) -> None:
    """Ask a running run to stop as Ctrl-C does, and wait until it has."""
    from tpuswarm.swarm.logs import RUN, Logs
    from tpuswarm.train.run import find_run, holder, read_config, read_life

    folder = Path(find_run(run))
    pid = holder(folder)
    if not pid:  # 0 for a moment, while a process takes the run
        read_config(folder)
        raise InputError(f"{folder} is not running: {read_life(folder).state}; `tpuswarm status` lists the runs")
    happened = Logs(folder)
    happened.new()
    try:
        os.kill(pid, signal.SIGINT)
    except PermissionError as error:
        raise InputError(f"{folder} is held by process {pid} of another user, who has to stop it") from error
    except ProcessLookupError:  # it has ended meanwhile
        pass
    print(f"asked process {pid} to stop", file=sys.stderr)
    asked, warned = time.monotonic(), False
    while holder(folder) is not None:
        time.sleep(LOOK)
        for line in happened.new():
            if line.source == RUN:
                print(line.text, file=sys.stderr)
        if time.monotonic() - asked > PATIENCE and not warned:
            warned = True
            print(f"it goes on; `kill -9 {pid}` ends it at once, and nothing committed is lost", file=sys.stderr)
    if not folder.exists():
        print(f"{folder} is gone: it was stopped before anything came of it")
        return
    life = read_life(folder)
    if life.state not in ("stopped", "finished"):
        raise RunFailed(f"{folder} {life.state}{': ' if life.message else ''}{life.message}")
    more = "; the same `tpuswarm train` command goes on" if life.state == "stopped" else ""
    print(f"{folder}: {life.message or life.state}{more}")
