"""`tpuswarm setup`: what every machine has before anything runs on it."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import make_console
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.fleet.store.fleets import Store
    from tpuswarm.remote.host import Host
    from tpuswarm.remote.setup.plan import Machine
    from tpuswarm.remote.setup.table import Setup

MOST = 14
"""Machines shown on a terminal: those that are not done come first."""


def setup(
    target: Annotated[str | None, typer.Argument(metavar="[FILE|FLEET]", help="Default: swarm.toml.")] = None,
    where: Annotated[str, typer.Option("--on", help="NAME, NAME/2 or POOL.")] = "all",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps, do nothing.")] = False,
) -> None:
    """Set machines up as [setup] says, all at once. Steps that are done are skipped, changed ones run again."""
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.hosts.setup import SavedSetup
    from tpuswarm.fleet.store import fleets

    fleet, file = fleets.find_fleet(target)
    table = file.setup if file else SavedSetup(fleet).table()
    if table is None:
        raise InputError(f"{target or 'swarm.toml'} has no [setup]: docs/set-up.md lists its keys, with an example")
    if dry_run:
        _print_steps(table, file is not None and any(each.role == "router" for each in file.vm))
        return
    routes = open_routes(fleet)
    set_up_now(routes, table, where)
    hand_over(routes)


def set_up_now(routes: "Routes", table: "Setup", where: str = "all") -> None:
    """Set up and show it; RunFailed where not all came to its end."""
    import asyncio

    from tpuswarm.fleet.hosts.setup import find_setup_targets

    found = find_setup_targets(routes, table, where)
    for each in found.away:
        say(f"not now: {each}")
    asyncio.run(_set_up(routes, table, found.machines))


def seat_now(routes: "Routes", store: "Store") -> None:
    """Put the keeper on the head, show it, and see it lead; hands over what this computer knows."""
    import asyncio

    asyncio.run(_seat(routes, store))


def route_now(routes: "Routes") -> None:
    """Apply and tune the fleet's routers, where it has any, and say what their ports lead to."""
    import asyncio

    from tpuswarm.fleet.hosts.routers import configure_routers, router_hosts

    hosts = router_hosts(routes)
    if not hosts:
        return
    with Watching(make_console(), hosts) as watching:
        ports = asyncio.run(configure_routers(routes, hosts, watching.told))
    numbers = f"ports {min(ports)} to {max(ports)} lead" if len(ports) > 1 else f"port {min(ports)} leads"
    for host in hosts:
        say(f"{host.label.partition('/')[0]} routes: its {numbers} to SSH; `tpuswarm router show --from` lists them")


def hand_over(routes: "Routes") -> None:
    """Let a keeper on the head know what this computer has kept for machines that come later."""
    desired = routes.snapshot().document.desired
    if desired.kept_on is not None and desired.down is None:
        import asyncio

        from tpuswarm.fleet.keeper.head_keeper import install_head_keeper

        try:
            asyncio.run(install_head_keeper(routes))
        except TpuswarmError as error:
            say(f"note: the keeper on {desired.keeper_machine} does not know of it yet: {error}", err=True)
        else:
            say(f"the keeper on {desired.keeper_machine} knows of it too")


async def _seat(routes: "Routes", store: "Store") -> None:
    from tpuswarm.fleet.keeper.head_keeper import install_head_keeper, wait_for_head_keeper
    from tpuswarm.train.process.waiting import waiting

    with Watching(make_console(), []) as watching:
        host = await install_head_keeper(routes, watching.told)
    with waiting(f"waiting until the keeper on {host.label.partition('/')[0]} leads"):
        await wait_for_head_keeper(routes, store, host)


async def _set_up(routes: "Routes", table: "Setup", machines: "Sequence[Machine]") -> None:
    import asyncio

    from tpuswarm.fleet.hosts.setup import set_up_all

    watching = Watching(make_console(), [each.host for each in machines])
    try:
        with watching:
            outcome = await set_up_all(routes, table, machines, watching.told)
    except asyncio.CancelledError:
        say("interrupted: what was done stays, and the same command goes on from there", err=True)
        raise
    for note in outcome.notes:
        say(f"note: {note}")
    good, before = len(outcome.done), sum(not each for each in outcome.done.values())
    already = "" if not before else f"; {before} had all of it" if before < good else ", as before"
    hosts = [each.host for each in machines]
    said = f"{some_of(good, hosts)} {'is' if good == 1 else 'are'} set up{already}"
    finish(said, list(outcome.failed.values()), hosts)


