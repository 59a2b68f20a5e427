"""`tpuswarm top`: show what chips do now."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tpuswarm.cli.console import FleetOption, Json, make_console
from tpuswarm.cli.fleet.fleet_training import find_fleet_training
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts.routes import ReachableHosts, open_routes
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.connect import Connections
from tpuswarm.swarm.views.status import MemberStatus, read_run
from tpuswarm.train.process.stop import end_quietly
from tpuswarm.train.storage.copy import download_run
from tpuswarm.watch.follow import SAMPLE_INTERVAL_S, Follower
from tpuswarm.watch.top import Row, draw_hosts, make_host_rows

REFRESH_INTERVAL_S = 10.0
"""How often the cloud's machines and the swarm's members are listed again."""
ONCE_TIMEOUT_S = 15.0
"""How long `--once` waits for hosts."""
FIRST_DRAW_INTERVAL_S = 0.2


def top(
    where: Annotated[str, typer.Argument(metavar="[WHERE]", help="NAME, NAME/2 (a worker), POOL or all.")] = "all",
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    as_json: Json = False,
    fleet: FleetOption = None,
) -> None:
    """Show what the chips of machines do: how busy, how full, whose, and what they train. Ctrl-C ends it.

    A single machine has a row for each device.
    """
    routes = open_routes(find_fleet(fleet)[0])
    watched = WatchedHosts(lambda: routes.find(where))
    console = make_console()
    end_quietly()
    asyncio.run(_watch(watched, routes.key, once or as_json or not console.is_terminal, as_json, console))


class WatchedHosts:
    """The hosts to watch and the members of the swarm that they train, listed again now and then."""

    def __init__(self, find_hosts: Callable[[], ReachableHosts]):
        self._find_hosts = find_hosts
        self.hosts = find_hosts()
        self.members: tuple[MemberStatus, ...] = ()
        self._training = find_fleet_training(None)
        self._refreshed_at = time.monotonic()
        self._read_members()

    def _read_members(self) -> None:
        if self._training is not None:
            with suppress(InputError):  # the run has not begun yet
                run = read_run(download_run(self._training.url))
                self.members = tuple(run.status.members) if run.state == "running" else ()

    async def refresh(self) -> None:
        """List again, if it is time."""
        if time.monotonic() - self._refreshed_at >= REFRESH_INTERVAL_S:
            self._refreshed_at = time.monotonic()
            self.hosts = await asyncio.to_thread(self._find_hosts)
            await asyncio.to_thread(self._read_members)


async def _watch(watched: WatchedHosts, key: Any, once: bool, as_json: bool, console: Any) -> None:
    from tpuswarm.train.process.live_region import LiveRegion

    async with Connections(key) as connections:
        follower = Follower(connections)

        def make_rows() -> list[Row]:
            return make_host_rows(watched.hosts, follower.samples, watched.members, time.time())

        try:
            follower.follow(watched.hosts.hosts)
            if once:
                end = time.monotonic() + ONCE_TIMEOUT_S
                while len(follower.samples) < len(watched.hosts.hosts) and time.monotonic() < end:
                    await asyncio.sleep(0.05)
                if as_json:
                    print(json.dumps({"hosts": [asdict(row) for row in make_rows()]}))
                else:
                    console.print(draw_hosts(make_rows(), console.width, devices=not watched.hosts.group))
                return
            with LiveRegion(console=console, auto_refresh=False) as live:
                while True:
                    picture = draw_hosts(make_rows(), console.width, console.height - 1, not watched.hosts.group)
                    live.update(picture, refresh=True)
                    await asyncio.sleep(SAMPLE_INTERVAL_S if follower.samples else FIRST_DRAW_INTERVAL_S)
                    await watched.refresh()
                    follower.follow(watched.hosts.hosts)
        finally:
            await follower.close()
