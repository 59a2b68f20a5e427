"""Bytes that members send and receive, beside an all-reduce at every step: real programs, quantized links. 4 minutes.

Four members of gpt2-tiny, their shards and their coordinator run in one process, under a virtual clock in which a step
takes about a second. What passes between a member and the others is counted at the member: each call and each answer
as the bytes that pickle makes of it, heartbeats and headers included; what the network adds is not counted.

Beside it a ring all-reduce of float32 gradients at every step, of which each of M members sends, and receives,
2 x (M - 1) / M x 4 bytes a parameter. Limit: 400 times less, each way.
"""

import pickle
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.report import Settings, Table, verdict
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.swarm.core.arithmetic.outer import OuterRule, initial_state
from tpuswarm.swarm.core.member_state import MemberState
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.values import Digests, Form, Incarnation, Record
from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.member.program_state import ProgramState, layout_of
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Parallel, Process
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.platform import local_devices
from tpuswarm.train.program.compiled import Compiled, compile_step
from tpuswarm.train.program.request import default_request

MEMBERS, CYCLE, CYCLES, FRAGMENTS, SHARDS = 4, 100, 4, 4, 2
FORMS: tuple[Form, ...] = ("int8", "int4", "plain")
SPREAD = 0.2
"""Members' speeds differ by up to so much; H is in proportion."""
LIMIT = 400


def run(settings: Settings) -> Table:
    """The same run in three forms."""
    recipe = GPT2(size="tiny")
    compiled = compile_step(recipe, default_request(recipe), local_devices()[:1])
    cycle, cycles = (4, 2) if settings.quick else (CYCLE, CYCLES)
    rows: list[tuple[str, ...]] = []
    for form in FORMS:
        swarm = Swarm(recipe, compiled, form, cycle, cycles)
        swarm.run()
        rows += swarm.rows(limited=form == "int8")
        print(f"{form}: {rows[-2][2]} and {rows[-1][2]} times less", file=sys.stderr)
    tokens = swarm.terms.batch * swarm.terms.tokens_per_row
    reduced = 2 * (MEMBERS - 1) / MEMBERS * 4 * swarm.parameters / tokens
    return Table(
        f"Traffic of a member of {MEMBERS}, gpt2-tiny ({swarm.parameters:,} parameters), H = {cycle}",
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
            f"an f32 ring all-reduce at every step: {reduced:,.0f} bytes per token each way, {tokens} tokens per step",
            f"about {cycles} cycles of each member, speeds up to {SPREAD:.0%} apart, Nesterov; {SHARDS} shards",
            "bytes of pickled calls and answers, of all members, over the tokens counted; joining is left out",
        ],
    )


class Swarm:
    """Members with real programs, their traffic counted."""

    def __init__(self, recipe: GPT2, compiled: Compiled, form: Form, cycle: int, cycles: int):
        self._form, self._cycle = form, cycle
        self.sent: Counter[str] = Counter()
        """Bytes by method of the call."""
        self.received: Counter[str] = Counter()
        speeds = random.Random(1)
        step = [speeds.uniform(1 - SPREAD / 2, 1 + SPREAD / 2) for _ in range(MEMBERS)]
        self._engine = _Engine(3, step)
        layout = layout_of(compiled, FRAGMENTS)
        self.parameters = sum(layout.sizes)
        batch = int(recipe.defaults["batch"])
        outer = OuterRule("nesterov", downlink=form)
        self.terms = Terms(
            run="traffic", digests=Digests(layout.digest, "c" * 64, "d" * 64, "e" * 64), batch=batch,
            tokens_per_row=compiled.program.tokens_per_row, horizon=MEMBERS * cycle * cycles * batch,
            cycle=cycle * batch, members=tuple(f"m{n}" for n in range(MEMBERS)), outer=outer,
        )  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        store = Store(Path(self._folder.name) / "run")
        self._ledger, objects = Ledger(store), Objects(store)
        shards = [f"shard-{n}" for n in range(SHARDS)]
        for number, address in enumerate(shards):
            self._engine.serve(address, Aggregator(self._ledger, objects, layout.sizes, number, SHARDS))
        state = compiled.init(jax.random.key(0))
        shared = compiled.program.exchange().get(state)
        anchor = layout.split(dict(zip(leaf_paths(shared), map(np.asarray, jax.tree.leaves(shared)), strict=True)))
        outer_state = [initial_state(outer, each) for each in anchor]
        self._ledger.append(
            Record(
                run="traffic",
                version=0,
                epoch=1,
                parent="",
                state=tuple(map(objects.put_array, anchor)),
                outer=tuple(objects.put_array(each) for each in outer_state if each is not None),
                decisions=(),
                rule=outer.rule,
                rate=0.0,
                momentum=outer.momentum,
                share=0.0,
                gathered=0.0,
                tokens=0,
                changes=0,
                processed=(),
                digests=self.terms.digests,
                time=0.0,
                downlink=form,
            )
        )
        clock = lambda: self._engine.now  # noqa: E731
        self._coordinator = Coordinator(self._ledger, shards, clock, clock)
        self._engine.spawn("coordinator", self._coordinator.open(self.terms, founded=True), self._opened)
        for number in range(MEMBERS):
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
        """To the end."""
        ended = lambda: hasattr(self._coordinator, "state") and self._coordinator.state.ended  # noqa: E731
        assert self._engine.run(ended, 10**6), "no clean end"
        self._tokens = self._ledger.view().newest.tokens
        self._folder.cleanup()

    def rows(self, limited: bool) -> list[tuple[str, ...]]:
        """Sent and received."""
        step = self.terms.batch * self.terms.tokens_per_row
        reduced = 2 * (MEMBERS - 1) / MEMBERS * 4 * self.parameters / step
        rows: list[tuple[str, ...]] = []
        for direction, counted in (("sent", self.sent), ("received", self.received)):
            arrays = sum(counted[method] for method in ("put", "updates", "fetch")) / self._tokens
            rest = counted.total() / self._tokens - arrays
            less = reduced / (arrays + rest)
            limit = (f"at least {LIMIT}", verdict(less >= LIMIT)) if limited else ("", "")
            shown = f"{arrays + rest:.1f}", f"{less:.0f}", f"{arrays:.1f}", f"{rest:.1f}"
            rows.append((f"{self._form}, {direction}", *shown, *limit))
        return rows

    def _opened(self, result: Any) -> None:
        self._engine.serve("coordinator", self._coordinator)
        self._engine.spawn("coordinator", self._coordinator.run())

    def _counted(self, process: Process) -> Process:
        """A process whose calls and answers are counted."""
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
            except Exception as raised:  # noqa: BLE001  # the process decides what it means
                error = raised
            for call, answer in zip(calls, value if isinstance(effect, Parallel) else [value], strict=False):
                self.received[call.method] += _size(answer)


class _Engine(Inproc):
    """A step takes what its member's speed says."""

    def __init__(self, seed: int, step: list[float]):
        super().__init__(seed)
        self._step_s = step

    def effect_seconds(self, node: str, effect: Any) -> float:
        """Seconds of an effect."""
        return self._step_s[int(node[1:])] if effect.name == "member trains" else super().effect_seconds(node, effect)


def _size(value: Any) -> int:
    return len(pickle.dumps(value, protocol=5))
