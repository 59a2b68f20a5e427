"""`tpuswarm exec`: run a command on machines and print its output, or start a job."""

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm.cli.console import FleetOption
from tpuswarm.cli.machine.jobs import start_job
from tpuswarm.config.units import check_number, parse_seconds
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import command_line, in_environment, remote_folder
from tpuswarm.remote.run_on_hosts import CommandResult, ParallelCommand, make_log_folder
from tpuswarm.train.process.terminal import echo, print_temporary_line

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
REDRAW_INTERVAL_S = 0.5
MAX_NAMED_HOSTS = 20


def _job_option(flag: str, text: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="Jobs")


def exec_(
    where: Annotated[str, typer.Argument(metavar="WHERE", help="NAME, NAME/2 (a worker), POOL or all.")],
    words: Annotated[
        list[str], typer.Argument(metavar="-- CMD", help="One word: a line of shell. Several: a program and arguments.")
    ],
    time_out: Annotated[str | None, typer.Option(help="End it on a host after this time: 30s, 5m.")] = None,
    detached: Annotated[bool, _job_option("--detach", "Start a job, which survives this computer.")] = False,
    name: Annotated[str | None, _job_option("--name", "Name of the job.")] = None,
    restart: Annotated[
        str | None,
        _job_option(
            "--restart",
            "When to run it again: preempted (default: its machine was lost), always (until exit 0), never.",
        ),
    ] = None,
    failures: Annotated[int, _job_option("--failures", "How many failures to allow.")] = 0,
    alive_for: Annotated[
        str | None, _job_option("--alive-for", "Restart it if it prints nothing for this long.")
    ] = None,
    fleet: FleetOption = None,
) -> None:
    """Run a command on all workers at once: prints each line with its host's name, and a summary.

    The command gets no input. Ctrl-C ends it on all hosts with all programs it started, a second Ctrl-C at once.
    With --detach it is a job, which runs on every worker of its machines, also on those created later.
    """
    if detached:
        if time_out is not None:
            raise InputError("--time-out does not work with --detach")
        start_job(where, words, name, restart, failures, alive_for, fleet)
        return
    if name or restart or failures or alive_for:
        raise InputError("--name, --restart, --failures and --alive-for need --detach")
    time_out_s = None if time_out is None else parse_seconds(time_out, "--time-out")
    if time_out_s is not None:
        check_number(time_out_s, "--time-out", above=0)
    routes, hosts = find_hosts(where, fleet)
    result = run_on_hosts(routes, hosts, words, time_out_s)
    if result.is_interrupted:
        raise KeyboardInterrupt
    raise typer.Exit(result.code)


def find_hosts(where: str, fleet: str | None) -> tuple[Routes, list[Host]]:
    """Return the routes of a fleet and the hosts that `where` names; print unreachable ones."""
    routes = open_routes(find_fleet(fleet)[0])
    hosts, unreachable = routes.hosts(where)
    for reason in unreachable:
        echo(f"left out: {reason}", err=True)
    return routes, hosts


def run_on_hosts(routes: Routes, hosts: list[Host], words: list[str], time_out_s: float | None) -> CommandResult:
    """Run a command on hosts; print its output and a summary."""
    folder = remote_folder(Path.cwd())
    logs = make_log_folder(routes.fleet.folder / "exec")
    output = HostOutput([host.label for host in hosts])
    command = ParallelCommand(routes.key, logs, output.print_lines, output.print_note)
    output.on_closed = command.stop

    async def run() -> CommandResult:
        drawing = asyncio.ensure_future(output.draw_progress(command.waiting))
        try:
            return await command.run(
                hosts, lambda host: in_environment(command_line(words), folder, host.exports), time_out_s
            )
        finally:
            drawing.cancel()

    result = asyncio.run(run())
    echo(result.summary(), err=True)
    home = Path.home()
    echo(f"logs: {Path('~') / logs.relative_to(home) if logs.is_relative_to(home) else logs}", err=True)
    return result


class HostOutput:
    """Prints whole lines of hosts behind their names; on a terminal also which hosts are still running."""

    def __init__(self, labels: list[str]):
        width = max(map(len, labels))
        is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._tags: dict[str, bytes] = {}
        for number, label in enumerate(labels):
            tag = f"{label:<{width}} │ "
            self._tags[label] = (typer.style(tag, fg=COLOURS[number % len(COLOURS)]) if is_coloured else tag).encode()
        self._is_closed = False
        self.on_closed: Callable[[], None] = lambda: None
        """Called when the reader of the output has ended."""

    def print_lines(self, label: str, lines: list[bytes], is_error: bool) -> None:
        if self._is_closed:
            return
        stream, tag = sys.stderr if is_error else sys.stdout, self._tags[label]
        if stream.isatty():  # keep only the last state of a progress bar
            lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        try:
            stream.buffer.write(b"".join(tag + line + b"\n" for line in lines))
            stream.buffer.flush()
        except BrokenPipeError:
            self._is_closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            self.on_closed()

    def print_note(self, text: str) -> None:
        if not self._is_closed:
            echo(text, err=True)

    async def draw_progress(self, waiting: Mapping[str, object]) -> None:
        start = time.monotonic()
        while True:
            await asyncio.sleep(REDRAW_INTERVAL_S)
            if waiting and not self._is_closed:
                names = ", ".join([*waiting][:MAX_NAMED_HOSTS])
                text = f"{time.monotonic() - start:.0f} s, waiting for {len(waiting)}: {names}"
                print_temporary_line(text[: shutil.get_terminal_size().columns - 3])
