"""Measure the load of one coordinator with 10, 100 and 1,000 simulated members. About 5 minutes.

State machines, messages and the ledger's JSON are the product's; links, steps, merges and failures are simulated. The
benchmark measures the processor time of the coordinator's code for a simulated second, without Ray's message transport.
"""

import math
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.swarm.memory_store import MemoryStore

from benchmarks.report import Settings, Table, verdict
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import Granted, Heartbeat, Refused
from tpuswarm.swarm.core.values import Header, Record
from tpuswarm.swarm.simulation.cluster import SimulatedSwarm
from tpuswarm.swarm.simulation.result import Result, result
from tpuswarm.swarm.simulation.scenario import Scenario
from tpuswarm.swarm.storage.ledger import Ledger

SIMULATED_S = {10: 3650, 100: 1250, 1000: 450}
"""By number of members."""
WARM_UP_S = 150
"""After it a whole number of cycles is measured."""
MAX_TRAFFIC_CHANGE_RATIO = 0.1
"""Of a member, from 10 members to 1,000."""


def scenario(members: int, seconds: float) -> Scenario:
    """GPT-2 124M in int8, a push about every 100 s, each member preempted once in two hours."""
    return Scenario.model_validate(
        {
            "hours": seconds / 3600,
            "model": {"parameters": "124M", "batch": 64, "tokens_per_row": 1024},
            "exchange": {"cycle": 100, "quantize": "int8"},
            "members": [
                {"count": members, "step_s": 1.0, "mbit_up": 1000, "mbit_down": 1000}
                | {"preempted_every_hours": 2, "back_after_minutes": 3}
            ],
        }
    )


