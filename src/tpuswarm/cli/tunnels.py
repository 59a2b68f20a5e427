"""`tpuswarm forward` and `ssh-config`: what other programs on this computer need to reach machines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.errors import InputError

if TYPE_CHECKING:
    from tpuswarm.fleet.reach import Reach
    from tpuswarm.remote.host import Host

Fleets = Annotated[str | None, typer.Option("--fleet", help="Of this fleet or file. Default: swarm.toml here.")]


def forward(
    name: Annotated[str, typer.Argument(help="A machine, or NAME/2 for one of its workers.")],
    port: Annotated[str, typer.Argument(metavar="PORT[:PORT]", help="Here, and there where it is another.")],
    fleet: Fleets = None,
) -> None:
    """Make a port of a machine one of this computer, on loopback at both ends, until Ctrl-C; a lost way comes back."""
    import asyncio

    from tpuswarm.fleet.keeping import fleets
    from tpuswarm.fleet.reach import find_reach
    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.forward import forward as forwarded
    from tpuswarm.remote.forward import ports

    here, there = ports(port)
    reach = find_reach(fleets.find(fleet)[0])

    async def find() -> "Host":
        return await asyncio.to_thread(_one, reach, name)

    async def work() -> None:
        async with Connections(reach.key) as connections:
            await forwarded(connections, find, here, there, lambda text: print(text, flush=True))

    asyncio.run(work())


def _one(reach: "Reach", name: str) -> "Host":
    hosts, _ = reach.hosts(name)
    if len(machines := sorted({each.label.partition("/")[0] for each in hosts})) > 1:
        raise InputError(f"{name} is {len(machines)} machines: name one, such as {machines[0]}")
    return hosts[0]


def ssh_config(fleet: Fleets = None) -> None:
    """Write a file by which VS Code, rsync, scp and plain ssh know every machine; addresses are asked for each time."""
    from tpuswarm.fleet.keeping import fleets
    from tpuswarm.fleet.reach import find_reach
    from tpuswarm.fleet.way import alias, config
    from tpuswarm.train.files import write_atomically

    reach = find_reach(fleets.find(fleet)[0])
    hosts, away = reach.hosts("all")
    folder = Path.home() / ".ssh" / "tpuswarm.d"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"{reach.fleet.name}.config"
    write_atomically(file, config(reach, hosts))
    for each in away:
        print(f"not now: {each}")
    print(f"{file} has {len(hosts)} hosts; after machines with new names came, give this command again")
    own = folder.parent / "config"
    line = "Include ~/.ssh/tpuswarm.d/*.config"
    if not own.exists() or line not in own.read_text(encoding="utf-8").splitlines():
        print(f"first, once: put the line `{line}` at the top of {own}")
    print(
        f"then: ssh {hosts[0].label}; scp FILE {alias(hosts[0].label)}: (also rsync and VS Code: a dot for the slash)"
    )
