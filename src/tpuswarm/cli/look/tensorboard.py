"""`tpuswarm tensorboard`: the curves of runs of this computer, of machines and of buckets, together."""

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import FleetOption
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from asyncio import Future
    from asyncio.subprocess import Process

    from tpuswarm.fleet.hosts.routes import Routes
    from tpuswarm.remote.connect import Connections
    from tpuswarm.remote.host import Host
    from tpuswarm.watch.boards import Source

PORT = 6006
LOOK = 5.0
"""Seconds between two looks for what is new; TensorBoard looks as often."""
ENDS_S = 5.0
"""Seconds that TensorBoard has to end when it is asked to."""
KEPT = 1 << 12
"""Bytes of what it says last."""


def tensorboard(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN…]", help="Runs, gs://BUCKET/FOLDER, NAME:FOLDER on a machine. Default: ./runs."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="On loopback.")] = PORT,
    fleet: FleetOption = None,
) -> None:
    """Show the curves of runs in TensorBoard: of this computer, of machines and of buckets, together.

    A swarm's run has a curve for each member. What is on a machine comes through SSH, as it is written. Ctrl-C ends it.
    """
    import asyncio
    import tempfile

    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("TensorBoard is not installed: pip install 'tpuswarm[tensorboard]' (it needs no TensorFlow)")
    from tpuswarm.watch.page.server import listener

    listener(port).close()  # TensorBoard would say it in many words
    routes = _routes(fleet) if any(_far(each) for each in runs or ()) else None
    with tempfile.TemporaryDirectory(prefix="tpuswarm-tensorboard-") as name:
        asyncio.run(_work(runs or [], port, routes, Path(name)))


def _far(run: str) -> re.Match[str] | None:
    """NAME:FOLDER or NAME/2:FOLDER of a machine."""
    return None if "://" in run or Path(run).exists() else re.fullmatch(r"([\w.-]+(?:/\d+)?):(.+)", run)


def _routes(fleet: str | None) -> "Routes":
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.store import fleets

    return open_routes(fleets.find_fleet(fleet)[0])


async def _work(runs: list[str], port: int, routes: "Routes | None", folder: Path) -> None:
    import asyncio
    from contextlib import AsyncExitStack

    from tpuswarm.remote.connect import Connections

    async with AsyncExitStack() as ends:
        connections = await ends.enter_async_context(Connections(routes.key)) if routes else None
        sources = await asyncio.to_thread(_sources, runs, routes, connections, folder)
        for each in sources.values():
            await each.update()  # what is wrong at first is wrong for good
        words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
        process = await asyncio.create_subprocess_exec(
            *words, "--port", str(port), "--reload_interval", f"{LOOK:g}", stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        ends.push_async_callback(_end, process)
        ended, said_last = asyncio.ensure_future(process.wait()), asyncio.ensure_future(_last_line(process))
        await _until_it_answers(ended, said_last, port)
        say(f"http://127.0.0.1:{port} shows {', '.join(sources)}; Ctrl-C ends it")
        said: set[str] = set()
        while not ended.done():
            for name, each in sources.items():
                try:
                    await each.update()
                    said.discard(name)
                except Exception as error:  # noqa: BLE001 - what a cloud's library raises may pass, and ends no page
                    if name not in said:
                        said.add(name)
                        what = str(error) if isinstance(error, TpuswarmError) else f"{name}: {_first_line(error)}"
                        say(f"{what}; it is tried again", err=True)
            await asyncio.wait([ended], timeout=LOOK)
        raise RunFailed(f"TensorBoard has ended: {await said_last}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


async def _end(process: "Process") -> None:
    """End it, and whatever it has started, before its folder goes."""
    import asyncio
    from contextlib import suppress

    with suppress(ProcessLookupError):
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ENDS_S)
            return
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _last_line(process: "Process") -> str:
    """What it has said last, once it has ended."""
    assert process.stderr is not None
    kept = b""
    while piece := await process.stderr.read(KEPT):
        kept = (kept + piece)[-KEPT:]
    return kept.decode(errors="replace").strip().rpartition("\n")[2] or "it said nothing"


async def _until_it_answers(ended: "Future[int]", said_last: "Future[str]", port: int) -> None:
    """Raises RunFailed, with what it said last, where it ends instead."""
    import asyncio

    while not ended.done():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return
    raise RunFailed(f"TensorBoard ended before it showed anything: {await said_last}")


def _sources(
    runs: list[str], routes: "Routes | None", connections: "Connections | None", folder: Path
) -> "dict[str, Source]":
    """By what they are called in TensorBoard."""
    import asyncio

    from tpuswarm.cli.machine.tunnels import one_host
    from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
    from tpuswarm.train.run.directory import read_config
    from tpuswarm.train.run.listing import find_run, list_runs
    from tpuswarm.train.storage.folders import is_url
    from tpuswarm.watch.boards import Far, of_run

    wanted = runs or [str(each) for each in list_runs()]
    if not wanted:
        raise InputError("there are no runs in ./runs; name some, or train one with `tpuswarm train gpt2-tiny`")
    found: dict[str, Source] = {}
    for run in wanted:
        name = _name(run, found)
        if far := _far(run):
            assert routes is not None and connections is not None
            where, there = routes, far[1]

            async def find(where: "Routes" = where, there: str = there) -> "Host":
                return await asyncio.to_thread(one_host, where, there)

            found[name] = Far(connections, find, far[2], folder / name)
            continue
        if is_url(run):
            use_rehearsed_buckets()
        local = find_run(run)
        found[name] = of_run(local, "swarm" in read_config(local), folder / name, run if is_url(run) else "")
    return found


def _name(run: str, taken: "dict[str, Source]") -> str:
    """Short, and no two alike."""
    if far := _far(run):
        last = f"{far[1]}-{far[2].strip('/')}"
    else:
        last = run.rstrip("/").rpartition("/")[2] if "://" in run else Path(run).resolve().name
    name = re.sub(r"[^\w.-]", "-", last)
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    return found