@dataclass
class TimedLedger:
    """A ledger in memory that measures its processor time."""

    inner: Ledger
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def view(self) -> LedgerView:
        return self.inner.view()

    def headers(self, view: LedgerView) -> list[Header]:
        return self.inner.headers(view)

    def bookmark_due(self, view: LedgerView) -> bool:
        return self.inner.bookmark_due(view)

    def bookmark(self, view: LedgerView) -> None:
        self._timed("rounds", lambda: self.inner.bookmark(view))

    def digest(self, record: Record) -> str:
        return self.inner.digest(record)

    def append(self, record: Record) -> Any:
        return self._timed("rounds", lambda: self.inner.append(record))

    def create_header(self, header: Header) -> Any:
        return self._timed("push", lambda: self.inner.create_header(header))

    def _timed(self, name: str, action: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = action()
        self.seconds[name] += time.thread_time() - start
        return result


@dataclass
class Load:
    """Load with one number of members: Mbit/s of a member, and CPU seconds of each kind of message.

    commit_s: CPU seconds of a version's rounds; cpu: CPU seconds for a simulated second; simulation_s: CPU seconds of
    the whole simulation.
    """

    result: Result
    up: float
    down: float
    heartbeat_s: float
    push_s: float
    commit_s: float
    cpu: float
    heartbeat_bytes: int
    answer_bytes: int
    record_bytes: int
    simulation_s: float


def simulate(members: int, seconds: float) -> Load:
    """Simulate a swarm and measure its coordinator."""
    ledgers: list[TimedLedger] = []

    def ledger(genesis: Record) -> TimedLedger:
        inner = Ledger(MemoryStore())
        inner.append(genesis)
        ledgers.append(TimedLedger(inner))
        return ledgers[0]

    cluster = SimulatedSwarm(scenario(members, seconds), ledger)
    sizes: list[tuple[int, int]] = []
    inner = cluster.coordinator.inner
    beat = inner.beat

    def sampled(message: Heartbeat) -> Granted | Refused | None:
        answer = beat(message)
        if cluster.coordinator.count["beat"] % 1000 == 0:
            sizes.append((len(pickle.dumps(message)), len(pickle.dumps(answer))))
        return answer

    inner.beat = sampled  # type: ignore[method-assign]
    before = [0.0, 0.0]

    def end_warm_up() -> None:
        before[:] = traffic(cluster)

    cluster.at(WARM_UP_S, end_warm_up)
    start = time.thread_time()
    cluster.simulate()
    simulation_s = time.thread_time() - start
    meter = cluster.coordinator
    took = {name: spent + ledgers[0].seconds[name] for name, spent in meter.seconds.items()}
    store = ledgers[0].inner.store
    records = [len(store.read(name)) for name in store.names("commits/")]
    up, down = (
        (after - then) * 8 / 1e6 / members / (seconds - WARM_UP_S)
        for after, then in zip(traffic(cluster), before, strict=True)
    )
    return Load(
        result=result(cluster),
        up=up,
        down=down,
        heartbeat_s=took["beat"] / meter.count["beat"],
        push_s=took["push"] / max(1, meter.count["push"]),
        commit_s=took["rounds"] / max(1, len(records) - 1),
        cpu=sum(took.values()) / seconds,
        heartbeat_bytes=round(statistics.fmean(message for message, _ in sizes)),
        answer_bytes=round(statistics.fmean(answer for _, answer in sizes)),
        record_bytes=max(records),
        simulation_s=simulation_s,
    )


def traffic(cluster: SimulatedSwarm) -> tuple[float, float]:
    """Return the bytes that all members have sent and received."""
    return sum(link.up.bytes for link in cluster.machines), sum(link.down.bytes for link in cluster.machines)


def run(settings: Settings) -> Table:
    lengths = {10: 450, 20: 350, 40: 250} if settings.quick else SIMULATED_S
    loads = {members: simulate(members, seconds) for members, seconds in lengths.items()}
    few, many = loads[min(loads)], loads[max(loads)]
    sent, received = many.up / few.up - 1, many.down / few.down - 1
    lines: list[tuple[str, Callable[[Load], str]]] = [
        ("goodput", lambda load: "–" if load.result.goodput is None else f"{load.result.goodput:.2%}"),
        ("stall of the members", lambda load: f"{load.result.members.stall:.2%}"),
        ("a member sends, Mbit/s", lambda load: f"{load.up:.2f}"),
        ("a member receives, Mbit/s", lambda load: f"{load.down:.2f}"),
        ("aggregators", lambda load: f"{load.result.shards}"),
        ("each receives, Mbit/s", lambda load: f"{load.up * load.result.members.count / load.result.shards:,.0f}"),
        ("each sends, Mbit/s", lambda load: f"{load.down * load.result.members.count / load.result.shards:,.0f}"),
        ("commits", lambda load: f"{load.result.versions}"),
        ("contributors per commit", lambda load: f"{load.result.contributors.mean:,.1f}"),
        ("seconds from choice to record", lambda load: f"{load.result.commit_seconds.mean:.1f}"),
        ("coordinator, messages/s", lambda load: f"{load.result.messages_per_s:,.0f}"),
        ("a heartbeat, µs of a core", lambda load: f"{load.heartbeat_s * 1e6:.0f}"),
        ("a header, µs", lambda load: f"{load.push_s * 1e6:,.0f}"),
        ("a commit, ms", lambda load: f"{load.commit_s * 1e3:,.0f}"),
        ("**share of a core**", lambda load: f"**{load.cpu:.1%}**"),
        ("a heartbeat and its answer, bytes", lambda load: f"{load.heartbeat_bytes:,} and {load.answer_bytes:,}"),
        ("the largest record, KB", lambda load: f"{load.record_bytes / 1e3:,.0f}"),
        ("simulated s, in s of a core", lambda load: f"{load.result.seconds:,.0f}, {load.simulation_s:,.0f}"),
    ]
    flat = verdict(abs(sent) <= MAX_TRAFFIC_CHANGE_RATIO and abs(received) <= MAX_TRAFFIC_CHANGE_RATIO)
    return Table(
        "Scale, simulated",
        ("members", *(f"{members:,}" for members in loads)),
        [(name, *(show(load) for load in loads.values())) for name, show in lines],
        [
            "GPT-2 124M in int8, a push every 100 steps of a second, links of 1 Gbit/s and 40 ms, "
            "each member is preempted every 2 hours on average and returns after 3 minutes",
            f"traffic from second {WARM_UP_S} on; from the fewest members to the most a member sends "
            f"{sent:+.1%} and receives {received:+.1%}; limit ±{MAX_TRAFFIC_CHANGE_RATIO:.0%}: {flat}",
            f"about {members_of_full_core(loads):,} members would fill a coordinator's core, without message transport",
        ],
    )


def members_of_full_core(loads: dict[int, Load]) -> int:
    """Extrapolate the members of a full core from the two largest numbers."""
    (few, less), (many, more) = sorted((members, load.cpu) for members, load in loads.items())[-2:]
    power = math.log(more / less) / math.log(many / few)
    return int(round(many * (1 / more) ** (1 / power), -2))
