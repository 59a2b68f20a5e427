"""The routers of a fleet: each gets tpuswarm, the rules for the machines that are ready now, and their tuning."""

import asyncio
import threading
import time
from collections.abc import Callable

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import Listing
from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.hosts.router_file import router_file, router_pools, router_toml
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.fleet.hosts.setup import RETRY_S
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.copy import put
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.bundle import bundle
from tpuswarm.remote.setup.package import PYTHON
from tpuswarm.remote.setup.python import BUNDLE
from tpuswarm.remote.setup.router import FOLDER, router
from tpuswarm.remote.setup.run import Told, set_up
from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.wheel import versions, wheel
from tpuswarm.train.process.platform import cache_folder


def router_hosts(routes: Routes) -> list[Host]:
    """Those of the fleet that are there. Raises InputError where one is not ready."""
    return [host for name in router_pools(routes.snapshot().document.desired) for host in routes.hosts(name)[0]]


async def configure_routers(
    routes: Routes, hosts: list[Host], told: Told = lambda host, step, what: None
) -> dict[int, str]:
    """Apply the rules on these hosts, and tune them; what each port leads to. What holds already is left alone.

    Raises InputError where no TPU is ready, and what a host did not do.
    """
    seen, cache = routes.snapshot(), cache_folder("machines")
    file, ports = router_file(seen.document.desired, seen.listing.machines)
    ours = wheel(cache)
    steps = router(router_toml(file, ports), ours.name, versions())

    async def send(connections: Connections, host: Host, step: Step) -> str:
        if step.id == "router-python":
            await put(connections, host, await asyncio.to_thread(bundle, PYTHON, cache), BUNDLE)
            return "uv and Python"
        await put(connections, host, ours, f"{FOLDER}/{ours.name}")
        return ours.name

    async with Connections(routes.key) as connections:
        outcome = await set_up(connections, dict.fromkeys(hosts, steps), told, send=send)
    for error in outcome.failed.values():
        raise error
    return ports


class RouterUpdater:
    """Beside a keeper that leads: leads the routers to machines that have come since they were told last."""

    def __init__(self, make: Callable[[], Routes], tell: Callable[[str], None]):
        self._make, self._tell = make, tell
        self._thread: threading.Thread | None = None
        self._told: frozenset[tuple[str, str]] = frozenset()
        """What the routers know of: what is behind them, and themselves."""
        self._not_before = 0.0

    def look(self, desired: Desired, listing: Listing) -> None:
        """The keeper has looked, and leads. What has only gone stays in the rules, as it may come back."""
        names = router_pools(desired)
        if not names or desired.down is not None or self._thread is not None or time.monotonic() < self._not_before:
            return
        ready = [each for each in listing.machines if each.fleet == desired.fleet and each.state == "ready"]
        selves = {(each.name, str(each.created)) for each in ready if each.pool in names}
        try:
            file, ports = router_file(desired, ready)
        except InputError:
            return  # there is no TPU to lead to
        behind = zip(ports.values(), (each.to for each in file.targets), strict=True)
        there = frozenset({*selves, *behind})
        if len(selves) < len(names) or there <= self._told:
            return
        self._thread = threading.Thread(target=self._run, args=(there,), name="routing", daemon=True)
        self._thread.start()

    def _run(self, there: frozenset[tuple[str, str]]) -> None:
        try:
            routes = self._make()
            asyncio.run(configure_routers(routes, router_hosts(routes)))
            self._told = there
        except (CloudError, TpuswarmError) as error:
            self._tell(f"the routers: {error}; tried again")
            self._not_before = time.monotonic() + RETRY_S
        finally:
            self._thread = None
