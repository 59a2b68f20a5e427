"""A whole swarm under a virtual clock: the real coordinator and members, with durations instead of arrays.

Members train, push, adopt, die and return as a scenario says; the coordinator and the aggregators stay. Only payloads
and versions take time in proportion to their bytes; other messages take the latency.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil, inf
from typing import Any, cast

from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.arithmetic.quantize import sent_bytes
from tpuswarm.swarm.core.coordinator_state import CoordinatorState
from tpuswarm.swarm.core.member_state import MemberState
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.values import Digests, Incarnation, Record
from tpuswarm.swarm.engines.inproc import Faults, Inproc
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Parallel, Process, ProcessEnded, RunBlocking
from tpuswarm.swarm.simulation.meter import MeteredCoordinator
from tpuswarm.swarm.simulation.scenario import Scenario
from tpuswarm.swarm.simulation.stand_ins import NoLedger, TimedShard, genesis, update_bytes
from tpuswarm.swarm.simulation.timed_member import Machine, TimedDeviceState
from tpuswarm.swarm.storage.ledger import Ledger

JITTER_SHARE = 0.1
"""A step's duration varies by up to this share of its mean."""
COPY_BYTES_PER_S = 2e9
"""Speed between a member's devices and its host."""
STORE_S = 0.02
"""Time to store a header or a record."""
LOCAL_LATENCY_S = 0.001
"""Time of a message between the coordinator and a shard."""
MAX_SLOWDOWN_FACTOR = 20.0
"""A simulation until a number of tokens is abandoned after this many times its undisturbed duration."""
PROGRESS_EVENT_COUNT = 2_000
"""Events between two progress reports."""

COORDINATOR = "coordinator"
DIGESTS = Digests("layout", "config", "data", "code")


class SimulatedSwarm(Inproc):
    """A scenario; call `simulate` once."""

    def __init__(self, scenario: Scenario, ledger: Callable[[Record], Any] = NoLedger):
        """ledger: makes the ledger from genesis."""
        super().__init__(scenario.seed, faults=Faults(timeout=inf), on_ended=self._ended)
        self.scenario = scenario
        self.machines = [
            Machine(f"{'p' if group.dials_in else 'm'}{index}-{number}", group, scenario.step_s(group))
            for index, group in enumerate(scenario.members)
            for number in range(group.count)
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
        sizes = scenario.fragments
        first = genesis(self.terms, len(sizes))
        self.records = {0: first}
        self.shards = {
            f"aggregator-{index}": TimedShard(self.records, range(index, len(sizes), scenario.shards), sizes)
            for index in range(scenario.shards)
        }
        self.refusals: Counter[str] = Counter()
        """Reasons why the coordinator ended incarnations."""
        self.preemptions = 0
        clock = lambda: self.now  # noqa: E731
        coordinator = Coordinator(cast(Ledger, ledger(first)), list(self.shards), clock, clock)
        self.coordinator = MeteredCoordinator(coordinator, clock, self.records)

    @property
    def state(self) -> CoordinatorState:
        return self.coordinator.inner.state

    def simulate(self, progress: Callable[[float], None] = lambda share: None) -> None:
        """Simulate to the scenario's length. progress: called now and then with the share that is done."""
        self.spawn(COORDINATOR, self.coordinator.inner.open(self.terms, founded=True), lambda result: self._opened())
        if self.scenario.hours:
            end = self.scenario.hours * 3600
            self._run(lambda: False, lambda: self.now / end, end, progress)
            self.now = end
        else:
            goal = self.terms.horizon * self.terms.tokens_per_row
            newest: Callable[[], int] = lambda: self.records[len(self.records) - 1].tokens  # noqa: E731
            limit = MAX_SLOWDOWN_FACTOR * goal / self.scenario.tokens_per_s + 3600
            self._run(lambda: newest() >= goal and self.state.ended, lambda: newest() / goal, limit, progress)
        for machine in self.machines:
            machine.set_state(machine.state, self.now)

    def _run(
        self, until: Callable[[], bool], done: Callable[[], float], limit: float, progress: Callable[[float], None]
    ) -> None:
        events = 0

        def is_done() -> bool:
            nonlocal events
            events += 1
            if events % PROGRESS_EVENT_COUNT == 0:
                progress(done())
            return until()

        self.run(is_done, limit)

    def effect_seconds(self, node: str, effect: RunBlocking) -> float:
        """Return the duration of an effect."""
        if effect.name == "member trains":
            machine = self._by_name[node]
            machine.step = machine.step_s * self._random.uniform(1 - JITTER_SHARE, 1 + JITTER_SHARE)
            return machine.step
        if effect.name in ("member encodes", "member places a version"):
            return 4 * self.scenario.model.parameters / COPY_BYTES_PER_S
        return STORE_S if node == COORDINATOR else 0.0

    def travel_seconds(self, node: str, call: Call, back: bool) -> float:
        """Return half the latency, plus the time of the message's bytes on the member's link."""
        machine = self._by_name.get(node)
        if machine is None:
            return LOCAL_LATENCY_S
        seconds = machine.group.latency_ms / 2000
        size = self._answer_bytes(call) if back else self._request_bytes(call)
        if not size:
            return seconds
        shard, group = self.shards[call.address], machine.group
        if back:
            shard.sent += size
            return seconds + machine.down.send(size, group.mbit_down, self.now)
        shard.received += size
        return seconds + machine.up.send(size, group.mbit_up, self.now)

    def _request_bytes(self, call: Call) -> float:
        if call.method != "put":
            return 0.0
        return sent_bytes(self.scenario.fragments[call.arguments[1]], self.scenario.form)

    def _answer_bytes(self, call: Call) -> float:
        if call.method == "fetch":
            return 4.0 * self.scenario.fragments[call.arguments[0]]
        if call.method == "updates":
            number, base, version = call.arguments
            return update_bytes(self.records, base, version, self.scenario.fragments[number]) or 0.0
        return 0.0

    def _opened(self) -> None:
        self.serve(COORDINATOR, self.coordinator)
        self.spawn(COORDINATOR, self.coordinator.run())
        for name, shard in self.shards.items():
            self.serve(name, shard)
        for machine in self.machines:
            self.at(self._random.uniform(0, machine.step_s), lambda machine=machine: self._start(machine))  # type: ignore[misc]

    def _start(self, machine: Machine) -> None:
        self._join(machine)
        if hours := machine.group.preempted_every_hours:
            self.at(self.now + self._random.expovariate(1 / (3600 * hours)), lambda: self._preempt(machine))

    def _join(self, machine: Machine) -> None:
        machine.set_state("joining", self.now)
        self.spawn(machine.name, self._joining(machine))

    def _preempt(self, machine: Machine) -> None:
        self.preemptions += 1
        self.kill(machine.name)
        machine.set_state("gone", self.now)
        machine.loop, machine.up.free, machine.down.free = None, self.now, self.now
        self.at(self.now + 60 * machine.group.back_after_minutes, lambda: self._start(machine))

    def _ended(self, node: str, error: ProcessEnded) -> None:
        machine = self._by_name.get(node)
        if machine is None:
            raise error
        self.refusals["".join("N" if character.isdigit() else character for character in str(error))] += 1
        machine.loop = None
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
        device_state = TimedDeviceState(machine, len(self.scenario.fragments))
        loop = MemberLoop(state, device_state, COORDINATOR, addresses, lambda: self.now, anchor=newest.state)
        machine.loop = loop
        machine.set_state("alive", self.now)
        for process in (loop.train(), loop.exchange(), loop.heartbeats()):
            self.spawn(machine.name, process)
