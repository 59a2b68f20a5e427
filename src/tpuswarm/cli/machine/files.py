"""`tpuswarm sync` and `copy`: send files to machines, and fetch them."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm.cli.console import FleetOption, Yes, confirm, make_console
from tpuswarm.cli.machine.setup import describe_hosts, print_outcome, update_head_keeper
from tpuswarm.config.formatting import format_bytes
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.store.fleets import Fleet, find_fleet
from tpuswarm.remote.connect import Connections, fan_out
from tpuswarm.remote.copy import base_name, download, split_location, upload
from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import find_project_root
from tpuswarm.remote.sync.send import Change, Outcome, send
from tpuswarm.remote.sync.tree_store import Tree
from tpuswarm.train.process.live_region import hidden_input
from tpuswarm.train.process.terminal import echo

CONFIRM_ABOVE_BYTES = 100_000_000
MAX_NAMED_FILES = 5


def sync(
    where: Annotated[str, typer.Argument(help="NAME, NAME/2, POOL or all.")] = "all",
    fleet: FleetOption = None,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent, send nothing.")] = False,
) -> None:
    """Send this folder to machines, all at once: the files that git does not ignore, without those already there."""
    routes = open_routes(find_fleet(fleet)[0])
    if send_folder(routes, where, SizeConfirmation(yes or dry_run), dry_run):
        update_head_keeper(routes)


def store_folder(fleet: Fleet, confirmation: "SizeConfirmation") -> Tree:
    """Store a copy of this folder's files, which new machines get before a job runs there."""
    root = find_project_root(Path.cwd())
    tree = fleet.tree_store.take(root, confirmation.check_folder)
    if not tree.files:
        raise InputError(f"nothing to send: git ignores everything in {root}")
    return tree


def send_folder(routes: Routes, where: str, confirmation: "SizeConfirmation", dry_run: bool = False) -> bool:
    """Send this folder to machines, and return whether it was sent. Raise RunFailed if a machine does not get it."""
    hosts, unreachable = routes.hosts(where)
    tree = store_folder(routes.fleet, confirmation)
    for reason in unreachable:
        echo(f"not now: {reason}")
    outcome = asyncio.run(_send(routes, hosts, tree, confirmation, dry_run))
    if dry_run:
        echo("nothing was sent" if outcome.changed else "nothing to send")
        return False
    good = len(hosts) - len(outcome.failed)
    have = f"{describe_hosts(good, hosts)} {'has' if good == 1 else 'have'} ~/{tree.name}"
    unchanged = len(outcome.same)
    suffix = "" if not unchanged else f"; {unchanged} had it already" if unchanged < good else ", as before"
    summary = f"{have} as it is here ({_count_files(len(tree.files))}, {format_bytes(tree.size)}){suffix}"
    print_outcome(summary, list(outcome.failed.values()), hosts)
    return True


class SizeConfirmation:
    """Asks before much is sent, at most once."""

    def __init__(self, is_given: bool):
        self._is_given = is_given

    def check_folder(self, size_bytes: int, new_bytes: int) -> None:
        """Check a folder before it is read."""
        if new_bytes > CONFIRM_ABOVE_BYTES:
            size, new = format_bytes(size_bytes), format_bytes(new_bytes)
            self._confirm(f"this folder has {size} that git does not ignore, {new} new or changed")

    def check_changes(self, tree: Tree, changes: Mapping[Host, Change]) -> None:
        """Check what would be sent to each host."""
        most_bytes = max(sum(tree.files[path].size for path in change.send) for change in changes.values())
        if most_bytes > CONFIRM_ABOVE_BYTES:
            self._confirm(f"{format_bytes(most_bytes)} go to {_name_hosts([*changes])}")

    def _confirm(self, text: str) -> None:
        if not self._is_given:
            echo(text)
            confirm(False)
        self._is_given = True


async def _send(
    routes: Routes, hosts: Sequence[Host], tree: Tree, confirmation: SizeConfirmation, dry_run: bool
) -> Outcome:
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    console = make_console()
    progress = Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True)
    bar = progress.add_task("", total=None, visible=False)

    def confirm_changes(changes: Mapping[Host, Change]) -> bool:
        for line in _describe_changes(tree, changes):
            echo(line)
        if dry_run:
            return False
        confirmation.check_changes(tree, changes)
        if console.is_terminal:
            stack.enter_context(hidden_input())
            progress.start()
            stack.callback(progress.stop)
        return True

    def advance(host: Host, count: int) -> None:
        progress.update(bar, advance=count, visible=True)

    with ExitStack() as stack:
        async with Connections(routes.key) as connections:
            return await send(connections, hosts, tree, routes.fleet.tree_store, confirm_changes, advance)


