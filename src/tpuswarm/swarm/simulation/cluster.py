"""A whole swarm under a virtual clock: the product's coordinator and members, with time in the place of arrays.

Members train, push, adopt, die and come back as a scenario says; the coordinator and the aggregators stay. Of messages
only payloads and versions take time in proportion to their bytes; heartbeats take the latency.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil, inf
from typing import Any, cast

from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.coordinator_state import CoordinatorState
from tpuswarm.swarm.core.member_state import MemberState
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.values import Digests, Incarnation, Record
from tpuswarm.swarm.engines.inproc import Faults, Inproc
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Parallel, Process, ProcessEnded, RunBlocking
from tpuswarm.swarm.simulation.meter import Metered
from tpuswarm.swarm.simulation.scenario import Scenario
from tpuswarm.swarm.simulation.stand_ins import NoLedger, TimedShard, genesis, update_bytes
from tpuswarm.swarm.simulation.timed_member import Machine, TimedHolder
from tpuswarm.swarm.storage.ledger import Ledger

JITTER = 0.1
"""Steps take their mean, more or less by up to this share."""
PIECE = 2**25
"""Bytes of it sent at a time."""
COPY = 2e9
"""Bytes a second between a member's devices and its host."""
STORED = 0.02
"""Seconds until a header or a record is stored."""
NEAR = 0.001
"""Seconds of a message between the coordinator and a shard."""
TOO_LONG = 20.0
"""Times what the members would need undisturbed: a run of so many tokens that lasts longer is not waited for."""
LOOKS = 2_000
"""Events between two looks at how far it is."""

COORDINATOR = "coordinator"
DIGESTS = Digests("layout", "config", "data", "code")


