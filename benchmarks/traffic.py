"""Count the bytes that members send and receive, with real programs and quantized links. 4 minutes.

Four members of gpt2-tiny, shards and coordinator run in one process, with a virtual clock and steps of about a second.
Calls and answers of members are counted as pickled bytes, including heartbeats and headers. For comparison: in a ring
all-reduce of float32 gradients each of M members sends and receives 2 x (M - 1) / M x 4 bytes a parameter in every
step. Limit: 400 times less, each way.
"""

import pickle
import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.report import Settings, Table, verdict
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.swarm.core.arithmetic.outer import OuterRule, initial_state
from tpuswarm.swarm.core.member_state import MemberState
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.values import Digests, Form, Incarnation
from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.member.program_state import ProgramState, layout_of
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Parallel, Process
from tpuswarm.swarm.simulation.stand_ins import genesis
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.platform import local_devices
from tpuswarm.train.program.compiled import Compiled, compile_step
from tpuswarm.train.program.request import default_request

MEMBER_COUNT, CYCLE_STEP_COUNT, CYCLE_COUNT, FRAGMENT_COUNT, SHARD_COUNT = 4, 100, 4, 4, 2
FORMS: tuple[Form, ...] = ("int8", "int4", "plain")
SPEED_SPREAD_RATIO = 0.2
"""Between the slowest and the fastest member; H is in proportion."""
MIN_REDUCTION_FACTOR = 400


def run(settings: Settings) -> Table:
    recipe = GPT2(size="tiny")
    compiled = compile_step(recipe, default_request(recipe), local_devices()[:1])
    cycle, cycles = (4, 2) if settings.quick else (CYCLE_STEP_COUNT, CYCLE_COUNT)
    rows: list[tuple[str, ...]] = []
    for form in FORMS:
        swarm = Swarm(recipe, compiled, form, cycle, cycles)
        swarm.run()
        rows += swarm.rows(has_limit=form == "int8")
        print(f"{form}: {rows[-2][2]} and {rows[-1][2]} times less", file=sys.stderr)
    tokens = swarm.terms.batch * swarm.terms.tokens_per_row
    reduced = 2 * (MEMBER_COUNT - 1) / MEMBER_COUNT * 4 * swarm.parameters / tokens
    return Table(
        f"Traffic of a member of {MEMBER_COUNT}, gpt2-tiny ({swarm.parameters:,} parameters), H = {cycle}",
        (
            "links, direction",
            "bytes per token",
            "reduction",
            "payloads and commits",
            "heartbeats, headers",
            "limit",
            "",
        ),
        rows,
        [
            f"a float32 ring all-reduce: {reduced:,.0f} bytes per token each way, {tokens} tokens per step",
            f"about {cycles} cycles, speeds up to {SPEED_SPREAD_RATIO:.0%} apart, Nesterov; {SHARD_COUNT} shards",
            "pickled bytes of all members' calls and answers over the tokens counted, without joining",
        ],
    )


