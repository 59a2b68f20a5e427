"""A folder of 2,000 files to 16 hosts on loopback, by `sync` and by rsync in parallel. Half a minute.

Limits: unchanged under 1 s, one file changed under 2 s. Connections are opened anew each time, for both; servers and
clients share the machine. CPU seconds are those of both ends together. The folder is a git repository of small files,
8 MB together.
"""

import asyncio
import os
import random
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Settings, Skipped, Table, median, verdict
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host
from tpuswarm.remote.openssh import openssh
from tpuswarm.remote.sync.send import Outcome, send
from tpuswarm.remote.sync.tree import KeptTree

FILES, HOSTS, TIMES = 2_000, 16, 5
SAME_S, ONE_S = 1.0, 2.0


def run(settings: Settings) -> Table:
    """First, unchanged and with one file changed, for both."""
    from tests.remote.machines import start_machines

    files, hosts, times = (50, 2, 1) if settings.quick else (FILES, HOSTS, TIMES)
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = _project(folder / "project", files)
        with start_machines(folder, hosts) as machines:

            def ours() -> None:
                kept = KeptTree(folder / "kept")
                tree = kept.take(project, lambda total, new: None)
                outcome = asyncio.run(_send(machines.key, machines.hosts, tree, kept))
                assert not outcome.failed, outcome.failed

            def theirs() -> None:
                running = [_rsync(host, machines.key, project) for host in machines.hosts]
                assert all(each.wait() == 0 for each in running)

            ours_s = _three(ours, project, times)
            try:
                rsync_s = _three(theirs, project, times)
            except FileNotFoundError:
                raise Skipped("rsync is not installed") from None
            for machine in machines:
                assert (machine.home / "project/f0").read_bytes() == (project / "f0").read_bytes()
    for what, limit, mine, peer in zip(
        ("first", "unchanged", "one file changed"), (None, SAME_S, ONE_S), ours_s, rsync_s, strict=True
    ):
        said = "" if limit is None or settings.quick else verdict(median([each.wall for each in mine]).middle <= limit)
        rows.append((what, _shown(mine), _shown(peer), "" if limit is None else f"{limit:g} s {said}"))
    return Table(
        f"sync of {files:,} files to {hosts} hosts beside rsync in parallel, seconds (median and its interval)",
        ("", "tpuswarm sync", "rsync", "at most"),
        rows,
    )


async def _send(key: Path, hosts: list[Host], tree: object, kept: KeptTree) -> Outcome:
    async with Connections(key) as connections:
        return await send(connections, hosts, tree, kept)  # type: ignore[arg-type]


class Took(NamedTuple):
    """How long something took."""

    wall: float
    """Seconds."""
    cpu: float
    """Seconds of all processors, of this process with its servers, and of all that it started."""


def _three(work: Callable[[], None], project: Path, times: int) -> tuple[list[Took], list[Took], list[Took]]:
    """Of the first time, of those without a change, and of those with one file changed."""
    first, same, one = [_seconds(work)], [], []
    for turn in range(times):
        same.append(_seconds(work))
        (project / "f0").write_bytes(os.urandom(4_000) + bytes([turn]))
        one.append(_seconds(work))
    return first, same, one


def _seconds(work: Callable[[], None]) -> Took:
    start, used = time.perf_counter(), _used()
    work()
    return Took(time.perf_counter() - start, _used() - used)


def _used() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _shown(took: list[Took]) -> str:
    wall, cpu = [each.wall for each in took], [each.cpu for each in took]
    said = f"{wall[0]:.2f}" if len(wall) == 1 else median(wall).show(".2f")
    return f"{said}, CPU {sorted(cpu)[len(cpu) // 2]:.2f}"


def _rsync(host: Host, key: Path, project: Path) -> "subprocess.Popen[bytes]":
    shell = " ".join(f"'{each}'" if " " in each else each for each in openssh(host, key))
    words = ["rsync", "-a", "--delete", "--exclude", ".git", "-e", shell, f"{project}/"]
    return subprocess.Popen([*words, f"{host.user}@{host.address}:project/"])


def _project(folder: Path, files: int) -> Path:
    folder.mkdir()
    data = random.Random(0)
    for number in range(files):
        path = folder / (f"d{number % 40}/f{number}" if number else "f0")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data.randbytes(4_000))
        os.utime(path, (1_700_000_000, 1_700_000_000))
    subprocess.run("git init -q . && git add .", shell=True, cwd=folder, check=True)
    return folder
