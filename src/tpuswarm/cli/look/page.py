"""`tpuswarm page`: a run and its fleet in a browser."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.watch.page.live import Subject

PORT = 8787


def page(
    of: Annotated[
        str | None, typer.Argument(metavar="[RUN|FILE]", help="A run, or swarm.toml: its fleet and its run.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="On loopback.")] = PORT,
) -> None:
    """Show a run and its fleet on a live web page of this computer, and to Prometheus at /metrics. Ctrl-C ends it.

    Without an argument: ./swarm.toml and its run, else the run of ./runs used last. A fleet without a run of its own
    comes with that one too.
    """
    import asyncio

    from tpuswarm.train.process.waiting import waiting
    from tpuswarm.watch.page.guard import LOOPBACK, page_token
    from tpuswarm.watch.page.live import Live
    from tpuswarm.watch.page.server import listener, serve

    subject = _subject(of)
    listens = listener(port)
    token = page_token()

    async def work() -> None:
        live = Live(subject)
        with waiting(f"looking at {subject.run or of or 'the fleet'}"):
            await asyncio.to_thread(live.open)
        url = f"http://{LOOPBACK}:{port}/?token={token}"
        await serve(live, listens, token, lambda: say(f"{url}\nkeep this URL secret; Ctrl-C stops the page"))

    try:
        asyncio.run(work())
    finally:
        listens.close()


def _subject(of: str | None) -> "Subject":
    """Raises InputError for what there is not."""
    from tpuswarm.cli.fleet.training_view import training_here
    from tpuswarm.cli.fleet.view import look_at
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.spec.file import DEFAULT_FILE, asks_for_machines, read_swarm
    from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
    from tpuswarm.train.run.listing import find_run, list_runs
    from tpuswarm.train.storage.folders import is_url
    from tpuswarm.watch.page.live import Subject

    path = Path(of) if of is not None and of.endswith(".toml") else DEFAULT_FILE
    if of in (None, str(path)) and (of is not None or asks_for_machines(path)):
        if not asks_for_machines(path):
            raise InputError(f"{path} is no fleet: name a swarm.toml with pools, or a run")
        use_rehearsed_buckets(path)
        training = training_here(None, path)
        fleet, read = look_at(str(path))
        local = next(iter(list_runs(path.parent / "runs")), None) if read_swarm(path).train is None else None
        return Subject(training.url if training else str(local or ""), read, open_routes(fleet))
    run = of or "last"
    if is_url(run):
        if training := training_here(run):
            fleet, read = look_at(None)
            return Subject(run, training.read, open_routes(fleet))
        return Subject(run)
    return Subject(str(find_run(run)))
