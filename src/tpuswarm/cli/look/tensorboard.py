"""`tpuswarm tensorboard`: the curves of runs on this computer, on machines and in buckets, together."""

import asyncio
import importlib.util
import os
import re
import signal
import sys
import tempfile
from asyncio import Future
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Collection
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.console import FleetOption
from tpuswarm.cli.machine.ssh import find_one_host
from tpuswarm.errors import InputError, RunFailed, TpuswarmError, first_line
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.spec.providers import use_rehearsed_buckets
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host
from tpuswarm.train.process.stop import end_quietly
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.run.directory import read_config
from tpuswarm.train.run.listing import find_run, list_runs
from tpuswarm.train.storage.folders import is_url
from tpuswarm.watch.boards import BoardSource, MachineBoards, boards_of_run

DEFAULT_PORT = 6006
POLL_INTERVAL_S = 5.0
"""How often new rows are fetched, and how often TensorBoard reads them."""
TERMINATE_TIMEOUT_S = 5.0
LAST_OUTPUT_BYTES = 1 << 12


def tensorboard(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN…]", help="Runs, gs://BUCKET/FOLDER, NAME:FOLDER on a machine. Default: ./runs."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="On loopback.")] = DEFAULT_PORT,
    fleet: FleetOption = None,
) -> None:
    """Show the curves of runs in TensorBoard: of this computer, of machines and of buckets, together.

    A swarm's run has a curve for each member. Runs on a machine come through SSH, as they grow. Ctrl-C ends it.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError("TensorBoard is not installed: pip install 'tpuswarm[tensorboard]' (it needs no TensorFlow)")
    from tpuswarm.watch.page.server import open_listener

    open_listener(port).close()  # its error is shorter than TensorBoard's
    routes = open_routes(find_fleet(fleet)[0]) if any(_match_remote(run) for run in runs or ()) else None
    with tempfile.TemporaryDirectory(prefix="tpuswarm-tensorboard-") as folder:
        asyncio.run(_serve(runs or [], port, routes, Path(folder)))


def _match_remote(run: str) -> re.Match[str] | None:
    # NAME:FOLDER or NAME/2:FOLDER on a machine
    return None if "://" in run or Path(run).exists() else re.fullmatch(r"([\w.-]+(?:/\d+)?):(.+)", run)


async def _serve(runs: list[str], port: int, routes: Routes | None, folder: Path) -> None:
    async with AsyncExitStack() as stack:
        connections = await stack.enter_async_context(Connections(routes.key)) if routes else None
        sources = await asyncio.to_thread(_find_sources, runs, routes, connections, folder)
        for source in sources.values():
            await source.update()  # fails here if the run does not exist
        words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
        words += ["--port", str(port), "--reload_interval", f"{POLL_INTERVAL_S:g}"]
        process = await asyncio.create_subprocess_exec(
            *words, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
        )
        stack.push_async_callback(_terminate, process)
        ended, last_line = asyncio.ensure_future(process.wait()), asyncio.ensure_future(_read_last_line(process))
        await _wait_until_listening(ended, last_line, port)
        echo(f"http://127.0.0.1:{port} shows {', '.join(sources)}; Ctrl-C ends it")
        end_quietly()
        failing: set[str] = set()
        while not ended.done():
            for name, source in sources.items():
                try:
                    await source.update()
                    failing.discard(name)
                except Exception as error:  # noqa: BLE001 - an error of a cloud's library may pass
                    if name not in failing:
                        failing.add(name)
                        text = str(error) if isinstance(error, TpuswarmError) else f"{name}: {first_line(error)}"
                        echo(f"{text}; retrying", err=True)
            await asyncio.wait([ended], timeout=POLL_INTERVAL_S)
        raise RunFailed(f"TensorBoard ended: {await last_line}")


async def _terminate(process: Process) -> None:
    """End TensorBoard and its children, before their folder is deleted."""
    with suppress(ProcessLookupError):
        process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERMINATE_TIMEOUT_S)
            return
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _read_last_line(process: Process) -> str:
    assert process.stderr is not None
    output = b""
    while piece := await process.stderr.read(LAST_OUTPUT_BYTES):
        output = (output + piece)[-LAST_OUTPUT_BYTES:]
    return output.decode(errors="replace").strip().rpartition("\n")[2] or "no output"


async def _wait_until_listening(ended: "Future[int]", last_line: "Future[str]", port: int) -> None:
    while not ended.done():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return
    raise RunFailed(f"TensorBoard ended at its start: {await last_line}")


def _find_sources(
    runs: list[str], routes: Routes | None, connections: Connections | None, folder: Path
) -> dict[str, BoardSource]:
    """Return the sources of rows by their names in TensorBoard."""
    chosen = runs or [str(run) for run in list_runs()]
    if not chosen:
        raise InputError("no runs in ./runs. Name some, or train one: `tpuswarm train gpt2-tiny`")
    sources: dict[str, BoardSource] = {}
    for run in chosen:
        name = unique_name(run, sources)
        if remote := _match_remote(run):
            assert routes is not None and connections is not None

            async def find(routes: Routes = routes, host: str = remote[1]) -> Host:
                return await asyncio.to_thread(find_one_host, routes, host)

            sources[name] = MachineBoards(connections, find, remote[2], folder / name)
            continue
        if is_url(run):
            use_rehearsed_buckets()
        local = find_run(run)
        sources[name] = boards_of_run(local, "swarm" in read_config(local), folder / name, run if is_url(run) else "")
    return sources


def unique_name(run: str, taken: Collection[str]) -> str:
    """Return a short name for a run that is not taken."""
    if remote := _match_remote(run):
        last = f"{remote[1]}-{remote[2].strip('/')}"
    else:
        last = run.rstrip("/").rpartition("/")[2] if "://" in run else Path(run).resolve().name
    base = re.sub(r"[^\w.-]", "-", last)
    number, name = 1, base
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    return name
