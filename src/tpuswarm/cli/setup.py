"""`tpuswarm setup`: what every machine has before anything runs on it."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.runs import make_console
from tpuswarm.errors import InputError, RunFailed

if TYPE_CHECKING:
    from tpuswarm.fleet.reach import Reach
    from tpuswarm.remote.host import Host
    from tpuswarm.remote.setup.plan import Machine
    from tpuswarm.remote.setup.table import Setup

MOST = 14
"""Machines shown on a terminal: those that are not done come first."""


def setup(
    target: Annotated[str | None, typer.Argument(metavar="[FILE|FLEET]", help="Default: swarm.toml.")] = None,
    where: Annotated[str, typer.Option("--on", help="NAME, NAME/2 or POOL.")] = "all",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the steps, and do none.")] = False,
) -> None:
    """Set machines up as [setup] says, all at once: what holds already is left, only what changed runs again."""
    from tpuswarm.fleet.keeping import fleets
    from tpuswarm.fleet.reach import find_reach
    from tpuswarm.fleet.setting_up import Kept

    fleet, file = fleets.find(target)
    table = file.setup if file else Kept(fleet).table()
    if table is None:
        raise InputError(f"{target or 'swarm.toml'} has no [setup]: docs/fleet.md shows what may be in it")
    if dry_run:
        _print_steps(table)
        return
    set_up_now(find_reach(fleet), table, where)


def set_up_now(reach: "Reach", table: "Setup", where: str = "all") -> None:
    """Set up and show it; RunFailed where not all came to its end."""
    import asyncio

    from tpuswarm.fleet.setting_up import meant

    found = meant(reach, table, where)
    for each in found.away:
        print(f"not now: {each}")
    asyncio.run(_set_up(reach, table, found.machines))


async def _set_up(reach: "Reach", table: "Setup", machines: "Sequence[Machine]") -> None:
    import asyncio

    from tpuswarm.fleet.setting_up import set_up_all

    watching = Watching(make_console(), [each.host for each in machines])
    try:
        with watching:
            outcome = await set_up_all(reach, table, machines, watching.told)
    except asyncio.CancelledError:
        print("interrupted: what was done stays, and the same command goes on from there", file=sys.stderr)
        raise
    for note in outcome.notes:
        print(f"note: {note}")
    for error in outcome.failed.values():
        print(error)
    fresh = sum(bool(each) for each in outcome.done.values())
    said = f"{len(outcome.done)} of {len(machines)} hosts are set up; {len(outcome.done) - fresh} were already"
    if outcome.failed:
        raise RunFailed(said)
    print(said)


def _print_steps(table: "Setup") -> None:
    from tpuswarm.remote.setup.plan import Machine, steps
    from tpuswarm.remote.setup.step import Step

    nobody: Any = None
    secrets = dict.fromkeys(table.secrets, "…")
    found: dict[str, Step] = {}
    for machine in (Machine(nobody, is_server=True, has_disk=True), Machine(nobody, server="SERVER", has_disk=True)):
        found |= {each.id: each for each in steps(table.whole(), machine, secrets)}
    for number, each in enumerate(found.values(), 1):
        print(f"{number}. {each.id}{_about(each.id, table)}")
    print("nothing was done")


def _about(step: str, table: "Setup") -> str:
    """What is in it, in a few words."""
    packages = table.pip or ([str(table.requirements)] if table.requirements else [])
    said = {
        "timezone": table.timezone,
        "nofile": f"{table.nofile} open files",
        "swap": f"{table.swap_gb} GB",
        "data-disk": f"{table.data_disk}, where a data disk is attached",
        "apt": " ".join(table.apt),
        "python": f"{table.python}, from uv",
        "packages": " ".join(packages) or "none",
        "environment": " ".join(table.env) or "the path of that Python",
        "secrets": " ".join(table.secrets),
    }
    if table.nfs:
        said |= {"nfs-server": f"{table.nfs.path} on {table.nfs.server}", "nfs": f"{table.nfs.mount} on all others"}
    return f": {said[step]}" if said.get(step) else ""


class Watching:
    """On a terminal a line for each machine, else one for everything that happens."""

    def __init__(self, console: Any, hosts: "Sequence[Host]"):
        self._console, self._live = console, None
        self._now = {host.label: ("", "asked what it has") for host in hosts}
        self._since = dict.fromkeys(self._now, time.monotonic())

    def __enter__(self) -> "Watching":
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(get_renderable=self._drawn, console=self._console, refresh_per_second=4)  # type: ignore[assignment]
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
            self._console.print(f"{host.label}: {step + ': ' if step else ''}{what}", soft_wrap=True, markup=False)

    def _drawn(self) -> Any:
        from rich.table import Table

        now = time.monotonic()
        table = Table(box=None, pad_edge=False, show_header=False)
        for width in (24, 14, 8):
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
