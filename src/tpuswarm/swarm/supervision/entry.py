"""What runs in each process of a swarm: coordinator, shard and member, made where they are to live."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpuswarm.swarm.core.summary import Summary
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.engines.variables import BATCH
from tpuswarm.swarm.processes.effects import Call, Process, Sleep
from tpuswarm.swarm.processes.founder import FoundingCoordinator
from tpuswarm.swarm.processes.plan import Plan
from tpuswarm.swarm.processes.serving import Shard
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.process.stamped import stamp

Calls = Callable[[Call], Any]


class Served:
    """A server object in a node of its own; its process ends when the node does."""

    def __init__(self, server: Any, calls: Calls, work: Process):
        self.server, self._node = server, NodeThreads(calls)
        self._work = work

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out a call."""
        return self._node.call(self.server, method, arguments)

    def run(self) -> str:
        """Until the work is done; raises what ended the node before."""
        self._node.start("work", self._work)
        self._node.wait()
        if self._node.failure:
            raise self._node.failure
        return "ended"

    def look(self, since: int) -> Summary | None:
        """What a coordinator sees."""
        return self.server.look() if isinstance(self.server, FoundingCoordinator) else None

    def leave(self) -> None:
        """It stays: members leave, and the machine that this runs on is one that stays."""


def coordinator(plan: Plan, store: str, shards: tuple[str, ...], alone: bool, calls: Calls) -> Served:
    """The coordinator's process."""
    head = FoundingCoordinator(plan, Store(store), shards, time.monotonic, time.time, alone=alone)
    return Served(head, calls, head.run())


def shard(store: str, data: str, index: int, shards: int, calls: Calls) -> Served:
    """An aggregator's process."""
    return Served(Shard(Store(store), Path(data), index, shards), calls, _idle())


def member(
    plan: Plan, name: str, shards: tuple[str, ...], data: str | None, steps: int, evaluates: bool, calls: Calls
) -> Any:
    """A member's process."""
    from tpuswarm.swarm.member.group import Group  # these import JAX, which the others do without
    from tpuswarm.swarm.member.incarnations import Assigned, MemberHost
    from tpuswarm.train.process import platform

    files = Path(data) if data else None
    batch = int(os.environ[BATCH]) if BATCH in os.environ else None
    place = Assigned(name, plan, shards, files, Group.here(), steps, evaluates, calls, _say, batch, platform.make_way)
    return MemberHost(place)


def _say(text: str) -> None:
    sys.stdout.write(f"{stamp(time.time())}{text}\n")
    sys.stdout.flush()


def _idle() -> Process:
    while True:
        yield Sleep(1.0)
