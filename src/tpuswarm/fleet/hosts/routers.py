"""Configure the routers of a fleet: ports to SSH and services of each worker of ready machines, and kernel tuning."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterable

from tpuswarm.cloud.errors import CloudError
from tpuswarm.cloud.protocol import Listing, Machine, VmSpec
from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.names import by_number
from tpuswarm.fleet.hosts.routes import Routes
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.artifacts import build_wheel, file_sender, installed_versions
from tpuswarm.remote.setup.run import OnProgress, set_up
from tpuswarm.remote.setup.services import ROUTER_FOLDER, router
from tpuswarm.router.file import RouterFile, Single
from tpuswarm.router.settings import endpoint_settings
from tpuswarm.train.process.platform import cache_folder

FIRST_PORT, BLOCK_PORTS, LAST_PORT = 22_000, 1_000, 65_535
"""Workers of the first forwarded port begin at FIRST_PORT, those of the next one a block later."""
DEFAULT_FORWARDS = (22,)
INTERFACE = "ens4"
ANY_SOURCE = "0.0.0.0/0"
"""The network's firewall decides who may come in."""
RETRY_S = 30.0


def router_pools(desired: Desired) -> list[str]:
    return [pool.name for pool in desired.pools if pool.forwards]


def forwarded_ports(desired: Desired) -> tuple[int, ...]:
    """Return the ports that the fleet's routers forward to."""
    return tuple(dict.fromkeys(port for pool in desired.pools for port in pool.forwards)) or DEFAULT_FORWARDS


def router_hosts(routes: Routes) -> list[Host]:
    return [host for name in router_pools(routes.snapshot().document.desired) for host in routes.hosts(name)[0]]


def router_file(desired: Desired, machines: Iterable[Machine]) -> tuple[RouterFile, dict[int, str]]:
    """Return the router's file, and each port's worker and port.

    Raise InputError if no TPU is ready, or if there are too few ports.
    """
    vms = {pool.name for pool in desired.pools if isinstance(pool.spec, VmSpec)}
    tpus = [machine for machine in desired.own(machines) if machine.state == "ready" and machine.pool not in vms]
    workers = [
        (f"{machine.name}/{number}", worker.internal)
        for machine in sorted(tpus, key=lambda machine: by_number(machine.name))
        for number, worker in enumerate(machine.workers)
        if worker.internal
    ]
    if not workers:
        raise InputError("no TPU of the fleet is ready, so a router has no target: `tpuswarm list` shows why")
    forwarded = forwarded_ports(desired)
    block = math.ceil(len(workers) / BLOCK_PORTS) * BLOCK_PORTS
    if FIRST_PORT + block * len(forwarded) > LAST_PORT + 1:
        raise InputError(
            f"a router has {LAST_PORT + 1 - FIRST_PORT:,} ports, too few for {len(forwarded)} of each of "
            f"{len(workers):,} workers: list fewer in `ports`"
        )
    targets, labels = [], {}
    for number, to_port in enumerate(forwarded):
        for port, (label, address) in enumerate(workers, FIRST_PORT + number * block):
            targets.append(Single(port=port, to=f"{_routable(address)}:{to_port}"))
            labels[port] = f"{label}, port {to_port}"
    return RouterFile(outside=INTERFACE, inside=INTERFACE, sources=(ANY_SOURCE,), targets=tuple(targets)), labels


def _routable(address: str) -> str:
    """Replace the local cloud's loopback addresses; a rehearsal computes rules but never loads them."""
    return f"10.{address.removeprefix('127.')}" if address.startswith("127.") else address


def router_toml(file: RouterFile, labels: dict[int, str]) -> str:
    """Return the file as `tpuswarm router` reads it, with each port's worker as a comment."""
    lines = [f'outside = "{file.outside}"', f'inside = "{file.inside}"']
    lines.append(f"sources = {json.dumps(file.sources)}")
    for target in file.targets:
        lines += ["", "[[targets]]", f"port = {target.port}  # {labels[target.port]}", f'to = "{target.to}"']
    return "\n".join(lines) + "\n"


def client_settings(desired: Desired) -> tuple[tuple[str, str], ...]:
    """Return the sysctl settings that set-up gives TPUs if the fleet has a router."""
    return endpoint_settings() if router_pools(desired) else ()


async def configure_routers(
    routes: Routes, hosts: list[Host], on_progress: OnProgress = lambda host, step, state: None
) -> dict[int, str]:
    """Apply the rules on these hosts, skip what holds already, and return each port's worker.

    Raise InputError if no TPU is ready, and the error of a host that failed.
    """
    snapshot, cache = routes.snapshot(), cache_folder("machines")
    file, ports = router_file(snapshot.document.desired, snapshot.listing.machines)
    steps = router(router_toml(file, ports), build_wheel(cache).name, installed_versions())
    send = file_sender(ROUTER_FOLDER, cache)
    async with Connections(routes.key) as connections:
        outcome = await set_up(connections, dict.fromkeys(hosts, steps), on_progress, send=send)
    for error in outcome.failed.values():
        raise error
    return ports


class RouterUpdater:
    """Adds new machines to the routers, beside a keeper that leads. A machine that has gone stays: it may come back."""

    def __init__(self, make_routes: Callable[[], Routes], log: Callable[[str], None]):
        self._make_routes, self._log = make_routes, log
        self._thread: threading.Thread | None = None
        self._configured: frozenset[tuple[str, str]] = frozenset()
        self._not_before = 0.0

    def update(self, desired: Desired, listing: Listing) -> None:
        names = router_pools(desired)
        if not names or desired.down is not None or self._thread is not None or time.monotonic() < self._not_before:
            return
        ready = [machine for machine in desired.own(listing.machines) if machine.state == "ready"]
        routers = {(machine.name, str(machine.created)) for machine in ready if machine.pool in names}
        try:
            file, ports = router_file(desired, ready)
        except InputError:  # no TPU is ready
            return
        targets = zip(ports.values(), (target.to for target in file.targets), strict=True)
        wanted = frozenset({*routers, *targets})
        if len(routers) < len(names) or wanted <= self._configured:
            return
        self._thread = threading.Thread(target=self._run, args=(wanted,), name="routers", daemon=True)
        self._thread.start()

    def _run(self, wanted: frozenset[tuple[str, str]]) -> None:
        try:
            routes = self._make_routes()
            asyncio.run(configure_routers(routes, router_hosts(routes)))
            self._configured = wanted
        except (CloudError, TpuswarmError) as error:
            self._log(f"the routers: {error}; trying again")
            self._not_before = time.monotonic() + RETRY_S
        finally:
            self._thread = None
