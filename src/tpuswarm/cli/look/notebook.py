"""`tpuswarm notebook`: Jupyter on a machine or a slice, in this computer's browser or in Colab."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.console import FleetOption, Yes, confirm, make_console
from tpuswarm.cli.machine.setup import SetupProgress, describe_hosts, print_outcome
from tpuswarm.doctor.checks import BUSY
from tpuswarm.doctor.cloud import REACH
from tpuswarm.doctor.examine import examine
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.hosts.routes import ReachableHosts, Routes, open_routes
from tpuswarm.fleet.hosts.setup import install_notebook
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.fleet.store.machine_flags import has_tf_pod
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.forward import forward, is_port_used
from tpuswarm.remote.host import Host
from tpuswarm.remote.notebook.begin import NoJupyter, Notebook, start, stop
from tpuswarm.remote.paths import remote_folder
from tpuswarm.train.process.stop import set_exit_message
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting

DEFAULT_PORT = 8888
"""Jupyter's own default, which Colab suggests."""


def notebook(
    name: Annotated[str, typer.Argument(help="A machine; on a slice each cell runs on all workers.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The local port.")] = DEFAULT_PORT,
    stop: Annotated[bool, typer.Option("--stop", help="End Jupyter there, with its kernels.")] = False,
    yes: Yes = False,
    fleet: FleetOption = None,
) -> None:
    """Open Jupyter on a machine, through SSH, for a browser or Colab on this computer.

    Ctrl-C disconnects; kernels keep running, and the same command reconnects to them.
    """
    routes = open_routes(find_fleet(fleet)[0])
    machine = _find_machine(routes, name)
    if stop:
        asyncio.run(_stop(routes, machine))
        return
    if is_port_used(port):
        free = next((other for other in range(port + 1, 65536) if not is_port_used(other)), None)
        hint = f"`tpuswarm notebook {name} --port {free}`" if free else "another --port"
        raise InputError(f"another program on this computer uses port {port}. Try {hint}.")
    try:
        started = asyncio.run(_start(routes, machine))
    except NoJupyter as missing:
        _install_after_question(routes, machine, missing, yes)
        started = asyncio.run(_start(routes, machine))
    set_exit_message("disconnected; Jupyter and its kernels keep running")
    asyncio.run(_forward(routes, name, port, started))


def _find_machine(routes: Routes, name: str) -> ReachableHosts:
    """Return all hosts of the machine, or worker 0 of a TensorFlow pod.

    Raises InputError for several machines, and if a host is unreachable.
    """
    if "/" in name:
        machine = name.partition("/")[0]
        raise InputError(f"a notebook runs on a whole machine, not on one worker: `tpuswarm notebook {machine}`")
    machine_hosts = routes.find(name)
    machines = sorted({machine.name for machine in machine_hosts.machines.values()})
    if len(machines) > 1:
        raise InputError(f"{name} is {len(machines)} machines; name one, such as {machines[0]}")
    if machine_hosts.away:
        raise InputError(machine_hosts.away[0])
    if has_tf_pod(next(iter(machine_hosts.machines.values()))):
        return routes.find(f"{machines[0]}/0")
    return machine_hosts


async def _stop(routes: Routes, machine: ReachableHosts) -> None:
    async with Connections(routes.key) as connections:
        was_running = await stop(connections, machine.hosts)
    state = "is stopping, with its kernels" if was_running else "is not running"
    echo(f"Jupyter on {_describe_machine(machine)} {state}")


async def _start(routes: Routes, machine: ReachableHosts) -> Notebook:
    """Start Jupyter unless it runs. Raises RunFailed if another program uses the chips."""
    async with Connections(routes.key) as connections:
        with waiting(f"checking {_describe_machine(machine)}"):
            findings = await examine(connections, machine, checks=(BUSY,))
        for finding in findings:
            if finding.check == BUSY.id:
                raise RunFailed(f"{finding.subject}: {finding.problem}; {finding.advice}")
            if finding.check == REACH:
                echo(f"warning: cannot see who uses the chips of {finding.subject}: {finding.problem}", err=True)
        with waiting(f"starting Jupyter on {_describe_machine(machine)}"):
            return await _begin_jupyter(connections, machine, None)


async def _begin_jupyter(connections: Connections, machine: ReachableHosts, before: Notebook | None) -> Notebook:
    workers = machine.machines[machine.hosts[0].label].workers
    addresses = [worker.internal or "" for worker in workers]
    return await start(connections, machine.hosts, addresses, remote_folder(Path.cwd()), before)


async def _forward(routes: Routes, name: str, port: int, started: Notebook) -> None:
    """Forward the port until Ctrl-C. Reconnects, also to a machine that replaces this one."""
    current = started

    async with Connections(routes.key) as connections:

        async def find() -> Host:
            nonlocal current
            machine = await asyncio.to_thread(_find_machine, routes, name)
            current = await _begin_jupyter(connections, machine, current)
            if current.port != started.port:
                raise RunFailed(f"Jupyter on {name} has a new port; repeat the command")
            return current.host

        def describe(host: Host) -> str:
            is_new = started.is_new if current.token == started.token else True
            return "\n".join(_describe_notebook(current, name, port, is_new))

        await forward(connections, find, port, started.port, echo, describe)


def _describe_notebook(notebook: Notebook, name: str, port: int, is_new: bool) -> list[str]:
    return [
        f"Jupyter on {notebook.host.label} {'is running' if is_new else 'is still running'}",
        f"  browser: {notebook.url(port, path='lab')}",
        f"  Colab:   {notebook.url(port, 'localhost')} (Connect, Connect to a local runtime)",
        f"Ctrl-C disconnects, and kernels keep running. To end them: `tpuswarm notebook {name} --stop`",
    ]


def _install_after_question(routes: Routes, machine: ReachableHosts, missing: NoJupyter, yes: bool) -> None:
    if not yes and not sys.stdin.isatty():
        raise InputError(f"{missing}, or add --yes to install it now")
    echo(f"{missing}, or install it now, without changing the setup")
    confirm(yes)
    hosts = machine.hosts
    with SetupProgress(make_console(), hosts) as progress:
        outcome = asyncio.run(install_notebook(routes, hosts, progress.set_step))
    print_outcome(
        f"Jupyter is installed on {describe_hosts(len(outcome.done), hosts)}", list(outcome.failed.values()), hosts
    )


def _describe_machine(machine: ReachableHosts) -> str:
    count = len(machine.hosts)
    name = machine.hosts[0].label.partition("/")[0]
    return name if count == 1 else f"{name} ({count} workers)"
