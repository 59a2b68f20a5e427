"""`tpuswarm forward` and `ssh-config`: let other programs on this computer reach machines."""

import asyncio
from typing import Annotated

import typer

from tpuswarm.cli.console import FleetOption
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.hosts.ssh_config import config_file, host_alias, render_config
from tpuswarm.fleet.hosts.targets import find_targets
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote import forward as forwarding
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.terminal import say

INCLUDE = "Include ~/.ssh/tpuswarm.d/*.config"


def forward(
    name: Annotated[str, typer.Argument(help="A machine, or NAME/2 for one of its workers.")],
    port: Annotated[
        str, typer.Argument(metavar="PORT[:PORT]", help="The local port, and the remote one if it differs.")
    ],
    fleet: FleetOption = None,
) -> None:
    """Forward a port of a machine to this computer until Ctrl-C, from loopback to loopback. Reconnects by itself."""
    local, remote = forwarding.ports(port)
    routes = open_routes(find_fleet(fleet)[0])

    async def find() -> Host:
        return await asyncio.to_thread(find_one_host, routes, name)

    async def run() -> None:
        async with Connections(routes.key) as connections:
            await forwarding.forward(connections, find, local, remote, say)

    asyncio.run(run())


def find_one_host(routes: Routes, name: str) -> Host:
    """Return the named worker, or the machine's first. Raises InputError for several machines."""
    hosts, _ = routes.hosts(name)
    if len(machines := sorted({host.label.partition("/")[0] for host in hosts})) > 1:
        raise InputError(f"{name} is {len(machines)} machines; name one, such as {machines[0]}")
    return hosts[0]


def ssh_config(fleet: FleetOption = None) -> None:
    """Write an ssh config with which VS Code, rsync, scp and ssh find every machine, even after a preemption."""
    routes = open_routes(find_fleet(fleet)[0])
    snapshot = routes.snapshot()
    users = routes.users(snapshot)
    file = config_file(routes.fleet)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, render_config(routes.fleet, routes.key, users))
    for reason in find_targets("all", snapshot.document.desired, snapshot.listing).away:
        say(f"not now: {reason}")
    count = f"{len(users)} host{'s' * (len(users) != 1)}"
    say(f"wrote {file} with {count}; later commands update it when machines come and go")
    user_config = file.parent.parent / "config"
    if not user_config.exists() or INCLUDE not in user_config.read_text(encoding="utf-8").splitlines():
        say(f"add this line once, at the top of {user_config}: `{INCLUDE}`")
    label = next(iter(users))
    say(f"then: `ssh {label}`, `scp FILE {host_alias(label)}:` (for scp, rsync and VS Code with a dot for the slash)")
