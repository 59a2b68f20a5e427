"""`tpuswarm logs` and `stop`: the output of a run, and its end."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.completion import complete_runs
from tpuswarm.cli.console import FleetOption
from tpuswarm.cli.machine.job_logs import show_job_logs, show_machine_logs
from tpuswarm.cli.machine.jobs import find_job, stop_job
from tpuswarm.cli.train.train_fleet import end_train_jobs, find_open_jobs
from tpuswarm.cloud.errors import CloudError
from tpuswarm.config.formatting import printable
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.fleet.hosts.routes import open_routes
from tpuswarm.fleet.hosts.targets import find_targets
from tpuswarm.fleet.store.fleets import Fleet, find_fleet, known_fleets
from tpuswarm.swarm.views.logs import RUN, Logs
from tpuswarm.train.process.computer import computer_id, is_process_alive
from tpuswarm.train.process.stop import end_quietly
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import holder_pid, read_config
from tpuswarm.train.run.life import read_life, removed_sentence, stopped_sentence
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.storage.copy import refresh
from tpuswarm.train.storage.folders import origin, shown
from tpuswarm.train.storage.sync import STOP, owner_elsewhere, send_request

DISK_POLL_INTERVAL_S, BUCKET_POLL_INTERVAL_S = 0.5, 5.0
STOP_OVERDUE_S = 60.0
"""After this time `stop` says how to kill a run that has not stopped."""
LAST_WORDS_S = 5.0
"""How long a process that has released its run may still print how it ended."""


def logs(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|NAME|JOB",
            help="A run's directory or gs:// URL, its name, `last`; a job; a machine: its jobs.",
            autocompletion=complete_runs,
        ),
    ],
    name: Annotated[str | None, typer.Argument(help="Only this process: coordinator, aggregator-0, m0, …")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
    fleet: FleetOption = None,
) -> None:
    """Show what happened in a run, and the output of its processes; or the output of a job on its machines."""
    if follow:
        end_quietly()
    job, machine = _find_job(run, fleet), None
    if job is None:
        machine = _find_machine(run, fleet)
    if (job or machine) and name is not None:
        raise InputError(f"{run} is a {'job' if job else 'machine'}, which has no named processes")
    if job:
        show_job_logs(*job, follow)
    elif machine:
        show_machine_logs(*machine, follow)
    else:
        _show_run_logs(_find_folder(run, fleet), name, follow)


def _show_run_logs(folder: Path, name: str | None, follow: bool) -> None:
    read_config(folder)
    run_logs, process = Logs(folder, name), RunProcess(folder)
    if run_logs.elsewhere:
        echo(f"these are the run's events about {name}; its own log is on its machine, in Ray's logs", err=True)
    has_dates, day = sys.stdout.isatty(), ""  # on a terminal, print a date above its lines
    try:
        while True:
            refresh(folder)
            has_more = follow and process.may_print()
            for line in run_logs.new():
                if has_dates and line.day != day:
                    day = line.day
                    print(day)
                print(printable(line.within_a_day if has_dates else str(line)))
            sys.stdout.flush()
            if not has_more:
                return
            time.sleep(_poll_interval_s(folder))
    except BrokenPipeError:  # the reader, such as `head`, has ended; Python's last flush must not fail either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _poll_interval_s(folder: Path) -> float:
    return DISK_POLL_INTERVAL_S if origin(folder) is None else BUCKET_POLL_INTERVAL_S


class RunProcess:
    """The process of a run, from one poll to the next."""

    def __init__(self, folder: Path):
        self._folder, self._pid, self._seen_at = folder, 0, 0.0

    def may_print(self) -> bool:
        """Return whether it holds the run, or released it moments ago and still lives."""
        if (pid := holder_pid(self._folder)) is not None:
            self._pid, self._seen_at = 0 if owner_elsewhere(self._folder) else pid, time.monotonic()
            return True
        is_alive = bool(self._pid and is_process_alive(computer_id(), self._pid))
        return is_alive and time.monotonic() - self._seen_at < LAST_WORDS_S


def _find_job(name: str, fleet: str | None) -> tuple[Fleet, Job] | None:
    """Return the job of that name. Raises InputError if a run has the name too, unless `fleet` is named."""
    if "/" in name or name == "last":
        return None
    is_run = fleet is None and Path(find_run(name)).exists()
    try:
        job = find_job(name, fleet)
    except CloudError:
        if not is_run:
            raise
        return None
    if job is not None and is_run:
        raise InputError(
            f"{name} is a run and a job. For the run, write ./{name} or runs/{name}; for the job, rename that folder."
        )
    return job


def _find_machine(name: str, fleet_name: str | None) -> tuple[Fleet, str, int | None] | None:
    """Return the machine of the fleet (by default this folder's) that has the name, and its worker.

    Raises InputError for a machine that exists but cannot be reached or belongs to another fleet.
    """
    machine, slash, worker = name.partition("/")
    snapshot = None
    if name == "last" or (slash and not worker.isdecimal()) or not machine:
        return None
    if fleet_name is None and Path(find_run(name)).exists():
        return None
    try:
        fleet, _ = find_fleet(fleet_name)
        if not (fleet.folder / "fleet.json").exists():
            return None
        snapshot = open_routes(fleet).snapshot()
        (target, *others) = find_targets(name, snapshot.document.desired, snapshot.listing).targets
    except (InputError, CloudError):
        if snapshot and any(known.name == machine for known in snapshot.listing.machines):
            raise
        return None
    if any(other.machine.name != target.machine.name for other in others):
        return None  # a pool, or all
    return fleet, target.machine.name, target.worker if slash else None


def _find_folder(name: str, fleet: str | None) -> Path:
    """Return the folder of a run. Beside a swarm.toml, an unknown name may also be a job's or a machine's."""
    if fleet is not None:
        raise InputError(f"fleet {fleet} has no job or machine {name}: `tpuswarm jobs {fleet}` lists its jobs")
    folder = Path(find_run(name))
    fleets = [] if folder.exists() or Path("swarm.toml").exists() else known_fleets()
    if len(fleets) > 1 and "/" not in name and name != "last":
        names = " or ".join(f"--fleet {known.full_name}" for known in fleets[:3])
        raise InputError(f"no run is called {name}; for a job or machine, name its fleet: {names}")
    if not folder.exists() and "/" not in name and Path("swarm.toml").exists():
        raise InputError(
            f"no run, job or machine is called {name}. List them: `tpuswarm status`, `tpuswarm jobs`, `tpuswarm list`"
        )
    return folder


def stop(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|JOB",
            help="A run's directory or gs:// URL, its name, `last`; or a job.",
            autocompletion=complete_runs,
        ),
    ],
    fleet: FleetOption = None,
) -> None:
    """Stop a run as Ctrl-C does, or a job on all its machines, and wait until it has stopped."""
    if job := _find_job(run, fleet):
        stop_job(*job)
        return
    folder = _find_folder(run, fleet)
    pid, url = holder_pid(folder), origin(folder)
    is_here = bool(pid) and owner_elsewhere(folder) is None
    fleet_jobs = find_open_jobs(url) if url and not is_here else None
    if not pid and fleet_jobs and fleet_jobs[1]:
        end_train_jobs(*fleet_jobs)
        echo(f"stopped the jobs that trained {url}")
        return
    if not pid:  # 0: a process is just acquiring the run
        read_config(folder)
        raise InputError(
            f"{shown(folder)} is not running ({read_life(folder).state}). `tpuswarm status` lists the runs."
        )
    run_logs = Logs(folder)
    run_logs.new()
    _request_stop(folder, pid, is_here)
    _wait_until_stopped(folder, pid, is_here, run_logs)
    if fleet_jobs:
        end_train_jobs(*fleet_jobs)
    if folder.exists():
        life = read_life(folder)
        if life.state == "killed" and fleet_jobs:  # its head ended with its job, before it could say so
            echo(f"stopped the jobs that trained {url}")
            return
        if life.state not in ("stopped", "finished"):
            raise RunFailed(f"{shown(folder)} {life.state}{': ' if life.message else ''}{life.message}")
        message = life.message or life.state
        echo(stopped_sentence(folder, message) if life.state == "stopped" else f"{shown(folder)}: {message}")
    else:
        echo(removed_sentence(folder))
    if is_here and url and (fleet_jobs := find_open_jobs(url)):  # last, since it needs the bucket
        end_train_jobs(*fleet_jobs)


def _request_stop(folder: Path, pid: int, is_here: bool) -> None:
    owner = None if is_here else send_request(folder, STOP, "")
    try:
        if owner is None:
            os.kill(pid, signal.SIGINT)
    except PermissionError as error:
        raise InputError(f"{folder} is used by process {pid} of another user. Ask them to stop it.") from error
    except ProcessLookupError:  # it has just ended
        pass
    echo(f"stopping process {pid}{f' on {owner.host}' if owner else ''}", err=True)


def _wait_until_stopped(folder: Path, pid: int, is_here: bool, run_logs: Logs) -> None:
    requested_at, is_warned = time.monotonic(), False
    with waiting("waiting until it has stopped"):
        while holder_pid(folder) is not None:
            time.sleep(DISK_POLL_INTERVAL_S if is_here else BUCKET_POLL_INTERVAL_S)
            if not is_here:
                refresh(folder)
            for line in run_logs.new():
                if line.source == RUN and not line.text.startswith(("stopped", "failed")):
                    echo(line.text, err=True)
            if time.monotonic() - requested_at > STOP_OVERDUE_S and not is_warned:
                is_warned = True
                echo(f"still running. To kill it: `kill -9 {pid}`; nothing committed is lost", err=True)
