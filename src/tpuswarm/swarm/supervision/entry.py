"""Create the work of each process of a swarm where it runs: coordinator, aggregator, member."""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tpuswarm.errors import InputError
from tpuswarm.swarm.core.summary import Summary
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.engines.variables import BATCH
from tpuswarm.swarm.processes.aggregator import Shard
from tpuswarm.swarm.processes.coordinator import FoundingCoordinator
from tpuswarm.swarm.processes.effects import Call, Process, Sleep
from tpuswarm.swarm.processes.run_plan import RunPlan, code_digest
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.timestamps import format_timestamp
from tpuswarm.train.storage.folders import ORIGIN, is_url

Calls = Callable[[Call], Any]


class ServerWork:
    """A server object in its own node; the process ends with the node."""

    def __init__(self, server: Any, calls: Calls, work: Process, may_leave: bool = False):
        """may_leave: this machine may leave, and another one takes over; otherwise `leave` has no effect."""
        self.server, self._node = server, NodeThreads(calls)
        self._work, self._may_leave, self._left = work, may_leave, False

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._node.call(self.server, method, arguments)

    def run(self) -> str:
        """Run until the work is done or this machine leaves; raise the error that ended the node."""
        self._node.start("work", self._work)
        self._node.wait()
        if self._left:
            return "left"
        if self._node.failure:
            raise self._node.failure
        return "ended"

    def report(self, since: int) -> Summary | None:
        """Summarize the run, if this is the coordinator."""
        return self.server.summarize() if isinstance(self.server, FoundingCoordinator) else None

    def leave(self) -> None:
        """End at once, if this machine may leave."""
        if self._may_leave:
            self._left = True
            self._node.stop()


def coordinator(plan: RunPlan, store: str, shards: tuple[str, ...], alone: bool, calls: Calls) -> ServerWork:
    server = FoundingCoordinator(plan, Store(store), shards, time.monotonic, time.time, alone=alone)
    return ServerWork(server, calls, server.run())


def shard(store: str, data: str, index: int, shards: int, calls: Calls, code: str = "") -> ServerWork:
    """Create an aggregator. store: the run's folder, or on another machine its URL; code: there the swarm's digest."""
    is_elsewhere = is_url(store)
    if is_elsewhere and code != code_digest():
        raise InputError("it has other versions of tpuswarm, JAX or NumPy than the swarm")
    root = folder_for_copies(store) if is_elsewhere else Path(store)
    return ServerWork(Shard(Store(root), Path(data), index, shards), calls, _idle(), may_leave=is_elsewhere)


def file_server(store: str, data: str, calls: Calls) -> ServerWork:
    return ServerWork(Shard(Store(store), Path(data), 0, 1), calls, _idle())


def gateway(store: str, listen: tuple[str, int], largest: int, calls: Calls) -> Any:
    from tpuswarm.swarm.anywhere.gateway import Gateway  # these import a web server
    from tpuswarm.swarm.anywhere.server import GatewayWork

    return GatewayWork(Gateway(calls, time.monotonic), Path(store), listen, largest)


def folder_for_copies(url: str) -> Path:
    """Return a new folder for this process's copies of a run's files; remove those of processes that have ended."""
    folders, mine = cache_folder("aggregators"), f"{socket.gethostname()}-"  # machines may share the home folder
    for folder in folders.glob(f"{mine}*"):
        pid = folder.name.removeprefix(mine)
        if not (pid.isdigit() and psutil.pid_exists(int(pid))) or pid == str(os.getpid()):
            shutil.rmtree(folder, ignore_errors=True)
    own = folders / f"{mine}{os.getpid()}"
    own.mkdir(parents=True)
    (own / ORIGIN).write_text(url)
    return own


def member(
    plan: RunPlan,
    name: str,
    shards: tuple[str, ...],
    data: str | None,
    steps: int,
    evaluates: bool,
    calls: Calls,
    files_from: str = "",
) -> Any:
    from tpuswarm.swarm.member.group import Group  # these import JAX, which the other processes do not need
    from tpuswarm.swarm.member.member_process import MemberProcess, MemberSpec
    from tpuswarm.train.process import platform

    files = Path(data) if data else None
    batch = int(os.environ[BATCH]) if BATCH in os.environ else None
    spec = MemberSpec(
        name,
        plan,
        shards,
        files,
        Group.from_environment(),
        steps,
        evaluates,
        calls,
        _log,
        batch,
        platform.lower_priority,
        files_from,
    )
    return MemberProcess(spec)


def _log(text: str) -> None:
    sys.stdout.write(f"{format_timestamp(time.time())}{text}\n")
    sys.stdout.flush()


def _idle() -> Process:
    while True:
        yield Sleep(1.0)
