"""`tpuswarm logs JOB` and `logs NAME`: what a job prints on all of its workers, or a machine's jobs on that machine."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from tpuswarm.cli.machine.jobs import ASKED_S, LOOK, leaving, notice, read
from tpuswarm.errors import TpuswarmError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.fleet.decide.jobs import Job
    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.fleet.store.fleets import Fleet
    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.host import Host

SHOWN = 200
"""Lines of each worker that are shown before what comes."""


def show_logs(fleet: "Fleet", job: "Job", follow: bool) -> None:
    """The last lines of each worker; with `follow` also what comes, until the job is over."""
    with leaving(job.name) if follow and not job.is_over else nullcontext():
        asyncio.run(Following(fleet, job.name).run(follow))


def show_machine_logs(fleet: "Fleet", machine: str, worker: int | None, follow: bool) -> None:
    """What all jobs of a machine print, or of one of its workers."""
    asyncio.run(Following(fleet, None, machine, worker).run(follow))


class Following:
    """The logs of one job, or of all jobs of a machine."""

    def __init__(self, fleet: "Fleet", job: str | None, machine: str | None = None, worker: int | None = None):
        from tpuswarm.remote.lines import Lines

        self._fleet, self._job, self._machine, self._worker = fleet, job, machine, worker
        self._read: dict[tuple[str, str], tuple[int, int]] = {}
        """By alias of the host and job, how far its log was read."""
        self._lines: dict[tuple[str, str], Lines] = {}
        self._said: set[str] = set()

    async def run(self, follow: bool) -> None:
        """Print what there is."""
        from tpuswarm.fleet.hosts.routes import Routes
        from tpuswarm.remote.connect import Connections

        cloud = self._fleet.provider()
        store = self._fleet.store(cloud)
        routes = Routes(self._fleet, cloud, self._fleet.store(cloud))
        asked = time.monotonic()
        async with Connections(routes.key) as connections:
            while True:
                document = await asyncio.to_thread(read, self._fleet, store)
                if follow and time.monotonic() - asked > ASKED_S:  # without a keeper nobody else notices an end
                    document = await asyncio.to_thread(notice, self._fleet)
                    asked = time.monotonic()
                jobs = [each for each in document.jobs if self._is_meant(each)]
                if self._machine is not None and not jobs:
                    say(f"no job is on {self._machine}; `tpuswarm ssh {self._machine}` shows what else runs there")
                    return
                try:
                    await self._look(routes, jobs, connections)
                except BrokenPipeError:  # whoever read has seen enough
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                    return
                if not follow or all(each.is_over for each in jobs):
                    return
                await asyncio.sleep(LOOK)

    def _is_meant(self, job: "Job") -> bool:
        if self._machine is None:
            return job.name == self._job
        return any(each.machine == self._machine for each in job.assignments) and (
            self._worker is None or job.worker in (None, self._worker)
        )

    async def _look(self, routes: "Routes", jobs: "Sequence[Job]", connections: "Connections") -> None:
        from tpuswarm.cli.machine.exec import Screen
        from tpuswarm.fleet.hosts.targets import Target, unreachable_reason
        from tpuswarm.remote.fan_out import fan_out
        from tpuswarm.remote.lines import Lines
        from tpuswarm.remote.supervisor import Supervisor

        seen = await asyncio.to_thread(routes.snapshot)
        there = {each.name: each for each in seen.listing.machines if each.fleet == seen.document.desired.fleet}
        pools = {each.name for each in seen.document.desired.pools}
        away = {name: f"; it {why}" for name, each in there.items() if (why := unreachable_reason(each, pools))}
        found = [
            (job, Target(machine, worker))
            for job in jobs
            for seat in job.assignments
            if self._machine in (None, seat.machine)
            if (machine := there.get(seat.machine or "")) is not None and machine.name not in away and seat.run
            for worker in range(len(machine.workers))
            if job.worker in (None, worker) and self._worker in (None, worker)
        ]
        hosts = await asyncio.to_thread(routes.route_to, seen, [target for _, target in found])
        if not hosts:
            seats = [seat for job in jobs for seat in job.assignments]
            self._say("; ".join(f"{to.machine or to.pool}: {to.why}{away.get(to.machine or '', '')}" for to in seats))
            return
        named = {
            (host, job.name): host.label if self._machine is None else f"{host.label} {job.name}"
            for host, (job, _) in zip(hosts, found, strict=True)
        }
        screen = Screen([*named.values()])
        over = {each.name for each in jobs if each.is_over}

        async def one(host: "Host") -> None:
            for job in (job for at, job in named if at == host):
                key, supervisor = (host.alias, job), Supervisor(connections, host)
                lines = self._lines.setdefault(key, Lines())
                while True:
                    before = self._read.get(key)
                    self._read[key], data = await supervisor.log(job, SHOWN, before)
                    if whole := list(lines.feed(data)):
                        screen.lines(named[host, job], whole, False)
                    if before is None or not data:  # the first time the last lines, later all that came since
                        break
                if job in over and (rest := list(lines.end())):
                    screen.lines(named[host, job], rest, False)

        for each in await fan_out(list(dict.fromkeys(hosts)), one, time_out_s=30.0):
            if isinstance(each, TpuswarmError):
                self._say(str(each))

    def _say(self, text: str) -> None:
        """Once."""
        if text not in self._said:
            self._said.add(text)
            say(text, err=True)
