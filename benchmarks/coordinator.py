"""Measure a coordinator's processor time with 2 to 4,000 members, in process and without message transport. 1 minute.

Each member holds a lease of two cycles and has pushed one. A restart reads the ledger and all stored headers, and hears
every member; a commit chooses among all pushes and creates the record. Requests are checked as in a run; the ledger's
JSON goes to memory, and nothing is merged.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.swarm.memory_store import MemoryStore

from benchmarks.report import Settings, Table, median, verdict
from tpuswarm.swarm.core import transitions as core
from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.messages import Accepted, Granted, Heartbeat, Terms
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.core.values import Digests, Header, Identity, Incarnation
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Process
from tpuswarm.swarm.simulation.stand_ins import genesis
from tpuswarm.swarm.storage.ledger import Ledger

MEMBER_COUNTS = (2, 8, 32, 128, 1000, 4000)
REPEAT_COUNT = 5
BATCH, CYCLE_STEPS, TOKENS_PER_ROW = 64, 100, 1024
FRAGMENT_COUNT = 16
MAX_RESTART_S, MAX_PUSHES_S = 1.0, 0.5
"""For the most members."""
DIGESTS = Digests("a" * 64, "b" * 64, "c" * 64, "d" * 64)


def run(settings: Settings) -> Table:
    counts, repeats = ((2, 8), 1) if settings.quick else (MEMBER_COUNTS, REPEAT_COUNT)
    rows: list[tuple[str, ...]] = []
    for members in counts:
        runs = [Swarm(members).measure() for _ in range(repeats)]
        restart, beats, pushes, commit = (median([took[step] for took in runs]).middle for step in range(4))
        rows.append(
            (f"{members:,}", f"{restart:.3f}", f"{beats / members * 1e6:.0f}", f"{pushes / members * 1e6:.0f}",
             f"{pushes:.3f}", f"{commit * 1e3:.1f}")
        )  # fmt: skip
    notes = [
        f"median of {repeats}, seconds of a core; {FRAGMENT_COUNT} fragments",
        f"limits for {members:,} members: restart {MAX_RESTART_S:g} s: {verdict(restart <= MAX_RESTART_S)}; all pushes "
        f"{MAX_PUSHES_S:g} s: {verdict(pushes <= MAX_PUSHES_S)}",
    ]
    header = ("members", "restart, s", "a heartbeat, µs", "a push, µs", "all push, s", "a commit, ms")
    return Table("Scale of a coordinator", header, rows, notes)


class Swarm:
    """A ledger in memory, and what its members hold."""

    def __init__(self, members: int):
        self._keys = [Incarnation(f"m{number}", f"{number:032x}") for number in range(members)]
        cycle = CYCLE_STEPS * BATCH
        self._terms = Terms(
            "scale", DIGESTS, BATCH, TOKENS_PER_ROW, 100 * members * cycle, cycle,
            tuple(key.member for key in self._keys), OuterRule("average"),
        )  # fmt: skip
        self._ledger = Ledger(MemoryStore())
        self._ledger.append(replace(genesis(self._terms, 0), state=_digests("e")))

    def measure(self) -> tuple[float, float, float, float]:
        """Return the seconds of a restart, of a heartbeat and of a push of all members, and of a commit."""
        first = self._start(founded=True)
        leases = {key: first.beat(self._report(key, NO_ROWS, NO_ROWS, None)).rows for key in self._keys}
        trained = {key: rows.first(self._terms.cycle) for key, rows in leases.items()}
        reports = [self._report(key, leases[key] - trained[key], trained[key], None) for key in self._keys]
        beats = seconds(lambda: [first.beat(report) for report in reports])
        headers = [self._header(key, rows) for key, rows in trained.items()]
        Random(0).shuffle(headers)
        answers: list[object] = []
        pushes = seconds(lambda: answers.extend(drive(first.push(header)) for header in headers))
        assert all(isinstance(answer, Accepted) for answer in answers)
        ended: list[Coordinator] = []
        restart = seconds(lambda: ended.append(self._restart(headers, leases)))
        return restart, beats, pushes, seconds(lambda: self._commit(ended[0]))

    def _start(self, founded: bool) -> Coordinator:
        coordinator = Coordinator(self._ledger, ["aggregator"], lambda: 0.0, lambda: 0.0)
        drive(coordinator.open(self._terms, founded=founded))
        return coordinator

    def _restart(self, headers: list[Header], leases: dict[Incarnation, Rows]) -> Coordinator:
        coordinator = self._start(founded=False)
        for header in headers:
            key = header.identity.incarnation
            report = self._report(key, leases[key] - header.rows, header.rows, header.identity)
            assert isinstance(coordinator.beat(report), Granted)
        return coordinator

    def _commit(self, coordinator: Coordinator) -> None:
        state, merge, _ = core.tick(coordinator.state, 1.0)
        assert merge is not None and len(merge.decisions) == len(self._keys)
        parent = self._ledger.digest(state.view.newest)
        record = core.make_record(state, parent, _digests("f"), (), (), 1.0)
        state.view.after(record)
        self._ledger.append(record)
        core.record_committed(state, record)

    def _report(self, key: Incarnation, todo: Rows, outstanding: Rows, undecided: Identity | None) -> Heartbeat:
        tokens = len(outstanding) * TOKENS_PER_ROW
        return Heartbeat(key, DIGESTS, bool(outstanding), 0, todo, outstanding, undecided, float(BATCH), tokens)

    def _header(self, key: Incarnation, rows: Rows) -> Header:
        tokens = len(rows) * TOKENS_PER_ROW
        return Header(
            Identity(key, 1), "scale", 0, rows, tokens, CYCLE_STEPS, "int8", 1.0, True, _digests("d")
        )  # fmt: skip


def _digests(digit: str) -> tuple[str, ...]:
    return (64 * digit,) * FRAGMENT_COUNT


def drive(process: Process) -> Any:
    """Run a process that only blocks; return its result."""
    try:
        effect = next(process)
        while True:
            effect = process.send(effect.action())  # type: ignore[union-attr]
    except StopIteration as end:
        return end.value


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of this thread for `work`."""
    start = time.thread_time()
    work()
    return time.thread_time() - start
