"""Measure how much the exchange stalls a member's devices, on gpt2-tiny. Limit: 1% with a core to spare.

A member and a bare loop of the same compiled step take turns in one process, block by block, each timed until its last
state is ready. Stall is the extra time of the member's block: snapshots, encoding, adoptions, waiting for rows, and
threads on the step's cores. Coordinator, aggregator and storage run in another process, called through pipes. A block
is a whole number of cycles and ends in the middle of one, so that it contains a push.

Without a core to spare, everything shares the machine's cores. With one, the training thread, XLA's threads and the
bare loop are pinned to one core; the exchange's thread and the other process to another.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.bare import Bare, compile_bare
from benchmarks.report import Settings, Skipped, Table, median, verdict
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.member_state import MemberState
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.values import Digests, Form, Incarnation
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.member.program_state import ProgramState, layout_of
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Process, RunBlocking, Sleep, Unreachable
from tpuswarm.swarm.simulation.stand_ins import genesis
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.data.feed import Feed
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.platform import local_devices
from tpuswarm.train.program.mesh import batch_sharding

PAIR_COUNT, CYCLES = 6, {50: 2, 100: 1}
"""CYCLES: steps of a cycle → cycles of a block."""
FORMS: tuple[Form, ...] = ("plain", "int8")
MAX_STALL_RATIO = 0.01


def run(settings: Settings) -> Table:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise Skipped("it needs two cores")
    pairs = 2 if settings.quick else PAIR_COUNT
    rows = []
    for has_spare_core in (False, True):
        where = f"{len(cores)} cores" if not has_spare_core else "a core to spare"
        for cycle, cycles in CYCLES.items():
            for form in FORMS:
                pinned = (cores[:1], cores[1:2]) if has_spare_core else (cores, cores)
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
                    count = 1 if settings.quick else cycles
                    future = child.submit(measure, form, cycle, count, pairs, *pinned)
                    stall, bare, waited, commits = future.result()
                share = median(stall)
                limit = (
                    (f"at most {MAX_STALL_RATIO:.0%}", verdict(share.middle <= MAX_STALL_RATIO))
                    if has_spare_core
                    else ("", "")
                )
                print(f"{where}, cycle {cycle}, {form}: {share.show('+.2%')}", file=sys.stderr, flush=True)
                shares = [f"{ratio:.2%}" for ratio in waited]
                speed = median(bare).show(".1f")
                rows.append((where, str(cycle), form, speed, share.show("+.2%"), *shares, str(commits), *limit))
    columns = ("", "cycle", "payload", "bare loop, ms per step", "stall: median (95% interval)", "no rows", "calls")
    return Table(
        "Stall of a member caused by its pushes, gpt2-tiny, overlap auto",
        (*columns, "commits", "limit", ""),
        rows,
        [
            f"{pairs} interleaved pairs of blocks of 100 steps; stall = (member - bare) / member of each pair",
            "shares of the training thread's time: no rows: it had nothing to train; calls: snapshots and adoptions",
            "a core to spare: the steps have one core, the pushes, the coordinator and the aggregator another",
        ],
    )


def measure(
    form: Form, cycle: int, cycles: int, pairs: int, steps_on: Sequence[int], rest_on: Sequence[int]
) -> tuple[list[float], list[float], list[float], int]:
    """Return each pair's stall and the bare loop's ms per step, the shares of waiting, and the number of commits."""
    os.sched_setaffinity(0, steps_on)  # before XLA starts its threads
    recipe = GPT2(size="tiny")
    bare, batch = compile_bare(recipe, local_devices()[:1]), int(recipe.defaults["batch"])
    steps = cycle * cycles
    with tempfile.TemporaryDirectory() as folder:
        swarm = OneMember(Path(folder) / "run", bare, recipe, batch, cycle, form, steps_on, rest_on)
        spec, sharding = bare.compiled.program.batch_spec(batch), batch_sharding(bare.compiled.mesh)
        with Feed(recipe.data("train"), spec, sharding, 0, 10**9) as feed:
            swarm.advance(cycle + cycle // 2)  # compiles all programs
            _advance(bare, feed, cycle)
            swarm.waited, first = dict.fromkeys(swarm.waited, 0.0), swarm.version
            stall, plain, total_s = [], [], 0.0
            for pair in range(pairs):
                took = {}
                for name in ("swarm", "bare") if pair % 2 else ("bare", "swarm"):
                    start = time.perf_counter()
                    if name == "swarm":
                        swarm.advance(steps)
                    else:
                        _advance(bare, feed, steps)
                    took[name] = time.perf_counter() - start
                stall.append((took["swarm"] - took["bare"]) / took["swarm"])
                plain.append(took["bare"] / steps * 1e3)
                total_s += took["swarm"]
            waited = [seconds / total_s for seconds in swarm.waited.values()]
            commits = swarm.version - first
        swarm.close()
    return stall, plain, waited, commits


def _advance(bare: Bare, feed: Feed, steps: int) -> None:
    before = None
    for _ in range(steps):
        fed = feed.next()
        assert fed is not None
        metrics = bare.step(fed[0])
        jax.block_until_ready(before)  # one step ahead, like the trainer and a member
        before = metrics
    jax.block_until_ready(bare.state)


class OneMember:
    """A run with one member that trains a given number of steps at a time."""

    def __init__(
        self, root: Path, bare: Bare, recipe: GPT2, batch: int, cycle: int, form: Form,
        steps_on: Sequence[int], rest_on: Sequence[int],
    ):  # fmt: skip
        compiled = bare.compiled
        layout = layout_of(compiled, 1)
        state = compiled.init(jax.random.key(0))
        shared = compiled.program.exchange().get(state)
        anchor = layout.split(dict(zip(leaf_paths(shared), map(np.asarray, jax.tree.leaves(shared)), strict=True)))
        terms = Terms(
            run="stall", digests=Digests(layout.digest, "", "", ""), batch=batch,
            tokens_per_row=compiled.program.tokens_per_row, horizon=10**9 * batch, cycle=cycle * batch, members=("m0",),
            outer=OuterRule("average"),
        )  # fmt: skip
        store = Store(root)
        Ledger(store).append(replace(genesis(terms, 0), state=tuple(map(Objects(store).put_array, anchor))))
        spawn = multiprocessing.get_context("spawn")
        self._pipe, server_end = spawn.Pipe()
        self._server = spawn.Process(target=serve, args=(server_end, root, terms, layout.sizes, rest_on), daemon=True)
        self._server.start()
        source = recipe.data("train")
        key = jax.random.key(1)
        self._holder = ProgramState(
            compiled, source, layout, form, key, state, anchor, lambda number, metrics: None, None, None
        )
        state = MemberState(terms, form, True, Incarnation("m0", "0" * 32), 0, 0)
        self._member = MemberLoop(state, self._holder, "coordinator", ["shard"], time.monotonic)
        self._node, self._one_call = NodeThreads(self._call), threading.Lock()
        self._resume, self._stopped, self._steps_left = threading.Semaphore(0), threading.Semaphore(0), 0
        self.waited = {"no rows": 0.0, "work": 0.0}
        """Seconds of the training thread without rows, and with snapshots and adoptions."""
        self._node.start("train", self._gated(self._member.train()))
        os.sched_setaffinity(0, rest_on)  # this thread and the threads that it starts
        self._node.start("exchange", self._member.exchange())
        self._node.start("heartbeats", self._member.heartbeats())
        os.sched_setaffinity(0, steps_on)

    @property
    def version(self) -> int:
        """The version that the member has adopted."""
        return self._member.state.base

    def advance(self, steps: int) -> None:
        """Train so many steps, and wait for the last one."""
        self._steps_left = steps
        self._resume.release()
        while not self._stopped.acquire(timeout=1):
            if self._node.failure:
                raise self._node.failure

    def close(self) -> None:
        self._node.stop()
        self._resume.release()
        self._node.wait(10)
        self._server.kill()
        self._server.join()

    def _gated(self, process: Process) -> Process:
        """Run the training process with a gate before every step."""
        value = error = None
        yield RunBlocking("gate", self._resume.acquire)
        while True:
            effect = process.throw(error) if error else process.send(value)
            value = error = None
            is_step = isinstance(effect, RunBlocking) and effect.name == "member trains"
            if is_step and self._steps_left == 0:
                yield RunBlocking("gate", self._gate)
            self._steps_left -= is_step
            start = time.perf_counter()
            try:
                value = yield effect
            except Exception as raised:  # noqa: BLE001  # the process handles it
                error = raised
            if not is_step:
                self.waited["no rows" if isinstance(effect, Sleep) else "work"] += time.perf_counter() - start

    def _gate(self) -> None:
        jax.block_until_ready(self._holder.state)
        self._stopped.release()
        self._resume.acquire()

    def _call(self, call: Call) -> Any:
        if self._node.failure:
            raise Unreachable(call.address)
        with self._one_call:
            self._pipe.send(call)
            return self._pipe.recv()


def serve(pipe: Connection, root: Path, terms: Terms, sizes: Sequence[int], cores: Sequence[int]) -> None:
    """Run coordinator and aggregator in another process, called through a pipe by one thread."""
    os.sched_setaffinity(0, cores)
    ledger, objects = Ledger(Store(root)), Objects(Store(root))
    aggregator = Aggregator(ledger, objects, sizes, 0, 1)
    shard, node = (
        NodeThreads(_unreachable),
        NodeThreads(lambda call: shard.call(aggregator, call.method, call.arguments)),
    )
    coordinator = Coordinator(ledger, ["shard"], time.monotonic, time.time)
    opened = threading.Event()

    def lead() -> Process:
        yield from coordinator.open(terms, founded=True)
        opened.set()
        yield from coordinator.run()

    node.start("coordinator", lead())
    opened.wait()
    while True:
        call: Call = pipe.recv()
        is_coordinator = call.address == "coordinator"
        target: tuple[NodeThreads, Any] = (node, coordinator) if is_coordinator else (shard, aggregator)
        pipe.send(target[0].call(target[1], call.method, call.arguments))


def _unreachable(call: Call) -> Any:
    raise Unreachable(call.address)
