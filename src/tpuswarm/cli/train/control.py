"""`tpuswarm logs` and `stop`: what a run says, and its end."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.fleet.decide.jobs import Job
    from tpuswarm.fleet.store.fleets import Fleet

LOOK, LOOK_FAR = 0.5, 5.0
"""Seconds between two looks at a run's files: on this disk, and in a bucket."""
PATIENCE = 60.0
"""Seconds after which a run that was asked to stop should have."""
PARTING = 5.0
"""Seconds that a process has to say how it ended, once it has let go of its run."""


RunOrJob = Annotated[str, typer.Argument(metavar="RUN|JOB", help="A run's directory, its name, `last`; or a job.")]


def logs(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN|NAME|JOB", help="A run's directory, its name, `last`; a job; a machine: its jobs."),
    ],
    name: Annotated[str | None, typer.Argument(help="Only this process: coordinator, aggregator-0, m0, …")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
) -> None:
    """Show what happened in a run, and what its processes printed; or what a job printed on its machines."""
    if found_job := _job(run):
        from tpuswarm.cli.machine.job_logs import show_logs

        fleet, job = found_job
        if name is not None:
            raise InputError(f"{run} is a job, which has no processes with names")
        show_logs(fleet, job, follow)
        return
    if found_machine := _machine(run):
        from tpuswarm.cli.machine.job_logs import show_machine_logs

        if name is not None:
            raise InputError(f"{run} is a machine, which has no processes with names")
        show_machine_logs(*found_machine, follow)
        return
    from tpuswarm.swarm.views.logs import Logs
    from tpuswarm.train.run.directory import read_config
    from tpuswarm.train.storage.copy import refresh
    from tpuswarm.train.storage.folders import origin

    folder = _folder(run)
    read_config(folder)
    found, speaker = Logs(folder, name), Speaker(folder)
    if found.elsewhere:
        say(f"this is what the run knows about {name}; its own log is on its machine, in Ray's logs", err=True)
    dated, day = sys.stdout.isatty(), ""  # on a terminal a date stands over its lines
    try:
        while True:
            refresh(folder)
            more = follow and speaker.may_speak()
            for line in found.new():
                if dated and line.day != day:
                    day = line.day
                    print(day)
                print(line.within_a_day if dated else line)
            sys.stdout.flush()
            if not more:
                return
            time.sleep(LOOK if origin(folder) is None else LOOK_FAR)
    except BrokenPipeError:  # whoever read has seen enough; nothing may be written at the end either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Speaker:
    """The process of a run, from one look to the next."""

    def __init__(self, folder: Path):
        self._folder, self._pid, self._seen = folder, 0, 0.0

    def may_speak(self) -> bool:
        """Whether it lives; once it has let go of its run it has PARTING seconds."""
        from tpuswarm.train.process.computer import alive, this_computer
        from tpuswarm.train.run.directory import holder
        from tpuswarm.train.storage.sync import owner_elsewhere

        if (pid := holder(self._folder)) is not None:
            self._pid, self._seen = 0 if owner_elsewhere(self._folder) else pid, time.monotonic()
            return True
        return bool(self._pid and alive(this_computer(), self._pid)) and time.monotonic() - self._seen < PARTING


def _job(name: str) -> "tuple[Fleet, Job] | None":
    """The job that is meant; None: a run is. Raises InputError where it may be both."""
    from tpuswarm.cloud.errors import CloudError
    from tpuswarm.train.run.listing import find_run

    if "/" in name or name == "last":
        return None
    from tpuswarm.cli.machine.jobs import find_job

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


