"""`tpuswarm setup`: install programs on the machines of a fleet."""

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tpuswarm.cli.console import make_console
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.fleet.hosts.routers import configure_routers, router_hosts
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.hosts.setup import SavedSetup, find_setup_targets, set_up_all
from tpuswarm.fleet.keeper.head_keeper import install_head_keeper, wait_for_head_keeper
from tpuswarm.fleet.store.document import DocumentStore
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.machine_steps import Machine, steps
from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.table import Setup
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting

MAX_ROWS = 14
"""Hosts shown on a terminal; unfinished ones come first."""
STATE_COLOURS = {"done": "green", "failed": "red"}


def setup(
    target: Annotated[str | None, typer.Argument(metavar="[FILE|FLEET]", help="Default: swarm.toml.")] = None,
    where: Annotated[str, typer.Option("--on", help="NAME, NAME/2 or POOL.")] = "all",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps, do nothing.")] = False,
) -> None:
    """Set machines up as [setup] says, all at once. Skips finished steps, repeats changed ones."""
    fleet, file = find_fleet(target)
    table = file.setup if file else SavedSetup(fleet).table()
    if table is None:
        raise InputError(f"{target or 'swarm.toml'} has no [setup]. docs/set-up.md lists its keys, with an example.")
    if dry_run:
        _print_steps(table, has_router=file is not None and any(vm.role == "router" for vm in file.vm))
        return
    routes = open_routes(fleet)
    set_up_machines(routes, table, where)
    update_head_keeper(routes)


def set_up_machines(routes: Routes, table: Setup, where: str = "all") -> None:
    """Set machines up and show the progress. Raises RunFailed if one fails."""
    targets = find_setup_targets(routes, table, where)
    for reason in targets.away:
        echo(f"not now: {reason}")
    asyncio.run(_set_up(routes, table, targets.machines))


def start_head_keeper(routes: Routes, store: DocumentStore) -> None:
    """Install the keeper on the head and wait until it leads."""
    asyncio.run(_start_head_keeper(routes, store))


def set_up_routers(routes: Routes) -> None:
    """Configure the fleet's routers, if it has any, and print their ports."""
    hosts = router_hosts(routes)
    if not hosts:
        return
    with SetupProgress(make_console(), hosts) as progress:
        ports = asyncio.run(configure_routers(routes, hosts, progress.set_step))
    count = f"{len(ports)} ports, from {min(ports)}" if len(ports) > 1 else f"port {min(ports)}"
    for host in hosts:
        router = host.label.partition("/")[0]
        echo(f"{router} forwards {count}, to the TPUs; list them: `tpuswarm router show --from swarm.toml`")


def update_head_keeper(routes: Routes) -> None:
    """Give a keeper on the head what this computer knows, for machines that are created later."""
    desired = routes.snapshot().document.desired
    if desired.kept_on is None or desired.down is not None:
        return
    try:
        asyncio.run(install_head_keeper(routes))
    except TpuswarmError as error:
        echo(f"note: the keeper on {desired.keeper_machine} is not updated yet: {error}", err=True)
    else:
        echo(f"updated the keeper on {desired.keeper_machine} too")


async def _start_head_keeper(routes: Routes, store: DocumentStore) -> None:
    with SetupProgress(make_console(), []) as progress:
        host = await install_head_keeper(routes, progress.set_step)
    with waiting(f"waiting for the keeper on {host.label.partition('/')[0]}"):
        await wait_for_head_keeper(routes, store, host)


async def _set_up(routes: Routes, table: Setup, machines: Sequence[Machine]) -> None:
    hosts = [machine.host for machine in machines]
    progress = SetupProgress(make_console(), hosts)
    try:
        with progress:
            outcome = await set_up_all(routes, table, machines, progress.set_step)
    except asyncio.CancelledError:
        echo("interrupted; finished steps stay, and the same command continues", err=True)
        raise
    for note in outcome.notes:
        echo(f"note: {note}")
    good = len(outcome.done)
    unchanged = sum(not changed_steps for changed_steps in outcome.done.values())
    suffix = "" if not unchanged else f"; {unchanged} needed nothing" if unchanged < good else ", as before"
    summary = f"{describe_hosts(good, hosts)} {'is' if good == 1 else 'are'} set up{suffix}"
    print_outcome(summary, list(outcome.failed.values()), hosts)


def describe_hosts(good: int, hosts: Sequence[Host]) -> str:
    """Return `node-1/0`, `all 5 hosts` or `4 of 5 hosts`."""
    if len(hosts) == 1:
        return hosts[0].label
    return f"all {good:,} hosts" if good == len(hosts) else f"{good:,} of {len(hosts):,} hosts"


