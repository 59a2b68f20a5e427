"""`tpuswarm logs` and `stop`: what a run says, and its end."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.fleet.core.jobs import Job
    from tpuswarm.fleet.keeping.fleets import Fleet

LOOK = 0.5
"""Seconds between two looks at a run's files."""
PATIENCE = 60.0
"""Seconds after which a run that was asked to stop should have."""


RunOrJob = Annotated[str, typer.Argument(metavar="RUN|JOB", help="A run's directory, its name, `last`; or a job.")]


def logs(
    run: RunOrJob,
    name: Annotated[str | None, typer.Argument(help="Only this process: coordinator, aggregator-0, m0, …")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
) -> None:
    """Show what happened in a run, in words, and what its processes printed; or what a job printed on its machines."""
    if found_job := _job(run):
        from tpuswarm.cli.job_logs import show_logs

        fleet, job = found_job
        if name is not None:
            raise InputError(f"{run} is a job, which has no processes with names")
        show_logs(fleet, job, follow)
        return
    from tpuswarm.swarm.logs import Logs
    from tpuswarm.train.listing import find_run
    from tpuswarm.train.run import holder, read_config

    folder = Path(find_run(run))
    read_config(folder)
    found = Logs(folder, name)
    if found.elsewhere:
        print(f"this is what the run knows about {name}; its own log is on its machine, in Ray's logs", file=sys.stderr)
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


def _job(name: str) -> "tuple[Fleet, Job] | None":
    """The job that is meant; None: a run is. Raises InputError where it may be both."""
    from tpuswarm.cloud.errors import CloudError
    from tpuswarm.train.listing import find_run

    if "/" in name or name == "last":
        return None
    from tpuswarm.cli.jobs import find_job

    is_run = Path(find_run(name)).exists()
    try:
        found = find_job(name)
    except CloudError:
        if not is_run:
            raise
        return None  # whether there is a job of that name cannot be asked, and there is a run
    if found is None:
        return None
    if is_run:
        raise InputError(f"{name} is a run and a job: say ./{name} or runs/{name} for the run, or rename its folder")
    return found[0], found[2]


def stop(run: RunOrJob) -> None:
    """Stop a running run as Ctrl-C does, or a job on all of its machines, and wait until it has stopped."""
    if found_job := _job(run):
        from tpuswarm.cli.jobs import stop_job

        stop_job(*found_job)
        return
    from tpuswarm.swarm.logs import RUN, Logs
    from tpuswarm.train.listing import find_run
    from tpuswarm.train.run import holder, read_config, read_life, removed_sentence, stopped_sentence

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
        raise InputError(f"{folder} is used by process {pid} of another user, who has to stop it") from error
    except ProcessLookupError:  # it has ended meanwhile
        pass
    print(f"asked process {pid} to stop", file=sys.stderr)
    asked, warned = time.monotonic(), False
    with waiting("waiting until it has stopped"):
        while holder(folder) is not None:
            time.sleep(LOOK)
            for line in happened.new():
                if line.source == RUN:
                    print(line.text, file=sys.stderr)
            if time.monotonic() - asked > PATIENCE and not warned:
                warned = True
                print(f"still running; `kill -9 {pid}` ends it at once, and nothing committed is lost", file=sys.stderr)
    if not folder.exists():
        print(removed_sentence(folder))
        return
    life = read_life(folder)
    if life.state not in ("stopped", "finished"):
        raise RunFailed(f"{folder} {life.state}{': ' if life.message else ''}{life.message}")
    said = life.message or life.state
    print(stopped_sentence(folder, said) if life.state == "stopped" else f"{folder}: {said}")
