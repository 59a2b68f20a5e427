"""`tpuswarm forward` and `ssh-config`: what other programs on this computer need to reach machines."""

from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import FleetOption
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.remote.host import Host


def forward(
    name: Annotated[str, typer.Argument(help="A machine, or NAME/2 for one of its workers.")],
    port: Annotated[str, typer.Argument(metavar="PORT[:PORT]", help="The port here, and the one there if it differs.")],
    fleet: FleetOption = None,
) -> None:
    """Forward a port of a machine to this computer until Ctrl-C, loopback to loopback. Reconnects by itself."""
    import asyncio

    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.store import fleets
    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.forward import forward as forwarded
    from tpuswarm.remote.forward import ports

    here, there = ports(port)
    routes = open_routes(fleets.find_fleet(fleet)[0])

    async def find() -> "Host":
        return await asyncio.to_thread(one_host, routes, name)

    async def work() -> None:
        async with Connections(routes.key) as connections:
            await forwarded(connections, find, here, there, say)

    asyncio.run(work())


def one_host(routes: "Routes", name: str) -> "Host":
    """A machine's first worker, or the one that is named. Raises InputError for a group."""
    hosts, _ = routes.hosts(name)
    if len(machines := sorted({each.label.partition("/")[0] for each in hosts})) > 1:
        raise InputError(f"{name} is {len(machines)} machines: name one, such as {machines[0]}")
    return hosts[0]


def ssh_config(fleet: FleetOption = None) -> None:
    """Write an ssh config with which VS Code, rsync, scp and ssh find every machine, even after a preemption."""
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.hosts.ssh_config import config_file, host_alias, render_config
    from tpuswarm.fleet.hosts.targets import find_targets
    from tpuswarm.fleet.store import fleets
    from tpuswarm.train.process.atomic import write_atomically

    routes = open_routes(fleets.find_fleet(fleet)[0])
    seen = routes.snapshot()
    found = find_targets("all", seen.document.desired, seen.listing)
    users = routes.users(seen)
    file = config_file(routes.fleet)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, render_config(routes.fleet, routes.key, users))
    for each in found.away:
        say(f"not now: {each}")
    count = f"{len(users)} host{'s' * (len(users) != 1)}"
    say(f"{file} has {count}; later commands keep it up to date when machines come and go")
    folder = file.parent
    own = folder.parent / "config"
    line = "Include ~/.ssh/tpuswarm.d/*.config"
    if not own.exists() or line not in own.read_text(encoding="utf-8").splitlines():
        say(f"put this line at the top of {own}, once: `{line}`")
    label = next(iter(users))
    say(f"then: `ssh {label}`, `scp FILE {host_alias(label)}:` (also rsync and VS Code: a dot for the slash)")
