"""Choose a machine for each aggregator: one that offers room, else the head."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.engines.ray import Cluster
from tpuswarm.swarm.processes.run_plan import code_digest
from tpuswarm.swarm.supervision.supervised_process import SupervisedProcess
from tpuswarm.train.storage.folders import origin

AVOID_S = 600.0
"""A machine on which an aggregator has ended gets no other one for this time."""
NEEDS_BUCKET = "aggregators stay with the coordinator: elsewhere they need a run in a bucket, --run gs://BUCKET/FOLDER"


def choose_node(rooms: Collection[str], nodes: Collection[str | None]) -> str | None:
    """Return the node for one more aggregator; None for the head.

    rooms: nodes with room, in order of preference; nodes: those of the other aggregators.
    """
    return min(rooms, key=Counter(nodes).__getitem__, default=None)


def choose_move(rooms: Collection[str], nodes: Mapping[str, str | None]) -> str | None:
    """Return the aggregator that should move to a node with more room; None if they are well placed.

    nodes: that of each aggregator, None for the head.
    """
    if not rooms:
        return None
    counts = Counter(nodes.values())
    name, node = max(nodes.items(), key=lambda item: (item[1] is None, counts[item[1]]))
    return name if node is None or counts[node] > min(counts[room] for room in rooms) + 1 else None


class Placement:
    """Decides where the aggregators of a run are. Those on other machines work on the run's bucket."""

    def __init__(self, cluster: Cluster, folder: Path, event: Callable[..., None]):
        """folder: the run's; event: writes an event of the run."""
        self._cluster, self._url, self._event = cluster, origin(folder), event
        self._code = code_digest() if self._url else ""
        self._avoided: dict[str, float] = {}
        """Machines on which an aggregator has ended, and until when they get no other one."""
        self._refused: set[str] = set()
        """Nodes that this run cannot use; each is reported once."""

    def move(self, aggregators: Sequence[SupervisedProcess], now: float) -> None:
        """End one aggregator if another machine has more room, so that it starts there."""
        rooms = self._rooms(now)
        if not all(process.has_answered for process in aggregators):
            return
        name = choose_move(rooms, {process.name: process.node for process in aggregators})
        for process in aggregators:
            if process.name == name and process.actor:
                process.actor.kill()
                process.actor = None

    def place(self, process: SupervisedProcess, aggregators: Sequence[SupervisedProcess], now: float) -> dict[str, Any]:
        """Choose the node of an aggregator that starts now; return its arguments there."""
        process.node = choose_node(self._rooms(now), [other.node for other in aggregators if other is not process])
        elsewhere = {"store": self._url, "code": self._code} if process.node else {}
        return process.arguments | elsewhere

    def log_start(self, process: SupervisedProcess) -> None:
        """Write an event if an aggregator has started on another machine than before."""
        machine = self._cluster.aggregator_nodes().get(process.node or "", "")
        if process.machine != machine:
            process.machine = machine
            self._event("shard", name=process.name, message=f"starting on {machine or 'the head'}")

    def handle_end(self, process: SupervisedProcess, outcome: Outcome, now: float) -> None:
        """Avoid the machine on which an aggregator has ended, so that its successor starts elsewhere."""
        if process.actor and outcome.how != "dead":
            process.actor.kill()
        process.actor = None
        if process.node:
            self._avoided[process.machine] = now + AVOID_S
            if outcome.how == "wrong" and process.node not in self._cluster.member_nodes():
                self._cluster.dismiss(process.node, outcome)
        reason = {"dead": "it died", "left": "the machine leaves"}.get(outcome.how, outcome.reason)
        self._event("shard", name=process.name, message=f"{reason} ({process.machine}); moving it")

    def _rooms(self, now: float) -> list[str]:
        """Return the nodes that may get an aggregator."""
        rooms = self._cluster.aggregator_nodes()
        if self._url:
            return [node for node, machine in rooms.items() if self._avoided.get(machine, 0.0) <= now]
        for node in rooms.keys() - self._refused:
            self._refused.add(node)
            self._event("note", message=f"{rooms[node]} has room for aggregators, but {NEEDS_BUCKET}")
            if node not in self._cluster.member_nodes():
                self._cluster.dismiss(node, Outcome("wrong", NEEDS_BUCKET))
        return []
