"""`tpuswarm top`: what chips are at, now."""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import FleetOption, Json, make_console

if TYPE_CHECKING:
    from collections.abc import Callable

    from tpuswarm.fleet.hosts.routes import ReachableHosts
    from tpuswarm.swarm.views.status import MemberStatus
    from tpuswarm.watch.top import Row

LOOK = 10.0
"""Seconds between two looks at the cloud and at what is trained: machines come and go."""
FIRST = 15.0
"""Seconds that `--once` waits for hosts."""


def top(
    where: Annotated[str, typer.Argument(metavar="[WHERE]", help="NAME, NAME/2 (a worker), POOL or all.")] = "all",
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    as_json: Json = False,
    fleet: FleetOption = None,
) -> None:
    """Show what the chips of machines are at: how busy, how full, whose, and what they train. Ctrl-C ends it.

    Of a single machine each device has a row.
    """
    import asyncio

    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.store import fleets

    routes = open_routes(fleets.find_fleet(fleet)[0])
    reached = routes.find(where)  # a wrong name is said before anything else
    look = _Look(lambda: routes.find(where), reached)
    console = make_console()
    asyncio.run(_watch(look, routes.key, once or as_json or not console.is_terminal, as_json, console))


class _Look:
    """What the cloud and the run say, looked at now and then beside what hosts say."""

    def __init__(self, find: "Callable[[], ReachableHosts]", reached: "ReachableHosts"):
        from tpuswarm.cli.fleet.training_view import training_here

        self._find, self.reached = find, reached
        self._training = training_here(None)
        self.members: tuple[MemberStatus, ...] = ()
        self._at = time.monotonic()
        self.see_members()

    def see_members(self) -> None:
        """Of the swarm that the fleet trains, if it does."""
        from tpuswarm.swarm.views.status import look
        from tpuswarm.train.storage.copy import bring

        if self._training is not None:
            from tpuswarm.errors import InputError

            with suppress(InputError):  # not begun yet
                seen = look(bring(self._training.url))
                self.members = tuple(seen.status.members) if seen.state == "running" else ()

    async def again(self) -> None:
        """Where it is time."""
        import asyncio

        if time.monotonic() - self._at >= LOOK:
            self._at = time.monotonic()
            self.reached = await asyncio.to_thread(self._find)
            await asyncio.to_thread(self.see_members)


async def _watch(look: _Look, key: Any, once: bool, as_json: bool, console: Any) -> None:
    import asyncio

    from tpuswarm.remote.connect import Connections
    from tpuswarm.train.process.drawn import Drawn
    from tpuswarm.watch.follow import EVERY, Follower
    from tpuswarm.watch.top import draw, rows

    async with Connections(key) as connections:
        follower = Follower(connections)

        def found() -> "list[Row]":
            return rows(look.reached, follower.samples, look.members, time.time())

        try:
            follower.follow(look.reached.hosts)
            if once:
                end = time.monotonic() + FIRST
                while len(follower.samples) < len(look.reached.hosts) and time.monotonic() < end:
                    await asyncio.sleep(0.05)
                if as_json:
                    print(json.dumps({"hosts": [asdict(each) for each in found()]}))
                else:
                    console.print(draw(found(), console.width, devices=not look.reached.group))
                return
            with Drawn(console=console, auto_refresh=False) as live:
                while True:
                    picture = draw(found(), console.width, console.height - 1, not look.reached.group)
                    live.update(picture, refresh=True)
                    await asyncio.sleep(EVERY if follower.samples else 0.2)
                    await look.again()
                    follower.follow(look.reached.hosts)
        finally:
            await follower.close()
