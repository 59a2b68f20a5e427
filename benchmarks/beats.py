"""What heartbeats cost the coordinator's process, Ray's carrying included: 10, 1,000 and 4,000 members. About 1 minute.

A real actor on this machine, in it the product's coordinator with a lease for each member; heartbeats come by the
product's calls. What is measured is the processor's time of that one process, threads of Ray's included.
"""

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import tpuswarm.swarm.engines.opening  # noqa: F401  # before Ray is imported
from benchmarks.report import Settings, Table, verdict
from tpuswarm.swarm.core.arithmetic.outer import Outer
from tpuswarm.swarm.core.messages import Beat, Granted, Terms
from tpuswarm.swarm.core.rows import NOTHING
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.engines.ray import Calls, Cluster
from tpuswarm.swarm.member.cycle import BEAT
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Process, Sleep
from tpuswarm.swarm.simulation.stand_ins import NoLedger, genesis
from tpuswarm.swarm.supervision.entry import Served

MEMBERS = (10, 1000, 4000)
AIM = 0.5
"""Of a core, for the largest number."""
SENDERS = 4
DIGESTS = Digests("layout", "config", "data", "code")


def incarnation(number: int) -> Incarnation:
    """Of one member."""
    return Incarnation(f"m{number}", f"{number:032x}")


def beat(number: int, joined: bool, processed: int = 0) -> Beat:
    """What a member says that has trained so many tokens."""
    return Beat(incarnation(number), DIGESTS, joined, 0, NOTHING, NOTHING, None, 64.0, processed)


def served(members: int, calls: Calls) -> Served:
    """The coordinator, with a lease for each member."""
    terms = Terms("run", DIGESTS, 64, 1024, 10**9, 6400, (), Outer("nesterov"), lease_seconds=3600.0)
    coordinator = Coordinator(NoLedger(genesis(terms, 1)), ["shard"], time.monotonic, time.time)  # type: ignore[arg-type]
    opening: Any = coordinator.open(terms, founded=True)
    value = None
    try:
        while True:
            value = opening.send(value).action()
    except StopIteration:
        for number in range(members):
            coordinator.beat(beat(number, joined=False))
    return Served(coordinator, calls, _idle())


def measure(cluster: Cluster, folder: Path, members: int, count: int) -> tuple[float, float]:
    """Seconds of a processor for a heartbeat, and the seconds between two of a member that the coordinator asks for."""
    name = f"coordinator-{members}"
    place = {"PYTHONPATH": str(Path(__file__).parents[1])}
    actor = cluster.start(name, "benchmarks.beats:served", {"members": members}, place, folder / "log", None)
    assert actor is not None
    calls = Calls("beats", 0)
    answer: Any = None
    while not isinstance(answer, Granted):  # until it is there
        try:
            answer = calls(Call(name, "beat", (beat(0, joined=True),)))
        except Exception:  # noqa: BLE001  # not yet
            time.sleep(0.5)
    looked = None
    while looked is None:
        looked = actor.look(0, 5.0)
    before = _seconds(looked[0])

    def send(first: int) -> None:
        for number in range(first, count, SENDERS):
            calls(Call(name, "beat", (beat(number % members, joined=True, processed=1024 * (number + 1)),)))

    senders = [threading.Thread(target=send, args=(first,)) for first in range(SENDERS)]
    for each in senders:
        each.start()
    for each in senders:
        each.join()
    spent = (_seconds(looked[0]) - before) / count
    actor.kill()
    return spent, answer.pause


def run(settings: Settings) -> Table:
    """One coordinator after the other."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    count = 200 if settings.quick else 2000
    rows, share = [], 0.0
    with tempfile.TemporaryDirectory() as folder, Cluster("beats", Path(folder) / "token", None) as cluster:
        for members in MEMBERS:
            spent, pause = measure(cluster, Path(folder), members, count)
            every = max(BEAT, pause)
            share = spent * members / every
            rows.append((f"{members:,}", f"{every:.1f}", f"{spent * 1e6:,.0f}", f"{share:.1%}"))
    return Table(
        "Heartbeats",
        ("members", "seconds between two of one", "µs of a core each, carried", "share of a core"),
        rows,
        [
            f"{count:,} heartbeats from {SENDERS} threads each, all with tokens to count; time of the coordinator's "
            "whole process, by Linux",
            f"limit {AIM:.0%} of a core for {MEMBERS[-1]:,}: {verdict(share <= AIM)}",
        ],
    )


def _seconds(pid: int) -> float:
    """Processor's time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _idle() -> Process:
    while True:
        yield Sleep(1.0)