def _machine(name: str) -> "tuple[Fleet, str, int | None] | None":
    """The machine of this folder's fleet that is meant, and its worker; None: a run is.

    Raises InputError for one that the cloud shows, but that cannot be reached or is not of the fleet.
    """
    from tpuswarm.cloud.errors import CloudError
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.hosts.targets import find_targets
    from tpuswarm.fleet.store import fleets
    from tpuswarm.train.run.listing import find_run

    machine, slash, worker = name.partition("/")
    seen = None
    if name == "last" or (slash and not worker.isdecimal()) or not machine or Path(find_run(name)).exists():
        return None
    try:
        fleet, _ = fleets.find_fleet(None)
        if not (fleet.folder / "fleet.json").exists():
            return None
        seen = open_routes(fleet).snapshot()
        (target, *others) = find_targets(name, seen.document.desired, seen.listing).targets
    except (InputError, CloudError):
        if seen and any(each.name == machine for each in seen.listing.machines):
            raise
        return None
    if any(each.machine.name != target.machine.name for each in others):
        return None  # a pool, or all
    return fleet, target.machine.name, target.worker if slash else None


def _folder(name: str) -> Path:
    """The folder of the run that is meant. InputError, with jobs and machines in mind, where nothing has that name."""
    from tpuswarm.train.run.listing import find_run

    folder = Path(find_run(name))
    if not folder.exists() and "/" not in name and Path("swarm.toml").exists():
        raise InputError(
            f"no run, job or machine is called {name}: `tpuswarm status` lists the runs in ./runs, `tpuswarm jobs` the "
            "jobs, `tpuswarm list` the machines"
        )
    return folder


def stop(run: RunOrJob) -> None:
    """Stop a run as Ctrl-C does, or a job on all its machines, and wait until it has stopped."""
    if found_job := _job(run):
        from tpuswarm.cli.machine.jobs import stop_job

        stop_job(*found_job)
        return
    from tpuswarm.cli.train.train_fleet import end_jobs, open_jobs
    from tpuswarm.swarm.views.logs import RUN, Logs
    from tpuswarm.train.run.directory import holder, read_config
    from tpuswarm.train.run.life import read_life, removed_sentence, stopped_sentence
    from tpuswarm.train.storage.copy import refresh
    from tpuswarm.train.storage.folders import origin, shown
    from tpuswarm.train.storage.sync import STOP, owner_elsewhere, send_request

    folder = _folder(run)
    pid = holder(folder)
    url = origin(folder)
    is_here = bool(pid) and owner_elsewhere(folder) is None
    jobs = open_jobs(url) if url and not is_here else None
    if not pid and jobs and jobs[1]:
        end_jobs(*jobs)
        say(f"{url} is trained by nobody any more")
        return
    if not pid:  # 0 for a moment, while a process takes the run
        read_config(folder)
        raise InputError(f"{shown(folder)} is not running: {read_life(folder).state}; `tpuswarm status` lists the runs")
    happened = Logs(folder)
    happened.new()
    far = None if is_here else send_request(folder, STOP, "")
    who = f"process {pid}{f' on {far.host}' if far else ''}"
    try:
        if far is None:
            os.kill(pid, signal.SIGINT)
    except PermissionError as error:
        raise InputError(f"{folder} is used by process {pid} of another user, who has to stop it") from error
    except ProcessLookupError:  # it has ended meanwhile
        pass
    say(f"asked {who} to stop", err=True)
    asked, warned = time.monotonic(), False
    with waiting("waiting until it has stopped"):
        while holder(folder) is not None:
            time.sleep(LOOK if is_here else LOOK_FAR)
            if not is_here:
                refresh(folder)
            for line in happened.new():
                if line.source == RUN and not line.text.startswith(("stopped", "failed")):  # said at the end
                    say(line.text, err=True)
            if time.monotonic() - asked > PATIENCE and not warned:
                warned = True
                say(f"still running; `kill -9 {pid}` ends it at once, and nothing committed is lost", err=True)
    if jobs:
        end_jobs(*jobs)
    if folder.exists():
        life = read_life(folder)
        if life.state not in ("stopped", "finished"):
            raise RunFailed(f"{folder} {life.state}{': ' if life.message else ''}{life.message}")
        said = life.message or life.state
        say(stopped_sentence(folder, said) if life.state == "stopped" else f"{shown(folder)}: {said}")
    else:
        say(removed_sentence(folder))
    if is_here and url and (jobs := open_jobs(url)):  # last, for it asks the bucket
        end_jobs(*jobs)
