"""`tpuswarm notebook`: Jupyter on a machine or a slice, in this computer's browser or in Colab."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import FleetOption, Yes
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.fleet.hosts.routes import ReachableHosts, Routes
    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.host import Host
    from tpuswarm.remote.notebook.begin import NoJupyter, Notebook

PORT = 8888
"""Jupyter's own, which Colab proposes."""


def notebook(
    name: Annotated[str, typer.Argument(help="A machine; on a slice each cell runs on all of its workers.")],
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port here.")] = PORT,
    stop: Annotated[bool, typer.Option("--stop", help="End Jupyter there, with its kernels.")] = False,
    yes: Yes = False,
    fleet: FleetOption = None,
) -> None:
    """Open Jupyter on a machine, through SSH, for a browser or Colab on this computer.

    Ctrl-C disconnects; kernels keep running, and the same command comes back to them.
    """
    import asyncio

    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.store import fleets
    from tpuswarm.remote.notebook.begin import NoJupyter

    routes = open_routes(fleets.find_fleet(fleet)[0])
    reached = _one(routes, name)
    if stop:
        asyncio.run(_stop(routes, reached))
        return
    if _is_taken(port):
        free = next((each for each in range(port + 1, 65536) if not _is_taken(each)), None)
        way = f"`tpuswarm notebook {name} --port {free}` takes a free one" if free else "choose another one with --port"
        raise InputError(f"port {port} of this computer is taken by another program: {way}")
    try:
        first = asyncio.run(_first(routes, reached))
    except NoJupyter as lacking:
        _offer(routes, reached, lacking, yes)
        first = asyncio.run(_first(routes, reached))
    asyncio.run(_serve(routes, name, port, first))


def _one(routes: "Routes", name: str) -> "ReachableHosts":
    """The machine that is meant, which has to be there as a whole."""
    if "/" in name:
        machine = name.partition("/")[0]
        raise InputError(f"a notebook is of a whole machine, not of a worker: `tpuswarm notebook {machine}`")
    reached = routes.find(name)
    machines = sorted({each.name for each in reached.machines.values()})
    if len(machines) > 1:
        raise InputError(f"{name} is {len(machines)} machines: name one, such as {machines[0]}")
    if reached.away:
        raise InputError(reached.away[0])
    return reached


async def _stop(routes: "Routes", reached: "ReachableHosts") -> None:
    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.notebook.begin import end

    async with Connections(routes.key) as connections:
        ran = await end(connections, reached.hosts)
    what = "is stopping, with its kernels" if ran else "is not running"
    say(f"Jupyter on {_called(reached)} {what}")


async def _first(routes: "Routes", reached: "ReachableHosts") -> "Notebook":
    """The server, begun where it does not run and nobody else has the chips."""
    from tpuswarm.doctor.checks.held import BUSY
    from tpuswarm.doctor.cloud import REACH
    from tpuswarm.doctor.examine import examine
    from tpuswarm.remote.connect import Connections
    from tpuswarm.train.process.waiting import waiting

    async with Connections(routes.key) as connections:
        with waiting(f"looking at {_called(reached)}"):
            found = await examine(connections, reached, checks=(BUSY,))
        for each in found:
            if each.check == BUSY.id:
                raise RunFailed(f"{each.host}: {each.wrong.what}; {each.wrong.mend}")
            if each.check == REACH:
                say(f"warning: nobody knows who has the chips of {each.host}: {each.wrong.what}", err=True)
        with waiting(f"beginning Jupyter on {_called(reached)}"):
            return await _begin(connections, reached, None)


async def _begin(connections: "Connections", reached: "ReachableHosts", before: "Notebook | None") -> "Notebook":
    from pathlib import Path

    from tpuswarm.remote.notebook.begin import begin
    from tpuswarm.remote.places import there

    machine = reached.machines[reached.hosts[0].label]
    addresses = [each.internal or "" for each in machine.workers]
    return await begin(connections, reached.hosts, addresses, there(Path.cwd()), before)


async def _serve(routes: "Routes", name: str, port: int, first: "Notebook") -> None:
    """The way to it until Ctrl-C, also after a lost connection, and to a machine that came back in its place."""
    import asyncio

    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.forward import forward

    now = first

    async with Connections(routes.key) as connections:

        async def find() -> "Host":
            nonlocal now
            reached = await asyncio.to_thread(_one, routes, name)
            now = await _begin(connections, reached, now)
            if now.port != first.port:
                raise RunFailed(f"Jupyter has another port on {name} now: give the command again")
            return now.host

        def opened(host: "Host") -> str:
            return "\n".join(_said(now, name, port, first.is_new if now.token == first.token else True))

        await forward(connections, find, port, first.port, say, opened)


def _said(now: "Notebook", name: str, port: int, is_new: bool) -> list[str]:
    """What a person is told."""
    state = "is running" if is_new else "is still running"
    return [
        f"Jupyter on {now.host.label} {state}",
        f"  browser: {now.url(port, path='lab')}",
        f"  Colab:   {now.url(port, 'localhost')} (Connect, Connect to a local runtime)",
        f"Ctrl-C disconnects; kernels keep running: `tpuswarm notebook {name} --stop` ends them",
    ]


def _is_taken(port: int) -> bool:
    from tpuswarm.remote.forward import Taken, hold

    try:
        hold(port).close()
    except Taken:
        return True
    return False


def _offer(routes: "Routes", reached: "ReachableHosts", lacking: "NoJupyter", yes: bool) -> None:
    """Put Jupyter there, if a person wants it."""
    import asyncio

    from tpuswarm.cli.console import confirm

    if not yes and not sys.stdin.isatty():
        raise InputError(f"{lacking}, and with --yes this command does")
    say(f"{lacking}; it can be done now, on {_called(reached)} alone")
    confirm(yes)
    asyncio.run(_put(routes, reached))


async def _put(routes: "Routes", reached: "ReachableHosts") -> None:
    from tpuswarm.cli.console import make_console
    from tpuswarm.cli.machine.setup import Watching, finish, some_of
    from tpuswarm.fleet.hosts.setup import install_notebook

    hosts = reached.hosts
    with Watching(make_console(), hosts) as watching:
        outcome = await install_notebook(routes, hosts, watching.told)
    finish(f"{some_of(len(outcome.done), hosts)}: Jupyter is there", list(outcome.failed.values()), hosts)


def _called(reached: "ReachableHosts") -> str:
    count = len(reached.hosts)
    name = reached.hosts[0].label.partition("/")[0]
    return name if count == 1 else f"{name} ({count} workers)"