class Swarm:
    """Members with real programs and counted traffic."""

    def __init__(self, recipe: GPT2, compiled: Compiled, form: Form, cycle: int, cycles: int):
        self._form, self._cycle = form, cycle
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        speeds = random.Random(1)
        step = [speeds.uniform(1 - SPEED_SPREAD_RATIO / 2, 1 + SPEED_SPREAD_RATIO / 2) for _ in range(MEMBER_COUNT)]
        self._engine = _Engine(3, step)
        layout = layout_of(compiled, FRAGMENT_COUNT)
        self.parameters = sum(layout.sizes)
        batch = int(recipe.defaults["batch"])
        outer = OuterRule("nesterov", downlink=form)
        self.terms = Terms(
            run="traffic", digests=Digests(layout.digest, "c" * 64, "d" * 64, "e" * 64), batch=batch,
            tokens_per_row=compiled.program.tokens_per_row, horizon=MEMBER_COUNT * cycle * cycles * batch,
            cycle=cycle * batch, members=tuple(f"m{n}" for n in range(MEMBER_COUNT)), outer=outer,
        )  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        store = Store(Path(self._folder.name) / "run")
        self._ledger, objects = Ledger(store), Objects(store)
        shards = [f"shard-{n}" for n in range(SHARD_COUNT)]
        for number, address in enumerate(shards):
            self._engine.serve(address, Aggregator(self._ledger, objects, layout.sizes, number, SHARD_COUNT))
        state = compiled.init(jax.random.key(0))
        shared = compiled.program.exchange().get(state)
        anchor = layout.split(dict(zip(leaf_paths(shared), map(np.asarray, jax.tree.leaves(shared)), strict=True)))
        outer_state = [initial_state(outer, array) for array in anchor]
        self._ledger.append(
            replace(
                genesis(self.terms, 0), state=tuple(map(objects.put_array, anchor)), downlink=form,
                outer=tuple(objects.put_array(array) for array in outer_state if array is not None),
            )
        )  # fmt: skip
        clock = lambda: self._engine.now  # noqa: E731
        self._coordinator = Coordinator(self._ledger, shards, clock, clock)
        self._engine.spawn("coordinator", self._coordinator.open(self.terms, founded=True), self._opened)
        for number in range(MEMBER_COUNT):
            own = compiled.init(jax.random.key(0))
            key = jax.random.key(1)
            holder = ProgramState(
                compiled, recipe.data("train"), layout, form, key, own, anchor, lambda at, metrics: None, None, None
            )
            incarnation = Incarnation(f"m{number}", f"{number:032x}")
            state = MemberState(self.terms, form, True, incarnation, 0, 0)
            member = MemberLoop(state, holder, "coordinator", shards, clock, anchor=anchor)
            for process in (member.train(), member.exchange(), member.heartbeats()):
                self._engine.spawn(f"m{number}", self._counted(process))

    def run(self) -> None:
        ended = lambda: hasattr(self._coordinator, "state") and self._coordinator.state.ended  # noqa: E731
        assert self._engine.run(ended, 10**6), "no clean end"
        self._tokens = self._ledger.view().newest.tokens
        self._folder.cleanup()

    def rows(self, has_limit: bool) -> list[tuple[str, ...]]:
        step = self.terms.batch * self.terms.tokens_per_row
        reduced = 2 * (MEMBER_COUNT - 1) / MEMBER_COUNT * 4 * self.parameters / step
        rows: list[tuple[str, ...]] = []
        for direction, counted in (("sent", self.sent), ("received", self.received)):
            arrays = sum(counted[method] for method in ("put", "updates", "fetch")) / self._tokens
            rest = counted.total() / self._tokens - arrays
            less = reduced / (arrays + rest)
            limit = (
                (f"at least {MIN_REDUCTION_FACTOR}", verdict(less >= MIN_REDUCTION_FACTOR)) if has_limit else ("", "")
            )
            shown = f"{arrays + rest:.1f}", f"{less:.0f}", f"{arrays:.1f}", f"{rest:.1f}"
            rows.append((f"{self._form}, {direction}", *shown, *limit))
        return rows

    def _opened(self, result: Any) -> None:
        self._engine.serve("coordinator", self._coordinator)
        self._engine.spawn("coordinator", self._coordinator.run())

    def _counted(self, process: Process) -> Process:
        """Run a process and count its calls and answers."""
        value: Any = None
        error: Exception | None = None
        while True:
            try:
                effect = process.throw(error) if error else process.send(value)
            except StopIteration:
                return
            calls = effect.calls if isinstance(effect, Parallel) else [effect] if isinstance(effect, Call) else []
            for call in calls:
                self.sent[call.method] += _size((call.address, call.method, call.arguments))
            value, error = None, None
            try:
                value = yield effect
            except Exception as raised:  # noqa: BLE001  # the process handles it
                error = raised
            for call, answer in zip(calls, value if isinstance(effect, Parallel) else [value], strict=False):
                self.received[call.method] += _size(answer)


class _Engine(Inproc):
    """An engine whose members have different speeds."""

    def __init__(self, seed: int, step: list[float]):
        super().__init__(seed)
        self._step_s = step

    def effect_seconds(self, node: str, effect: Any) -> float:
        return self._step_s[int(node[1:])] if effect.name == "member trains" else super().effect_seconds(node, effect)


def _size(value: Any) -> int:
    return len(pickle.dumps(value, protocol=5))
