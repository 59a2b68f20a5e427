"""`tpuswarm exec` and `ssh`: programs on the machines of a fleet, for as long as one attends to them."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import FleetOption
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import at_once, say

if TYPE_CHECKING:
    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.remote.everywhere import Endings
    from tpuswarm.remote.host import Host

Where = Annotated[str, typer.Argument(metavar="WHERE", help="NAME, NAME/2 (a worker), POOL or all.")]
Words = Annotated[
    list[str], typer.Argument(metavar="-- CMD", help="One word: a line of the shell. Several: as they are.")
]
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
DRAWN = 0.5
"""Seconds between two looks at who is waited for."""


def exec_(
    where: Where,
    words: Words,
    time_out: Annotated[
        str | None, typer.Option("--time-out", help="End it on a host where it takes longer: 30s, 5m.")
    ] = None,
    detached: Annotated[
        bool, typer.Option("--detach", help="As a job: it goes on without this computer.", rich_help_panel="Jobs")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="What the job is called.", rich_help_panel="Jobs")] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            "--restart",
            help="When it runs again: preempted (default: its machine was lost), always (until it exits 0), never.",
            rich_help_panel="Jobs",
        ),
    ] = None,
    failures: Annotated[
        int, typer.Option("--failures", help="How many of its own failures are forgiven.", rich_help_panel="Jobs")
    ] = 0,
    alive_for: Annotated[
        str | None,
        typer.Option(
            "--alive-for", help="End it and run it again where it prints nothing for so long.", rich_help_panel="Jobs"
        ),
    ] = None,
    fleet: FleetOption = None,
) -> None:
    """Run a command on all workers at once: their lines as they come, each with its host's name, and one summary.

    The command gets no input. Ctrl-C ends it on all hosts, with all that it has started; Ctrl-C again at once.
    With --detach it is a job, which is kept running on every worker of its machines, whoever comes and goes.
    """
    if detached:
        from tpuswarm.cli.machine.jobs import detach

        if time_out is not None:
            raise InputError("--time-out is for a command that is waited for, and --detach for a job: give one of both")
        detach(where, words, name, restart, failures, alive_for, fleet)
        return
    if name or restart or failures or alive_for:
        raise InputError("--name, --restart, --failures and --alive-for are a job's: give --detach too")
    from tpuswarm.config.units import check_number, parse_seconds

    limit = None if time_out is None else parse_seconds(time_out, "--time-out")
    if limit is not None:
        check_number(limit, "--time-out", above=0)
    routes, hosts = find_hosts(where, fleet)
    endings = attend(routes, hosts, words, limit)
    if endings.interrupted:
        raise KeyboardInterrupt
    raise typer.Exit(endings.code)


def ssh(
    name: Annotated[str, typer.Argument(metavar="NAME[/WORKER]", help="A machine; without a worker its first.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[-- CMD]", help="Instead of a shell.")] = None,
    fleet: FleetOption = None,
) -> None:
    """Log in to a machine with your own OpenSSH: in tmux where it is there, so that a lost connection loses nothing.

    Comes back by itself after a lost connection, also where the machine has another address by then.
    """
    from tpuswarm.cli.machine.ssh import log_in

    raise typer.Exit(log_in(name, words or [], fleet))


def find_hosts(where: str, fleet: str | None) -> "tuple[Routes, list[Host]]":
    """The way to a fleet, and the hosts of it that are meant; what is meant and away is said."""
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.store import fleets

    routes = open_routes(fleets.find_fleet(fleet)[0])
    hosts, away = routes.hosts(where)
    for each in away:
        say(f"left out: {each}", err=True)
    return routes, hosts


def attend(routes: "Routes", hosts: "list[Host]", words: list[str], time_out_s: float | None) -> "Endings":
    """Run a command on hosts, print what they say and the summary."""
    import asyncio

    from tpuswarm.remote.attended import line_of
    from tpuswarm.remote.everywhere import Everywhere, log_folder
    from tpuswarm.remote.places import as_set_up, there

    folder = there(Path.cwd())

    def line(host: "Host") -> str:
        return as_set_up(line_of(words), folder, host.exports)

    logs = log_folder(routes.fleet.folder / "exec")
    screen = Screen([host.label for host in hosts])
    everywhere = Everywhere(routes.key, logs, screen.lines, screen.tell)
    screen.nobody_reads = everywhere.stop

    async def run() -> "Endings":
        drawing = asyncio.ensure_future(screen.draw(everywhere.waiting))
        try:
            return await everywhere.run(hosts, line, time_out_s)
        finally:
            drawing.cancel()

    endings = asyncio.run(run())
    say(endings.summary(), err=True)
    home = Path.home()
    say(f"logs: {Path('~') / logs.relative_to(home) if logs.is_relative_to(home) else logs}", err=True)
    return endings


class Screen:
    """What hosts print, line by line, each in one piece; on a terminal also who is waited for."""

    def __init__(self, labels: list[str]):
        width = max(map(len, labels))
        coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._tags: dict[str, bytes] = {}
        for number, label in enumerate(labels):
            tag = f"{label:<{width}} │ "
            self._tags[label] = (typer.style(tag, fg=COLOURS[number % len(COLOURS)]) if coloured else tag).encode()
        self._closed = False
        self.nobody_reads: Callable[[], None] = lambda: None
        """Called when nobody reads any more what is printed."""

    def lines(self, label: str, lines: list[bytes], is_error: bool) -> None:
        """Whole lines of a host."""
        if self._closed:
            return
        stream, tag = sys.stderr if is_error else sys.stdout, self._tags[label]
        if stream.isatty():  # of what a progress bar has drawn into one line, what would be seen of it
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        try:
            stream.buffer.write(b"".join(tag + line + b"\n" for line in lines))
            stream.buffer.flush()
        except BrokenPipeError:
            self._closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            self.nobody_reads()

    def tell(self, text: str) -> None:
        """What is said beside them."""
        if not self._closed:
            say(text, err=True)

    async def draw(self, waiting: Mapping[str, object]) -> None:
        """On a terminal, say for whom is waited."""
        import asyncio

        began = time.monotonic()
        while True:
            await asyncio.sleep(DRAWN)
            if waiting and not self._closed:
                text = f"{time.monotonic() - began:.0f} s, waiting for {len(waiting)}: {', '.join([*waiting][:20])}"
                at_once(text[: shutil.get_terminal_size().columns - 3])
