"""`tpuswarm sync` and `copy`: files to machines and back."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import FleetOption, Yes, make_console
from tpuswarm.cli.machine.setup import finish, some_of
from tpuswarm.errors import InputError
from tpuswarm.train.process.echo import hidden
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.remote.host import Host
    from tpuswarm.remote.sync.tree import Change, Tree

MUCH = 100_000_000
"""Bytes above which a person is asked."""
NAMED = 5
"""Files that are named; of more, how many there are."""


def sync(
    where: Annotated[str, typer.Argument(help="NAME, NAME/2, POOL or all.")] = "all",
    fleet: FleetOption = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
) -> None:
    """Send this folder to machines, all at once: what git tracks or does not ignore, skipping what is already there."""
    from tpuswarm.cli.machine.setup import hand_over
    from tpuswarm.fleet.hosts import routes as routes_module
    from tpuswarm.fleet.store import fleets
    from tpuswarm.remote.places import root_of

    asking = Asking(yes or dry_run)
    root = root_of(Path.cwd())
    routes = routes_module.open_routes(fleets.find_fleet(fleet)[0])
    kept = routes.fleet.tree
    tree = kept.take(root, asking.about_new)
    hosts, away = routes.hosts(where)
    for each in away:
        say(f"not now: {each}")
    if not tree.files:
        raise InputError(f"there is nothing to send in {root}: git ignores all of it")
    import asyncio

    outcome = asyncio.run(_send(routes, hosts, tree, asking, dry_run))
    if dry_run:
        say("nothing was sent" if outcome.changed else "there is nothing to send")
        return
    _say(tree, outcome, hosts)
    hand_over(routes)


class NotDone(Exception):
    """A dry run ends before the first change."""


class Asking:
    """Asks a person at most once."""

    def __init__(self, sure: bool):
        self.sure = sure

    def about_new(self, size: int, new: int) -> None:
        """A folder before it is read."""
        if new > MUCH:
            self._ask(f"this folder has {_bytes(size)} that git does not ignore, {_bytes(new)} of it new or changed")

    def about_changes(self, tree: "Tree", changes: "Mapping[Host, Change]") -> None:
        """What would happen on each host."""
        most = max(sum(tree.files[path].size for path in each.send) for each in changes.values())
        if most > MUCH:
            self._ask(f"{_bytes(most)} go to each of {_hosts(changes)}")

    def _ask(self, what: str) -> None:
        from tpuswarm.cli.console import confirm

        if not self.sure:
            say(what)
            confirm(False)
        self.sure = True


async def _send(routes: Any, hosts: "Sequence[Host]", tree: "Tree", asking: Asking, dry_run: bool) -> Any:
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.sync.send import Outcome, send

    console = make_console()
    progress = Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True)
    bar = progress.add_task("", total=None, visible=False)
    planned: dict[Host, Change] = {}

    def agree(changes: "Mapping[Host, Change]") -> None:
        planned.update(changes)
        for line in _planned(tree, changes):
            say(line)
        if dry_run:
            raise NotDone
        asking.about_changes(tree, changes)
        if console.is_terminal:
            picture.enter_context(hidden())
            progress.start()
            picture.callback(progress.stop)

    def told(host: "Host", count: int) -> None:
        progress.update(bar, advance=count, visible=True)

    with ExitStack() as picture:
        async with Connections(routes.key) as connections:
            try:
                return await send(connections, hosts, tree, routes.fleet.tree, agree, told)
            except NotDone:
                return Outcome(changed=planned)


def _planned(tree: "Tree", changes: "Mapping[Host, Change]") -> list[str]:
    """What will be sent, deleted and overwritten, once for all hosts of which it is true."""
    alike: dict[Change, list[Host]] = {}
    for host, change in changes.items():
        alike.setdefault(change, []).append(host)
    lines = []
    for change, hosts in alike.items():
        if change.send:
            size = sum(tree.files[path].size for path in change.send)
            lines.append(f"{_hosts(hosts)}: {_count(len(change.send))}, {_bytes(size)}: {_some(change.send)}")
        if change.delete:
            lines.append(f"{_hosts(hosts)}: deletes {_some(change.delete)}")
        if change.edited:
            lines.append(f"{_hosts(hosts)}: overwrites what was changed there: {_some(change.edited)}")
    return lines


def _say(tree: "Tree", outcome: Any, hosts: "Sequence[Host]") -> None:
    good = len(hosts) - len(outcome.failed)
    what = f"{_count(len(tree.files))}, {_bytes(tree.size)}"
    have = f"{some_of(good, hosts)} {'has' if good == 1 else 'have'} ~/{tree.name} as it is here ({what})"
    before = len(outcome.same)
    already = "" if not before else f"; {before} had it already" if before < good else ", as before"
    finish(have + already, list(outcome.failed.values()), hosts)


def _hosts(hosts: "Sequence[Host] | Mapping[Host, Change]") -> str:
    labels = [each.label for each in hosts]
    return labels[0] if len(labels) == 1 else f"{len(labels)} hosts"


def _count(number: int) -> str:
    return f"{number:,} file{'s' * (number != 1)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A path here, or WHERE:path on machines.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A path here, or WHERE:path on machines.")],
    fleet: FleetOption = None,
) -> None:
    """Copy a file or folder to machines or from them: WHERE is NAME, NAME/2, POOL or all, a path begins at the home.

    From a pool, all or a slice, each host's goes into a folder of its name. What arrived before a lost connection
    stays.
    """
    from tpuswarm.fleet.hosts import routes as routes_module
    from tpuswarm.fleet.store import fleets
    from tpuswarm.remote.copy import get, name_of, put, split

    (from_where, from_path), (to_where, to_path) = split(source), split(target)
    if (from_where is None) == (to_where is None):
        raise InputError("copy goes to machines or from them: one of SRC and DST is WHERE:path, as node-1:data")
    here = Path(from_path if from_where is None else to_path)
    if from_where is None and not here.exists():
        raise InputError(f"there is no file or folder {here}")
    if from_where is not None and not from_path:
        raise InputError(f"name what to copy from {from_where}, as in {from_where}:runs")
    routes = routes_module.open_routes(fleets.find_fleet(fleet)[0])
    hosts, away, group = routes.find(from_where or to_where or "")[:3]
    for each in away:
        say(f"not now: {each}")
    apart = from_where is not None and (group or len(hosts) > 1)

    async def one(connections: Any, host: "Host", told: Any) -> int:
        if from_where is None:
            return await put(connections, host, here, to_path, told)
        to = here / host.label.replace("/", "-") / name_of(from_path) if apart else here
        return await get(connections, host, from_path, to, told)

    import asyncio

    found = asyncio.run(_copy(routes.key, hosts, one))
    counts = [each for each in found if isinstance(each, int)]
    files, on = _count(max(counts, default=0)), some_of(len(counts), hosts)
    if from_where is None:
        said = f"{files} copied to {to_path or 'the home'} of {on}"
    else:
        said = f"{files} copied from {on} to {here}{', a folder for each host' if apart else ''}"
    finish(said if counts else "nothing was copied", [each for each in found if isinstance(each, Exception)], hosts)


async def _copy(key: Path, hosts: "Sequence[Host]", one: Any) -> Any:
    from rich.progress import Progress, TextColumn, TransferSpeedColumn

    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.fan_out import fan_out

    console = make_console()
    columns = (TextColumn("{task.fields[size]} copied"), TransferSpeedColumn())
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with hidden() if console.is_terminal else nullcontext(), shown as progress:
        bar = progress.add_task("", total=None, size="0 B")
        done = 0

        def told(count: int) -> None:
            nonlocal done
            done += count
            progress.update(bar, completed=done, size=_bytes(done))

        async with Connections(key) as connections:
            return await fan_out(hosts, lambda host: one(connections, host, told))
