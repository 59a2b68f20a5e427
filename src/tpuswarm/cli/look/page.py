"""`tpuswarm page`: show a run and its fleet in a browser."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.completion import complete_runs
from tpuswarm.cli.fleet.fleet_training import find_fleet_training
from tpuswarm.cli.fleet.view import open_fleet
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts.routes import open_routes
from tpuswarm.fleet.spec.file import DEFAULT_FILE, asks_for_machines, read_swarm
from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
from tpuswarm.train.process.stop import end_quietly
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import RUNS
from tpuswarm.train.run.listing import find_run, list_runs
from tpuswarm.train.storage.folders import is_url
from tpuswarm.watch.page.guard import LOOPBACK, page_token
from tpuswarm.watch.page.live import LivePage, Subject
from tpuswarm.watch.page.pages import Pages

DEFAULT_PORT = 8787


def page(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|FILE]", help="A run, or swarm.toml: its fleet and its run.", autocompletion=complete_runs
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="On loopback.")] = DEFAULT_PORT,
) -> None:
    """Show a run and its fleet on a live web page of this computer, and to Prometheus at /metrics. Ctrl-C ends it.

    Without an argument: ./swarm.toml and its run, else the run in ./runs that was used last, also if it starts later. A
    fleet without a run of its own comes with that one too.
    """
    from tpuswarm.watch.page.server import open_listener, serve

    found = _find_subject(subject)
    socket = open_listener(port)
    token = page_token()
    end_quietly()

    async def run() -> None:
        live = LivePage(found)
        with waiting(f"reading {found.run or subject or 'the fleet'}"):
            await asyncio.to_thread(live.open)
        url = f"http://{LOOPBACK}:{port}/?token={token}"
        await serve(Pages(live), socket, token, lambda: echo(f"{url}\nkeep this URL secret; Ctrl-C stops the page"))

    try:
        asyncio.run(run())
    finally:
        socket.close()


def _find_subject(name: str | None) -> Subject:
    path = Path(name) if name is not None and name.endswith(".toml") else DEFAULT_FILE
    if name in (None, str(path)) and (name is not None or asks_for_machines(path)):
        if not asks_for_machines(path):
            raise InputError(f"{path} is not a fleet's file; name a swarm.toml with pools, or a run")
        use_rehearsed_buckets(path)
        training = find_fleet_training(None, path)
        fleet, read = open_fleet(str(path))
        runs = path.parent / RUNS
        if training or read_swarm(path).train is not None:
            return Subject(training.url if training else "", read=read, routes=open_routes(fleet))
        newest = next(iter(list_runs(runs)), None)
        return Subject(str(newest or ""), runs, is_newest=True, read=read, routes=open_routes(fleet))
    run = name or "last"
    if not is_url(run):
        return Subject(str(find_run(run)), RUNS, is_newest=run == "last")
    if training := find_fleet_training(run):
        fleet, _ = open_fleet(None)
        return Subject(run, read=training.read_fleet, routes=open_routes(fleet))
    return Subject(run)
