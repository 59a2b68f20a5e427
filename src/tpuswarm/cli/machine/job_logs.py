"""`tpuswarm logs JOB` and `logs NAME`: the output of a job on all its workers, or of a machine's jobs."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from tpuswarm.cli.machine import jobs
from tpuswarm.cli.machine.exec import HostOutput
from tpuswarm.errors import TpuswarmError
from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.fleet.hosts.targets import Target, unreachable_reason
from tpuswarm.fleet.store.fleets import Fleet
from tpuswarm.remote.connect import Connections, fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.run_on_hosts import LineBuffer
from tpuswarm.remote.supervisor import Supervisor
from tpuswarm.train.process.terminal import echo

FIRST_LINES = 200
"""Lines of each worker that are printed at first."""
POLL_INTERVAL_S = 1.0
REFRESH_INTERVAL_S = 10.0
"""Without a keeper, `--follow` asks the hosts this often which jobs have ended."""
READ_TIMEOUT_S = 30.0


def show_job_logs(fleet: Fleet, job: Job, follow: bool) -> None:
    """Print the last lines of each worker; with `follow` also new ones, until the job has ended."""
    with jobs.survives_interrupt(job.name) if follow and not job.is_over else nullcontext():
        asyncio.run(JobLogs(fleet, job.name).run(follow))


def show_machine_logs(fleet: Fleet, machine: str, worker: int | None, follow: bool) -> None:
    """Print the output of all jobs of a machine, or of one of its workers."""
    asyncio.run(JobLogs(fleet, None, machine, worker).run(follow))


class JobLogs:
    """The logs of one job, or of all jobs of a machine."""

    def __init__(self, fleet: Fleet, job: str | None, machine: str | None = None, worker: int | None = None):
        self._fleet, self._job, self._machine, self._worker = fleet, job, machine, worker
        self._positions: dict[tuple[str, str], tuple[int, int]] = {}
        """How far each log was read, by alias of the host and job."""
        self._lines: dict[tuple[str, str], LineBuffer] = {}
        self._notes: set[str] = set()

    async def run(self, follow: bool) -> None:
        cloud = self._fleet.provider()
        store = self._fleet.store(cloud)
        routes = Routes(self._fleet, cloud, self._fleet.store(cloud))
        refreshed_at = time.monotonic()
        async with Connections(routes.key) as connections:
            while True:
                document = await asyncio.to_thread(jobs.read_document, self._fleet, store)
                if follow and time.monotonic() - refreshed_at > REFRESH_INTERVAL_S:
                    document = await asyncio.to_thread(jobs.refresh_jobs, self._fleet)
                    refreshed_at = time.monotonic()
                chosen = [job for job in document.jobs if self._is_chosen(job)]
                if self._machine is not None and not chosen:
                    echo(f"no job runs on {self._machine}; to see its other programs: `tpuswarm ssh {self._machine}`")
                    return
                try:
                    await self._print_new(routes, chosen, connections)
                except BrokenPipeError:  # the reader, such as `head`, has ended
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                    return
                if not follow or all(job.is_over for job in chosen):
                    return
                await asyncio.sleep(POLL_INTERVAL_S)

    def _is_chosen(self, job: Job) -> bool:
        if self._machine is None:
            return job.name == self._job
        runs_there = any(assignment.machine == self._machine for assignment in job.assignments)
        return runs_there and (self._worker is None or job.worker in (None, self._worker))

    async def _print_new(self, routes: Routes, chosen: Sequence[Job], connections: Connections) -> None:
        snapshot = await asyncio.to_thread(routes.snapshot)
        fleet_id = snapshot.document.desired.fleet
        machines = {machine.name: machine for machine in snapshot.listing.machines if machine.fleet == fleet_id}
        pools = {pool.name for pool in snapshot.document.desired.pools}
        away = {
            name: f"; it {why}" for name, machine in machines.items() if (why := unreachable_reason(machine, pools))
        }
        found = [
            (job, Target(machine, worker))
            for job in chosen
            for assignment in job.assignments
            if self._machine in (None, assignment.machine)
            if (machine := machines.get(assignment.machine or "")) is not None
            and machine.name not in away
            and assignment.run
            for worker in range(len(machine.workers))
            if job.worker in (None, worker) and self._worker in (None, worker)
        ]
        hosts = await asyncio.to_thread(routes.route_to, snapshot, [target for _, target in found])
        if not hosts:
            parts = [part for job in chosen for part in job.assignments]
            reasons = (f"{part.machine or part.pool}: {part.why}{away.get(part.machine or '', '')}" for part in parts)
            self._say_once("; ".join(reasons))
            return
        labels = {
            (host, job.name): host.label if self._machine is None else f"{host.label} {job.name}"
            for host, (job, _) in zip(hosts, found, strict=True)
        }
        output = HostOutput([*labels.values()])
        ended = {job.name for job in chosen if job.is_over}

        async def print_host(host: Host) -> None:
            for job in (job for label_host, job in labels if label_host == host):
                key, supervisor = (host.alias, job), Supervisor(connections, host)
                lines = self._lines.setdefault(key, LineBuffer())
                while True:
                    before = self._positions.get(key)
                    self._positions[key], data = await supervisor.log(job, FIRST_LINES, before)
                    if whole := list(lines.feed(data)):
                        output.print_lines(labels[host, job], whole, False)
                    if before is None or not data:  # at first only the last lines, later all new ones
                        break
                if job in ended and (rest := list(lines.end())):
                    output.print_lines(labels[host, job], rest, False)

        for result in await fan_out(list(dict.fromkeys(hosts)), print_host, time_out_s=READ_TIMEOUT_S):
            if isinstance(result, TpuswarmError):
                self._say_once(str(result))

    def _say_once(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            echo(text, err=True)
