"""How far one coordinator carries: 10, 100 and 1,000 members in the simulation. About 5 minutes.

The state machines, the engine's messages and the ledger's JSON are the product's; links, steps, merges and failures are
times on a virtual clock. What is measured is what the coordinator's code takes of a processor for a simulated second.
The carrying of a message from process to process (Ray's part) is not in it.
"""

import math
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.memory_store import MemoryStore
from benchmarks.report import Settings, Table, verdict
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.messages import Granted, Heartbeat, Refused
from tpuswarm.swarm.core.values import Header, Record
from tpuswarm.swarm.simulation.cluster import SimulatedSwarm
from tpuswarm.swarm.simulation.result import Result, result
from tpuswarm.swarm.simulation.scenario import Scenario
from tpuswarm.swarm.storage.ledger import Ledger

SECONDS = {10: 3650, 100: 1250, 1000: 450}
"""Simulated, for each number of members."""
WARM = 150
"""Seconds before traffic is measured: then comes a whole number of cycles, each with its push and its version."""
FLAT = 0.1
"""Traffic of a member may change by this share from 10 members to 1,000."""


def scenario(members: int, seconds: float) -> Scenario:
    """GPT-2 124M in int8, a push about every 100 s, each member preempted once in two hours."""
    return Scenario.model_validate(
        {
            "hours": seconds / 3600,
            "model": {"parameters": "124M", "batch": 64, "tokens_per_row": 1024},
            "exchange": {"cycle": 100, "quantize": "int8"},
            "members": [
                {
                    "count": members,
                    "step_s": 1.0,
                    "mbit_up": 1000,
                    "mbit_down": 1000,
                    "preempted_every_hours": 2,
                    "back_after_minutes": 3,
                }
            ],
        }
    )


@dataclass
class Measured:
    """The ledger, in memory, with the processor's time it takes and the bytes it writes."""

    inner: Ledger
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @staticmethod
    def of(genesis: Record) -> "Measured":
        """With the first record in it."""
        ledger = Ledger(MemoryStore())
        ledger.append(genesis)
        return Measured(ledger)

    def view(self) -> LedgerView:
        """As the ledger."""
        return self.inner.view()

    def headers(self, view: LedgerView) -> list[Header]:
        """As the ledger."""
        return self.inner.headers(view)

    def bookmark_due(self, view: LedgerView) -> bool:
        """As the ledger."""
        return self.inner.bookmark_due(view)

    def bookmark(self, view: LedgerView) -> None:
        """As the ledger."""
        self._timed("rounds", lambda: self.inner.bookmark(view))

    def digest(self, record: Record) -> str:
        """As the ledger; its time is part of the round."""
        return self.inner.digest(record)

    def append(self, record: Record) -> Any:
        """As the ledger."""
        return self._timed("rounds", lambda: self.inner.append(record))

    def create_header(self, header: Header) -> Any:
        """As the ledger."""
        return self._timed("push", lambda: self.inner.create_header(header))

    def _timed(self, name: str, action: Callable[[], Any]) -> Any:
        start = time.thread_time()
        made = action()
        self.seconds[name] += time.thread_time() - start
        return made


@dataclass
class Found:
    """Of one number of members."""

    result: Result
    up: float
    """Mbit/s that a member sends."""
    down: float
    beat: float
    """Seconds of a processor for one."""
    push: float
    commit: float
    """All that rounds take, for each version."""
    cpu: float
    """Seconds of a processor for a second."""
    beat_bytes: int
    answer_bytes: int
    record_bytes: int
    real: float


