"""A simulated swarm with exact parameters: every trained row shows in the state, with its coefficient.

A row that is lost, doubled, or claimed without being in the state shows as a wrong coefficient. The processes, state
machines and engine are the product's; the arrays, the ledger's storage and the shards are those of exact.py.
"""

import random
from dataclasses import dataclass, field
from fractions import Fraction
from operator import is_
from typing import Any

from tests.swarm.exact import (
    DIGESTS,
    NAN,
    SHARDS,
    ExactDeviceState,
    MemoryLedger,
    Shard,
    Vector,
    combine,
    digest,
    genesis,
    split,
    trained_rows,
)
from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.member_state import MemberState
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.values import Identity, Incarnation
from tpuswarm.swarm.engines.inproc import Faults, Inproc
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import ProcessEnded


@dataclass
class World:
    """Members, shards and a coordinator; each restarts some time after it died."""

    seed: int
    members: int = 3
    horizon: int = 24
    cycle: int = 2
    batch: int = 1
    own: tuple[int, ...] = ()
    """The batch of each member, a divisor of the run's; empty: all have the run's."""
    overlap: bool = True
    faults: Faults = field(default_factory=Faults)
    poison: set[int] = field(default_factory=set)
    kill_at: int | None = None
    """The effect boundary, counted from 0, that kills the node which reaches it."""
    stop_at: int | None = None
    """The effect boundary that stops the node which reaches it for a minute."""
    random_kills: int = 0
    lost_payloads: int = 0
    """Payloads deleted at random moments, accepted ones too."""
    race_at: float | None = None
    """When a second coordinator starts, and half of the members switch to it."""
    staleness: Staleness = field(default_factory=Staleness)
    downlink: bool = False
    """Members receive the change of a version instead of the version."""

    def __post_init__(self) -> None:
        self.rnd = random.Random(self.seed)
        self.speeds = [self.rnd.uniform(0.5, 2.0) for _ in range(self.members)]
        seconds = lambda rnd, name: rnd.uniform(0.5, 1.5) if name == "member trains" else rnd.uniform(0.001, 0.3)  # noqa: E731
        self.engine = Inproc(
            self.seed, seconds=seconds, faults=self.faults, watch=self.watch, on_ended=self.restart_ended
        )
        self.points: list[tuple[str, str, str]] = []
        self.ledger = MemoryLedger()
        self.payloads: dict[tuple[Identity, int], Vector] = {}
        self.sent: dict[tuple[Identity, int], Vector] = {}
        self.objects: dict[str, Vector] = {digest({}): {}}
        self.terms = Terms(
            run="run", digests=DIGESTS, batch=self.batch, tokens_per_row=10, horizon=self.horizon, cycle=self.cycle,
            members=tuple(f"m{n}" for n in range(self.members)), staleness=self.staleness,
            outer=OuterRule("average", downlink="int8" if self.downlink else "plain"),
        )  # fmt: skip
        self.ledger.records.append(genesis(self.terms))
        self.shards = [f"shard-{n}" for n in range(SHARDS)]
        self.processes: dict[str, MemberLoop] = {}
        self.messages: list[str] = []
        self.thetas: dict[int, Vector] = {}
        self.lives = 0
        self.checked: dict[str, tuple[Any, ...]] = {}
        """The parts of each member at its last check; they are replaced, never changed."""
        self.kills = self.stops = 0
        self.processed: dict[Incarnation, int] = {}
        """Rows trained, counted independently of the product."""
        self.coordinators: dict[str, Coordinator] = {}
        self.addresses = {f"m{n}": "coordinator" for n in range(self.members)}
        self.start_coordinator(founded=True)
        for name in self.shards:
            self.start_shard(name)
        for number in range(self.members):
            self.start_member(f"m{number}")
        for _ in range(self.random_kills):
            node = self.rnd.choice(["coordinator", *self.shards, *(f"m{n}" for n in range(self.members))])
            self.engine.at(self.rnd.uniform(1, 60), lambda node=node: self.crash(node))
        for _ in range(self.lost_payloads):
            self.engine.at(self.rnd.uniform(1, 40), self.lose_payload)
        if self.race_at is not None:
            self.engine.at(self.race_at, self.add_coordinator)

    def start_coordinator(self, node: str = "coordinator", founded: bool = False) -> None:
        clock = lambda: self.engine.now  # noqa: E731
        made = Coordinator(self.ledger, self.shards, clock, clock)

        def opened(result: Any) -> None:
            self.coordinators[node] = made
            self.engine.serve(node, made)
            self.engine.spawn(node, made.run())

        self.engine.spawn(node, made.open(self.terms, founded=founded), opened)

    def lose_payload(self) -> None:
        undecided = [key for key in self.payloads if key[0] not in self.ledger.verdicts()]
        if undecided:
            del self.payloads[self.rnd.choice(sorted(undecided))]

    def add_coordinator(self) -> None:
        self.start_coordinator("coordinator-2")
        for name in list(self.addresses)[::2]:
            self.point(name, "coordinator-2")

    def point(self, member: str, coordinator: str) -> None:
        self.addresses[member] = coordinator
        if member in self.processes:
            self.processes[member].coordinator = coordinator

    def start_shard(self, name: str) -> None:
        index = self.shards.index(name)
        made = Shard(index, self.ledger, self.payloads, self.objects, self.sent, random.Random(self.seed + index))
        self.engine.serve(name, made)

    def theta(self, version: int) -> Vector:
        if version not in self.thetas:
            self.thetas[version] = combine(*((1, self.objects[name]) for name in self.ledger.records[version].state))
        return self.thetas[version]

    def start_member(self, name: str) -> None:
        self.lives += 1
        incarnation = Incarnation(name, f"{self.rnd.getrandbits(128):032x}")
        newest = self.ledger.records[-1]
        theta = self.theta(newest.version)
        state = MemberState(
            terms=self.terms, form="plain", overlap=self.overlap, incarnation=incarnation,
            base=newest.version, tokens=newest.tokens, batch=self.own[int(name[1:])] if self.own else None,
        )  # fmt: skip
        device_state = ExactDeviceState(incarnation, theta, theta, self.poison, self.processed)
        made = self.processes[name] = MemberLoop(
            state, device_state, self.addresses[name], self.shards, lambda: self.engine.now, anchor=split(theta),
            say=self.messages.append,
        )  # fmt: skip
        for process in (made.train(), made.exchange(), made.heartbeats()):
            self.engine.spawn(name, process)

    def watch(self, node: str, name: str, when: str) -> None:
        if when == "before":
            self.check()
        self.points.append((node, name, when))
        if self.kill_at is not None and len(self.points) == self.kill_at + 1:
            self.crash(node)
        if self.stop_at is not None and len(self.points) == self.stop_at + 1:
            self.stops += 1
            self.engine.stop(node, 60.0)

    def crash(self, node: str) -> None:
        self.kills += 1
        self.engine.kill(node)
        self.restart(node, self.rnd.uniform(0.1, 5))

    def restart_ended(self, node: str, over: ProcessEnded) -> None:
        self.restart(node, 0.1)

    def restart(self, node: str, after: float) -> None:
        """Start a dead node again, as a supervisor does; of two coordinators only one comes back."""
        self.processes.pop(node, None)
        self.coordinators.pop(node, None)
        if node.startswith("coordinator") and self.race_at is not None and self.engine.now > self.race_at:
            other = "coordinator" if node == "coordinator-2" else "coordinator-2"
            for member in self.addresses:
                self.point(member, other if other in self.coordinators else node)
            if other in self.coordinators:
                return
        start = {name: lambda name=name: self.start_shard(name) for name in self.shards} | {
            name: lambda name=name: self.start_coordinator(name) for name in ("coordinator", "coordinator-2")
        }
        self.engine.at(self.engine.now + after, start.get(node, lambda: self.start_member(node)))

    def run(self, limit: float = 5000.0) -> LedgerView:
        assert self.engine.run(self.has_ended, limit), f"no clean end by {self.engine.now:.0f} s"
        self.check_ledger()
        return self.ledger.view()

    def has_ended(self) -> bool:
        return any(coordinator.state.ended for coordinator in self.coordinators.values())

    def check(self) -> None:
        """Check that the parameters of every living member hold exactly the rows that its state calls outstanding."""
        for name, made in self.processes.items():
            if self.engine.is_stopped(name):
                continue  # it may have changed its parameters and not yet its state
            device_state, state = made.device_state, made.state
            assert isinstance(device_state, ExactDeviceState)
            now = device_state.theta, device_state.anchor, state, made.anchor, made._anchor_version
            if name in self.checked and all(map(is_, self.checked[name], now)):
                continue
            self.checked[name] = now
            own = combine((1, device_state.theta), (-1, self.theta(state.base)))
            rows = {basis: value for basis, value in own.items() if basis[0] != NAN}
            assert rows == trained_rows(state.outstanding, state.incarnation)
            assert device_state.anchor == self.theta(state.base)
            assert list(made.anchor) == split(self.theta(made._anchor_version))
            assert made._anchor_version >= state.base * self.downlink

    def check_ledger(self) -> None:
        """Check that every row is counted once, and that the ledger replays to each version."""
        view = self.ledger.view()
        assert len(view.counted) == self.horizon
        assert sum(self.processed.values()) >= len(view.counted) + len(view.skipped)
        for record in self.ledger.records:
            assert view.changes(record.version) == record.changes
        theta: Vector = {}
        for record in self.ledger.records[1:]:
            applied = [decision for decision in record.decisions if decision.fate == "applied"]
            total = sum(Fraction(decision.weight) for decision in applied)
            for decision in applied:
                sent = [(1, self.sent[decision.identity, number]) for number in range(SHARDS)]
                delta = combine(*sent, (-1, self.theta(decision.base)))
                expected = trained_rows(decision.rows, decision.identity.incarnation)
                assert delta == expected, "the header lists other rows"
                theta = combine((1, theta), (Fraction(decision.weight) / total, delta))
            assert theta == self.theta(record.version), f"version {record.version} is not the replay of the ledger"