def _describe_changes(tree: Tree, changes: Mapping[Host, Change]) -> list[str]:
    """Describe the changes, once for all hosts with the same change."""
    hosts_by_change: dict[Change, list[Host]] = {}
    for host, change in changes.items():
        hosts_by_change.setdefault(change, []).append(host)
    lines = []
    for change, hosts in hosts_by_change.items():
        names = _name_hosts(hosts)
        if change.send:
            size = format_bytes(sum(tree.files[path].size for path in change.send))
            lines.append(f"{names}: {_count_files(len(change.send))}, {size}: {_name_files(change.send)}")
        if change.delete:
            lines.append(f"{names}: deletes {_name_files(change.delete)}")
        if change.edited:
            lines.append(f"{names}: overwrites changes made there: {_name_files(change.edited)}")
    return lines


def _name_hosts(hosts: Sequence[Host]) -> str:
    return hosts[0].label if len(hosts) == 1 else f"{len(hosts)} hosts"


def _count_files(count: int) -> str:
    return f"{count:,} file{'s' * (count != 1)}"


def _name_files(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED_FILES:,} more" if len(names) > MAX_NAMED_FILES else ""
    return f"{', '.join(names[:MAX_NAMED_FILES])}{more}"


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A local path, or WHERE:path on machines.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A local path, or WHERE:path on machines.")],
    fleet: FleetOption = None,
) -> None:
    """Copy a file or folder to or from machines: WHERE is NAME, NAME/2, POOL or all; paths start at the home.

    From several hosts, the files of each go to a folder with its name. After a lost connection, copied files stay.
    """
    (from_where, from_path), (to_where, to_path) = split_location(source), split_location(target)
    if (from_where is None) == (to_where is None):
        raise InputError("exactly one of SRC and DST is on machines, as WHERE:path, such as node-1:data")
    here = Path(from_path if from_where is None else to_path)
    if from_where is None and not here.exists():
        raise InputError(f"there is no file or folder {here}")
    if from_where is not None and not from_path:
        raise InputError(f"name the path to copy from {from_where}, such as {from_where}:runs")
    routes = open_routes(find_fleet(fleet)[0])
    hosts, unreachable, is_group = routes.find(from_where or to_where or "")[:3]
    for reason in unreachable:
        echo(f"not now: {reason}")
    has_folders = from_where is not None and (is_group or len(hosts) > 1)

    async def copy_one(connections: Connections, host: Host, advance: Any) -> int:
        if from_where is None:
            return await upload(connections, host, here, to_path, advance)
        to = here / host.label.replace("/", "-") / base_name(from_path) if has_folders else here
        return await download(connections, host, from_path, to, advance)

    results = asyncio.run(_copy_all(routes.key, hosts, copy_one))
    counts = [result for result in results if isinstance(result, int)]
    files, on = _count_files(max(counts, default=0)), describe_hosts(len(counts), hosts)
    if from_where is None:
        summary = f"{files} copied to {to_path or 'the home'} of {on}"
    else:
        summary = f"{files} copied from {on} to {here}{', a folder for each host' if has_folders else ''}"
    errors = [result for result in results if isinstance(result, Exception)]
    print_outcome(summary if counts else "nothing was copied", errors, hosts)


async def _copy_all(key: Path, hosts: Sequence[Host], copy_one: Any) -> Any:
    from rich.progress import Progress, TextColumn, TransferSpeedColumn

    console = make_console()
    columns = (TextColumn("{task.fields[size]} copied"), TransferSpeedColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with hidden_input() if console.is_terminal else nullcontext(), bars as progress:
        bar = progress.add_task("", total=None, size="0 B")
        copied_bytes = 0

        def advance(count: int) -> None:
            nonlocal copied_bytes
            copied_bytes += count
            progress.update(bar, completed=copied_bytes, size=format_bytes(copied_bytes))

        async with Connections(key) as connections:
            return await fan_out(hosts, lambda host: copy_one(connections, host, advance))
