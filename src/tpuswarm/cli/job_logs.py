"""`tpuswarm logs JOB`: what a job prints on all of its workers, wherever it runs meanwhile."""

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from tpuswarm.cli.jobs import LOOK, read
from tpuswarm.errors import TpuswarmError

if TYPE_CHECKING:
    from tpuswarm.fleet.core.jobs import Job
    from tpuswarm.fleet.keeping.fleets import Fleet
    from tpuswarm.remote.connect import Connections

SHOWN = 200
"""Lines of each worker that are shown before what comes."""


def show_logs(fleet: "Fleet", job: "Job", follow: bool) -> None:
    """The last lines of each worker; with `follow` also what comes, until the job is over."""
    asyncio.run(Following(fleet, job.name).run(follow))


class Following:
    """The logs of one job, by the host that they lie on."""

    def __init__(self, fleet: "Fleet", name: str):
        from tpuswarm.remote.lines import Lines

        self._fleet, self._name = fleet, name
        self._read: dict[str, tuple[int, int]] = {}
        """By alias of the host: inode of the log, and how far it was read."""
        self._lines: dict[str, Lines] = {}
        self._said: set[str] = set()

    async def run(self, follow: bool) -> None:
        """Print what there is."""
        from tpuswarm.fleet.reach import Reach
        from tpuswarm.remote.connect import Connections

        cloud = self._fleet.provider()
        reach = Reach(self._fleet, cloud, self._fleet.store(cloud))
        async with Connections(reach.key) as connections:
            while True:
                document = await asyncio.to_thread(read, self._fleet)
                job = next((each for each in document.jobs if each.name == self._name), None)
                if follow and document.lease is None:
                    self._say(
                        "nobody keeps the fleet: only `tpuswarm keep` notices that a job has ended; Ctrl-C ends this"
                    )
                if job is not None:
                    try:
                        await self._look(reach, job, connections)
                    except BrokenPipeError:  # whoever read has seen enough
                        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                        return
                if job is None or job.over or not follow:
                    return
                await asyncio.sleep(LOOK)

    async def _look(self, reach: object, job: "Job", connections: "Connections") -> None:
        from tpuswarm.cli.touch import Screen
        from tpuswarm.fleet.reach import Reach, Target
        from tpuswarm.remote.fan_out import fan_out
        from tpuswarm.remote.lines import Lines
        from tpuswarm.remote.supervisor import Supervisor

        assert isinstance(reach, Reach)
        seen = await asyncio.to_thread(reach.look)
        there = {each.name: each for each in seen.listing.machines if each.fleet == seen.document.desired.fleet}
        targets = [
            Target(machine, worker)
            for seat in job.seats
            if (machine := there.get(seat.machine or "")) is not None and machine.state == "ready" and seat.run
            for worker in range(len(machine.workers))
            if job.worker in (None, worker)
        ]
        hosts = await asyncio.to_thread(reach.ways, seen, targets)
        if not hosts:
            self._say("; ".join(f"{each.machine or each.pool}: {each.why}" for each in job.seats))
            return
        screen = Screen([each.label for each in hosts])

        async def one(host: object) -> None:
            from tpuswarm.remote.host import Host

            assert isinstance(host, Host)
            inode, size = self._read.get(host.alias, (0, 0))
            new, length, data = await Supervisor(connections, host).log(job.name, SHOWN, size if inode else None)
            if inode and new != inode:  # it was rotated
                _, length, data = await Supervisor(connections, host).log(job.name, SHOWN, 0)
            self._read[host.alias] = (new, length)
            lines = self._lines.setdefault(host.alias, Lines())
            if whole := list(lines.feed(data)):
                screen.lines(host.label, whole, False)
            if job.over and (rest := list(lines.end())):
                screen.lines(host.label, rest, False)

        for each in await fan_out(hosts, one, time_out_s=30.0):
            if isinstance(each, TpuswarmError):
                self._say(str(each))

    def _say(self, text: str) -> None:
        """Once."""
        if text not in self._said:
            self._said.add(text)
            print(text, file=sys.stderr)
