"""Create the work of each process of a swarm where it runs: coordinator, aggregator, member."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpuswarm.swarm.core.summary import Summary
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.engines.variables import BATCH
from tpuswarm.swarm.processes.aggregator import Shard
from tpuswarm.swarm.processes.coordinator import FoundingCoordinator
from tpuswarm.swarm.processes.effects import Call, Process, Sleep
from tpuswarm.swarm.processes.run_plan import RunPlan
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.process.timestamps import format_timestamp

Calls = Callable[[Call], Any]


class ServerWork:
    """A server object in its own node; the process ends with the node."""

    def __init__(self, server: Any, calls: Calls, work: Process):
        self.server, self._node = server, NodeThreads(calls)
        self._work = work

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._node.call(self.server, method, arguments)

    def run(self) -> str:
        """Run until the work is done; raise the error that ended the node."""
        self._node.start("work", self._work)
        self._node.wait()
        if self._node.failure:
            raise self._node.failure
        return "ended"

    def report(self, since: int) -> Summary | None:
        """Summarize the run, if this is the coordinator."""
        return self.server.summarize() if isinstance(self.server, FoundingCoordinator) else None

    def leave(self) -> None:
        """Do nothing: only members leave, and this runs on a machine that stays."""


def coordinator(plan: RunPlan, store: str, shards: tuple[str, ...], alone: bool, calls: Calls) -> ServerWork:
    server = FoundingCoordinator(plan, Store(store), shards, time.monotonic, time.time, alone=alone)
    return ServerWork(server, calls, server.run())


def shard(store: str, data: str, index: int, shards: int, calls: Calls) -> ServerWork:
    return ServerWork(Shard(Store(store), Path(data), index, shards), calls, _idle())


def member(
    plan: RunPlan, name: str, shards: tuple[str, ...], data: str | None, steps: int, evaluates: bool, calls: Calls
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
    )
    return MemberProcess(spec)


def _log(text: str) -> None:
    sys.stdout.write(f"{format_timestamp(time.time())}{text}\n")
    sys.stdout.flush()


def _idle() -> Process:
    while True:
        yield Sleep(1.0)