def some_of(good: int, hosts: "Sequence[Host]") -> str:
    """`node-1/0`, `all 5 hosts`, `4 of 5 hosts`."""
    if len(hosts) == 1:
        return hosts[0].label
    return f"all {good:,} hosts" if good == len(hosts) else f"{good:,} of {len(hosts):,} hosts"


def finish(said: str, errors: "Sequence[Exception]", hosts: "Sequence[Host]") -> None:
    """Say what came of it on all hosts, or raise it where something went wrong on one; of a single host its error."""
    if len(hosts) == 1 and errors:
        raise errors[0]
    for error in errors:
        say(str(error))
    if errors:
        raise RunFailed(said)
    say(said)


def _print_steps(table: "Setup", routed: bool) -> None:
    from tpuswarm.remote.setup.plan import Machine, steps
    from tpuswarm.remote.setup.step import Step

    nobody: Any = None
    secrets = dict.fromkeys(table.secrets, "…")
    found: dict[str, Step] = {}
    settings = (("", ""),) if routed else ()
    for is_server, server in ((True, None), (False, "SERVER")):
        machine = Machine(nobody, is_server, server, has_disk=True, settings=settings)
        found |= {each.id: each for each in steps(table.whole(), machine, secrets)}
    for number, each in enumerate(found.values(), 1):
        say(f"{number}. {each.id}{_about(each.id, table)}", hang=3)
    say("nothing was done")


def _about(step: str, table: "Setup") -> str:
    """What is in it, in a few words."""
    packages = table.pip or ([str(table.requirements)] if table.requirements else [])
    said = {
        "network": "buffers of the kernel, on TPUs behind the router",
        "timezone": table.timezone,
        "nofile": f"{table.nofile} open files",
        "swap": f"{table.swap_gb} GB",
        "data-disk": f"{table.data_disk}, where a data disk is attached",
        "apt": " ".join(table.apt),
        "python": f"{table.python}, from uv",
        "packages": " ".join(packages) or "none",
        "environment": " ".join(table.env) or "the path of that Python",
        "secrets": " ".join(table.secrets),
        "notebook": "Jupyter, in an environment of its own",
    }
    if table.nfs:
        said |= {"nfs-server": f"{table.nfs.path} on {table.nfs.server}", "nfs": f"{table.nfs.mount} on all others"}
        said["nfs-clients"] = "all others may mount it, and nobody else"
    return f": {said[step]}" if said.get(step) else ""


class Watching:
    """On a terminal a line for each machine, else one for everything that happens."""

    def __init__(self, console: Any, hosts: "Sequence[Host]"):
        self._console, self._live = console, None
        self._now = {host.label: ("", "asked what it has") for host in hosts}
        self._since = dict.fromkeys(self._now, time.monotonic())

    def __enter__(self) -> "Watching":
        if self._console.is_terminal:
            from tpuswarm.train.process.drawn import Drawn

            self._live = Drawn(get_renderable=self._drawn, console=self._console, refresh_per_second=4)  # type: ignore[assignment]
            self._live.start()  # type: ignore[attr-defined]
        return self

    def __exit__(self, *about: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def told(self, host: "Host", step: str, what: str) -> None:
        """What is up with a step on a host."""
        self._now[host.label] = (step, what)
        self._since[host.label] = time.monotonic()
        if self._live is None:
            say(f"{host.label}: {step + ': ' if step else ''}{what}")

    def _drawn(self) -> Any:
        from rich.table import Table

        now = time.monotonic()
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, min_width=max(map(len, self._now), default=0))
        for width in (14, 8):
            table.add_column(no_wrap=True, max_width=width)
        table.add_column(no_wrap=True, overflow="ellipsis")
        busy = sorted(self._now, key=lambda label: self._now[label] == ("", "done"))
        for label in busy[:MOST]:
            step, what = self._now[label]
            color = {"done": "green", "failed": "red"}.get(what if not step else "", "yellow")
            seconds = "" if not step else f"{now - self._since[label]:.0f} s"
            table.add_row(label, step, seconds, f"[{color}]{what.replace('[', '(')}[/]")
        done = sum(each == ("", "done") for each in self._now.values())
        more = f", {len(busy) - MOST} more than shown" if len(busy) > MOST else ""
        table.add_row(f"{done} of {len(busy)} done{more}")
        return table