def simulate(members: int, seconds: float) -> Found:
    """One simulation, and what the coordinator took."""
    ledgers: list[Measured] = []

    def ledger(genesis: Record) -> Measured:
        ledgers.append(Measured.of(genesis))
        return ledgers[0]

    cluster = SimulatedSwarm(scenario(members, seconds), ledger)
    said: list[tuple[int, int]] = []
    inner = cluster.coordinator.inner
    beat = inner.beat

    def weighed(message: Heartbeat) -> Granted | Refused | None:
        answer = beat(message)
        if cluster.coordinator.count["beat"] % 1000 == 0:
            said.append((len(pickle.dumps(message)), len(pickle.dumps(answer))))
        return answer

    inner.beat = weighed  # type: ignore[assignment, method-assign]
    before = [0.0, 0.0]

    def warm() -> None:
        before[:] = traffic(cluster)

    cluster.at(WARM, warm)
    start = time.thread_time()
    cluster.simulate()
    real = time.thread_time() - start
    meter = cluster.coordinator
    took = {name: spent + ledgers[0].seconds[name] for name, spent in meter.seconds.items()}
    store = ledgers[0].inner.store
    records = [len(store.read(name)) for name in store.names("commits/")]
    up, down = (
        (after - then) * 8 / 1e6 / members / (seconds - WARM)
        for after, then in zip(traffic(cluster), before, strict=True)
    )
    return Found(
        result=result(cluster),
        up=up,
        down=down,
        beat=took["beat"] / meter.count["beat"],
        push=took["push"] / max(1, meter.count["push"]),
        commit=took["rounds"] / max(1, len(records) - 1),
        cpu=sum(took.values()) / seconds,
        beat_bytes=round(statistics.fmean(each for each, _ in said)),
        answer_bytes=round(statistics.fmean(each for _, each in said)),
        record_bytes=max(records),
        real=real,
    )


def traffic(cluster: SimulatedSwarm) -> tuple[float, float]:
    """Bytes that all members sent and received so far."""
    return sum(each.up.bytes for each in cluster.machines), sum(each.down.bytes for each in cluster.machines)


def run(settings: Settings) -> Table:
    """The three simulations, one after the other."""
    lengths = {10: 450, 20: 350, 40: 250} if settings.quick else SECONDS
    found = {members: simulate(members, seconds) for members, seconds in lengths.items()}
    few, many = found[min(found)], found[max(found)]
    sent, received = many.up / few.up - 1, many.down / few.down - 1
    lines: list[tuple[str, Callable[[Found], str]]] = [
        ("goodput", lambda each: "–" if each.result.goodput is None else f"{each.result.goodput:.2%}"),
        ("stall of the members", lambda each: f"{each.result.members.stall:.2%}"),
        ("a member sends, Mbit/s", lambda each: f"{each.up:.2f}"),
        ("a member receives, Mbit/s", lambda each: f"{each.down:.2f}"),
        ("aggregators", lambda each: f"{each.result.shards}"),
        ("each receives, Mbit/s", lambda each: f"{each.up * each.result.members.count / each.result.shards:,.0f}"),
        ("each sends, Mbit/s", lambda each: f"{each.down * each.result.members.count / each.result.shards:,.0f}"),
        ("commits", lambda each: f"{each.result.versions}"),
        ("contributors per commit", lambda each: f"{each.result.contributors.mean:,.1f}"),
        ("seconds from choice to record", lambda each: f"{each.result.commit_seconds.mean:.1f}"),
        ("coordinator, messages/s", lambda each: f"{each.result.messages_per_s:,.0f}"),
        ("a heartbeat, µs of a core", lambda each: f"{each.beat * 1e6:.0f}"),
        ("a header, µs", lambda each: f"{each.push * 1e6:,.0f}"),
        ("a commit, ms", lambda each: f"{each.commit * 1e3:,.0f}"),
        ("**share of a core**", lambda each: f"**{each.cpu:.1%}**"),
        ("a heartbeat and its answer, bytes", lambda each: f"{each.beat_bytes:,} and {each.answer_bytes:,}"),
        ("the largest record, KB", lambda each: f"{each.record_bytes / 1e3:,.0f}"),
        ("simulated s, in s of a core", lambda each: f"{each.result.seconds:,.0f}, {each.real:,.0f}"),
    ]
    flat = verdict(abs(sent) <= FLAT and abs(received) <= FLAT)
    return Table(
        "Scale, simulated",
        ("members", *(f"{members:,}" for members in found)),
        [(name, *(show(each) for each in found.values())) for name, show in lines],
        [
            "GPT-2 124M in int8, a push every 100 steps of a second, links of 1 Gbit/s and 40 ms, "
            "each member preempted every 2 hours on average and back after 3 minutes",
            f"traffic from second {WARM} on; from the fewest members to the most a member sends "
            f"{sent:+.1%} and receives {received:+.1%}; limit ±{FLAT:.0%}: {flat}",
            f"a coordinator's core would be full at about {full(found):,} members, without the carrying of messages",
        ],
    )


def full(found: dict[int, Found]) -> int:
    """Members at which its share of a core is 1, from the growth between the two largest numbers."""
    (few, less), (many, more) = sorted((members, each.cpu) for members, each in found.items())[-2:]
    power = math.log(more / less) / math.log(many / few)
    return int(round(many * (1 / more) ** (1 / power), -2))
