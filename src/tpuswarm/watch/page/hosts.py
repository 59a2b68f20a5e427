"""Follow the hosts of a page's fleet: their chips and their jobs' output."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.hosts.routes import ReachableHosts, Routes
from tpuswarm.fleet.store.document import Document
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.supervisor import Supervisor
from tpuswarm.watch.follow import Follower
from tpuswarm.watch.state import State
from tpuswarm.watch.top import Row, make_host_rows

MAX_LOG_LINES = 200
"""Per job and host."""


class FollowedHosts:
    """A context that follows hosts between `follow` and `pause`, in one event loop."""

    def __init__(self, routes: Routes | None):
        """Without routes there is no fleet."""
        self._routes = routes
        self._reached: ReachableHosts | None = None
        self._connections: Connections | None = None
        self._follower: Follower | None = None

    async def __aenter__(self) -> "FollowedHosts":
        if self._routes is not None:
            self._connections = await Connections(self._routes.key).__aenter__()
            self._follower = Follower(self._connections)
        return self

    async def __aexit__(self, *about: object) -> None:
        if self._follower is not None and self._connections is not None:
            await self._follower.close()
            await self._connections.__aexit__(*about)

    async def follow(self) -> None:
        """List the hosts and follow them."""
        if self._routes is None or self._follower is None:
            return
        try:
            self._reached = await asyncio.to_thread(self._routes.find, ALL)
        except TpuswarmError:  # no machine is ready; the table of machines says why
            self._reached = None
        self._follower.follow(self._reached.hosts if self._reached else ())

    def pause(self) -> None:
        """Stop following until `follow`."""
        if self._follower is not None:
            self._follower.follow(())

    def rows(self, state: State) -> Sequence[Row]:
        """Return the rows that `top` shows."""
        if self._reached is None or self._follower is None:
            return ()
        members = state.swarm.status.members if state.swarm else ()
        return make_host_rows(self._reached, self._follower.samples, members, time.time())

    async def log(self, machine: str, document: Document) -> str:
        """Return the last log lines of the jobs on a machine, by worker; raise InputError if there are none."""
        hosts = (
            [host for host in self._reached.hosts if host.label.partition("/")[0] == machine] if self._reached else []
        )
        jobs = [job.name for job in document.jobs if any(part.machine == machine for part in job.assignments)]
        if not hosts or not jobs or self._connections is None:
            raise InputError(f"{machine} cannot be reached" if not hosts else f"no job is on {machine}")
        connections = self._connections

        async def read_log(host: Any, job: str) -> str:
            try:
                _, data = await Supervisor(connections, host).log(job, MAX_LOG_LINES)
            except TpuswarmError as error:
                return f"── {host.label} {job}: {error}\n"
            return f"── {host.label} {job}\n{data.decode(errors='replace')}"

        return "\n".join(await asyncio.gather(*(read_log(host, job) for host in hosts for job in jobs)))