def print_outcome(summary: str, errors: Sequence[Exception], hosts: Sequence[Host]) -> None:
    """Print the summary. After errors raise it; for a single host raise its error instead."""
    if len(hosts) == 1 and errors:
        raise errors[0]
    for error in errors:
        echo(str(error))
    if errors:
        raise RunFailed(summary)
    echo(summary)


def _print_steps(table: Setup, has_router: bool) -> None:
    no_host: Any = None
    secrets = dict.fromkeys(table.secrets, "…")
    settings = (("", ""),) if has_router else ()
    found: dict[str, Step] = {}
    most_swap = max(table.swap_gb, key=table.swap_of, default="")
    for pool in (most_swap, *table.on):
        for is_server, server in ((True, None), (False, "SERVER")):
            machine = Machine(no_host, is_server, server, has_disk=True, settings=settings, pool=pool)
            found |= {step.id: step for step in steps(table.without_files(), machine, secrets, wheel="")}
    details = _step_details(table)
    for pool, extra in table.on.items():
        for step, more in (("apt", extra.apt), ("environment", extra.env)):
            if more:
                details[step] = f"{details[step]}; on {pool} also {' '.join(more)}".removeprefix("; ")
        details |= {f"run-{step.name}": f"on {pool}" for step in extra.run}
    for number, step in enumerate(found, 1):
        echo(f"{number}. {step}{': ' if details.get(step) else ''}{details.get(step, '')}", hang=3)
    echo("nothing was done")


def _step_details(table: Setup) -> dict[str, str]:
    packages = table.pip or ([str(table.requirements)] if table.requirements else [])
    details = {
        "network": "larger network buffers, on TPUs behind the router",
        "timezone": table.timezone or "",
        "nofile": f"{table.nofile} open files",
        "swap": ", ".join(f"{size} GB on {pool}" for pool, size in table.swap_gb.items()),
        "data-disk": f"{table.data_disk}, on machines with a data disk",
        "apt": " ".join(table.apt),
        "python": f"{table.python}, from uv",
        "packages": " ".join(packages) or "none",
        "environment": " ".join(table.env) or "the path of that Python",
        "secrets": " ".join(table.secrets),
        "notebook": "Jupyter, in its own environment",
    }
    if table.nfs:
        details |= {
            "nfs-server": f"{table.nfs.path} on {table.nfs.server}",
            "nfs": f"{table.nfs.mount} on all other machines",
            "nfs-clients": "only the fleet's other machines may mount it",
        }
    return details


class SetupProgress:
    """On a terminal a line for each host, elsewhere a line for each step."""

    def __init__(self, console: Any, hosts: Sequence[Host]):
        self._console, self._live = console, None
        self._steps = {host.label: ("", "checking") for host in hosts}
        self._since = dict.fromkeys(self._steps, time.monotonic())

    def __enter__(self) -> "SetupProgress":
        if self._console.is_terminal:
            from tpuswarm.train.process.live_region import LiveRegion

            self._live = LiveRegion(get_renderable=self._draw, console=self._console, refresh_per_second=4)  # type: ignore[assignment]
            self._live.start()  # type: ignore[attr-defined]
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def set_step(self, host: Host, step: str, state: str) -> None:
        """Show the state of a step, or of the whole host if the step is empty."""
        self._steps[host.label] = (step, state)
        self._since[host.label] = time.monotonic()
        if self._live is None:
            echo(f"{host.label}: {step + ': ' if step else ''}{state}")

    def _draw(self) -> Any:
        from rich.table import Table

        now = time.monotonic()
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, min_width=max(map(len, self._steps), default=0))
        for width in (14, 8):
            table.add_column(no_wrap=True, max_width=width)
        table.add_column(no_wrap=True, overflow="ellipsis")
        labels = sorted(self._steps, key=lambda label: self._steps[label] == ("", "done"))
        for label in labels[:MAX_ROWS]:
            step, state = self._steps[label]
            colour = STATE_COLOURS.get(state if not step else "", "yellow")
            elapsed = "" if not step else f"{now - self._since[label]:.0f} s"
            table.add_row(label, step, elapsed, f"[{colour}]{state.replace('[', '(')}[/]")
        done = sum(step == ("", "done") for step in self._steps.values())
        more = f", {len(labels) - MAX_ROWS} more than shown" if len(labels) > MAX_ROWS else ""
        table.add_row(f"{done} of {len(labels)} done{more}")
        return table