class SimulatedSwarm(Inproc):
    """A scenario, and `simulate`, once."""

    def __init__(self, scenario: Scenario, ledger: Callable[[Record], Any] = NoLedger):
        """ledger: made from genesis."""
        super().__init__(scenario.seed, faults=Faults(timeout=inf), on_ended=self._ended)
        self.scenario = scenario
        self.machines = [
            Machine(f"m{group}-{number}", each, scenario.step_s(each))
            for group, each in enumerate(scenario.members)
            for number in range(each.count)
        ]
        self._by_name = {machine.name: machine for machine in self.machines}
        tokens = scenario.tokens or 2 * scenario.tokens_per_s * (scenario.hours or 0) * 3600
        batch = scenario.model.batch
        self.terms = Terms(
            run="simulation",
            digests=DIGESTS,
            batch=batch,
            tokens_per_row=scenario.model.tokens_per_row,
            horizon=ceil(tokens / scenario.tokens_per_step) * batch,
            cycle=scenario.exchange.cycle * batch,
            members=tuple(machine.name for machine in self.machines),
            outer=OuterRule("nesterov", downlink=scenario.form),
        )
        first = genesis(self.terms, scenario.fragments)
        self.records = {0: first}
        self.shards = {
            f"aggregator-{index}": TimedShard(
                self.records, range(index, scenario.fragments, scenario.shards), self._fragment
            )
            for index in range(scenario.shards)
        }
        self.refusals: Counter[str] = Counter()
        """Why lives of members ended that the coordinator ended."""
        self.preemptions = 0
        clock = lambda: self.now  # noqa: E731
        made = Coordinator(cast(Ledger, ledger(first)), list(self.shards), clock, clock)
        self.coordinator = Metered(made, clock, self.records)

    @property
    def state(self) -> CoordinatorState:
        """Of the coordinator."""
        return self.coordinator.inner.state

    def simulate(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Until the scenario's length. progress: told from time to time, the share that is done."""
        self.spawn(COORDINATOR, self.coordinator.inner.open(self.terms, founded=True), lambda result: self._opened())
        if self.scenario.hours:
            end = self.scenario.hours * 3600
            self._run(lambda: False, lambda: self.now / end, end, progress)
            self.now = end
        else:
            goal = self.terms.horizon * self.terms.tokens_per_row
            newest: Callable[[], int] = lambda: self.records[len(self.records) - 1].tokens  # noqa: E731
            limit = TOO_LONG * goal / self.scenario.tokens_per_s + 3600
            self._run(lambda: newest() >= goal and self.state.ended, lambda: newest() / goal, limit, progress)
        for machine in self.machines:
            machine.comes(machine.where, self.now)

    def _run(
        self, until: Callable[[], bool], done: Callable[[], float], limit: float, progress: Callable[[float], None]
    ) -> None:
        events = 0

        def look() -> bool:
            nonlocal events
            events += 1
            if events % LOOKS == 0:
                progress(done())
            return until()

        self.run(look, limit)

    def effect_seconds(self, node: str, effect: RunBlocking) -> float:
        """Seconds of an effect."""
        if effect.name == "member trains":
            machine = self._by_name[node]
            machine.step = machine.step_s * self._random.uniform(1 - JITTER, 1 + JITTER)
            return machine.step
        if effect.name in ("member encodes", "member places a version"):
            return 4 * self.scenario.model.parameters / COPY
        return STORED if node == COORDINATOR else 0.0

    def travel_seconds(self, node: str, call: Call, back: bool) -> float:
        """Seconds of a message: half the latency, and its bytes over the member's link."""
        machine = self._by_name.get(node)
        if machine is None:
            return NEAR
        seconds = machine.group.latency_ms / 2000
        size = self._answered(call) if back else self._asked(call)
        if not size:
            return seconds
        shard, group = self.shards[call.address], machine.group
        if back:
            shard.sent += size
            return seconds + machine.down.send(size, group.mbit_down, self.now)
        shard.received += size
        return seconds + machine.up.send(size, group.mbit_up, self.now)

    @property
    def _fragment(self) -> float:
        return self.scenario.model.parameters / self.scenario.fragments

    def _asked(self, call: Call) -> float:
        return self._fragment * self.scenario.pushed_bytes if call.method == "put" else 0.0

    def _answered(self, call: Call) -> float:
        if call.method == "fetch":
            return 4 * self._fragment
        if call.method == "updates":
            _, base, version = call.arguments
            return self._fragment * (update_bytes(self.records, base, version) or 0.0)
        return 0.0

    def _opened(self) -> None:
        self.serve(COORDINATOR, self.coordinator)
        self.spawn(COORDINATOR, self.coordinator.run())
        for name, shard in self.shards.items():
            self.serve(name, shard)
        for machine in self.machines:
            self.at(self._random.uniform(0, machine.step_s), lambda machine=machine: self._start(machine))  # type: ignore[misc]

    def _start(self, machine: Machine) -> None:
        """It is there, new or again, until it is preempted."""
        self._join(machine)
        if hours := machine.group.preempted_every_hours:
            self.at(self.now + self._random.expovariate(1 / (3600 * hours)), lambda: self._preempt(machine))

    def _join(self, machine: Machine) -> None:
        machine.comes("joining", self.now)
        self.spawn(machine.name, self._joining(machine))

    def _preempt(self, machine: Machine) -> None:
        self.preemptions += 1
        self.kill(machine.name)
        machine.comes("gone", self.now)
        machine.life, machine.up.free, machine.down.free = None, self.now, self.now
        self.at(self.now + 60 * machine.group.back_after_minutes, lambda: self._start(machine))

    def _ended(self, node: str, over: ProcessEnded) -> None:
        machine = self._by_name.get(node)
        if machine is None:
            raise over
        self.refusals["".join("N" if each.isdigit() else each for each in str(over))] += 1
        machine.life = None
        self._join(machine)

    def _joining(self, machine: Machine) -> Process:
        newest: Record = self.state.view.newest
        addresses = list(self.shards)
        yield Parallel(
            tuple(
                Call(addresses[number % len(addresses)], "fetch", (number, digest))
                for number, digest in enumerate(newest.state)
            )
        )
        exchange = self.scenario.exchange
        state = MemberState(
            terms=self.terms,
            form=self.scenario.form,
            overlap=exchange.overlap == "auto",
            incarnation=Incarnation(machine.name, f"{self._random.getrandbits(128):032x}"),
            base=newest.version,
            tokens=newest.tokens,
        )
        holder = TimedHolder(machine, self.scenario.fragments)
        life = MemberLoop(state, holder, COORDINATOR, addresses, lambda: self.now, anchor=newest.state)
        machine.life = life
        machine.comes("alive", self.now)
        for process in (life.train(), life.exchange(), life.heartbeats()):
            self.spawn(machine.name, process)
