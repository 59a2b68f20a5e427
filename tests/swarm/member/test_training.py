"""Real programs in a swarm: one member is the plain trainer bit for bit, anchors are the ledger's (invariants 1, 7)."""

import math
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import Trainer, supervised
from tpuswarm.swarm.core.arithmetic.outer import Average, Outer
from tpuswarm.swarm.core.books import Member
from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rounds import Patience
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Incarnation, Record
from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.member.cycle import MemberProcesses
from tpuswarm.swarm.member.exchanged import Exchanged
from tpuswarm.swarm.member.holder import ProgramHolder, layout_of, placed
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.processes.effects import Call, Unreachable
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, array_digest
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.train.loop.evaluate import HeldOut
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request

BATCH, STEPS = 8, 12


class Threads:
    """Every node in threads of this process, in real time; calls are plain calls."""

    def __init__(self):
        self.nodes, self.servers = {}, {}

    @property
    def now(self) -> float:
        return time.monotonic()

    def node(self, name: str) -> NodeThreads:
        return self.nodes.setdefault(name, NodeThreads(self.calls))

    def calls(self, call: Call):
        if call.address not in self.servers:
            raise Unreachable(call.address)
        return self.node(call.address).call(self.servers[call.address], call.method, call.arguments)

    def serve(self, name: str, server) -> None:
        self.servers[name] = server

    def spawn(self, name: str, process, done=lambda result: None) -> None:
        def whole():
            done((yield from process))

        self.node(name).start(name, whole())

    def run(self, until, limit: float) -> bool:
        end = time.monotonic() + limit
        while not until() and time.monotonic() < end:
            assert not [node.failure for node in self.nodes.values() if node.failure]
            time.sleep(0.01)
        for node in self.nodes.values():
            node.stop()
            assert node.wait(30)
        return until()


class Swarm:
    """Members with real programs and storage, under an engine."""

    def __init__(
        self,
        folder: Path,
        recipe,
        *,
        members=1,
        cycle=2,
        overlap=True,
        fragments=1,
        form="plain",
        shards=1,
        patience=None,
        engine=None,
        steps=STEPS,
        staleness=None,
        outer=None,
        ema=None,
        **processes,
    ):
        """processes: of every MemberProcesses."""
        self.engine = engine or Inproc(7)
        self.store = Store(str(folder))
        ledger, objects = Ledger(self.store), Objects(self.store)
        compiled = compile_step(recipe, Request(batch=BATCH, ema=ema), jax.devices()[:1])
        init_key, step_key = jax.random.split(jax.random.key(0))
        layout = layout_of(compiled, fragments)
        self.terms = Terms(
            run="run", digests=Digests(layout.digest, "c", "d", "e"), batch=BATCH, tokens_per_row=1,
            horizon=steps * BATCH, cycle=cycle * BATCH, members=tuple(f"m{n}" for n in range(members)),
            outer=outer or Outer("average"), patience=patience or Patience(), staleness=staleness or Staleness(),
        )  # fmt: skip
        self.holders, self.processes, self.options = [], [], processes
        self.recipe, self.compiled, self.layout, self.form, self.step_key = recipe, compiled, layout, form, step_key
        self.overlap, self.shards = overlap, [f"shard-{n}" for n in range(shards)]
        self.clock = clock = lambda: self.engine.now
        for number in range(members):
            state = compiled.init(init_key)
            shared = compiled.program.exchange().get(state)
            leaves = dict(zip(leaf_paths(shared), jax.device_get(jax.tree.leaves(shared)), strict=True))
            anchor = layout.split(leaves)
            if number == 0:
                for fragment in anchor:
                    objects.put_array(fragment)
                ledger.append(genesis(self.terms, anchor))
            self.start(number, state, anchor)
        for number in range(shards):
            self.engine.serve(f"shard-{number}", Aggregator(ledger, objects, layout.sizes, number, shards))
        self.coordinator = Coordinator(ledger, self.shards, clock, clock)
        self.engine.spawn("coordinator", self.coordinator.open(self.terms, founded=True), self._opened)
        self.ledger, self.objects = ledger, objects

    def start(self, number, state, anchor, base=0, tokens=0) -> None:
        """A life of a member."""
        source, validation = self.recipe.data("train"), HeldOut(self.recipe.data("validation"), BATCH)
        holder = ProgramHolder(
            self.compiled, source, self.layout, self.form, self.step_key, state, anchor, lambda n, m: None, validation
        )
        incarnation = Incarnation(f"m{number}", f"{len(self.holders):032x}")
        books = Member(self.terms, self.form, self.overlap, incarnation, base, tokens)
        made = MemberProcesses(books, holder, "coordinator", self.shards, self.clock, anchor=anchor, **self.options)
        self.holders.append(holder)
        self.processes.append(made)
        self.engine.spawn(f"m{number}", made.train())
        self.engine.spawn(f"m{number}", made.exchange())

    def restart(self, number) -> None:
        """Another life of a member, from the newest version."""
        self.engine.kill(f"m{number}")
        newest = self.ledger.view().newest
        fragments = [self.objects.get_array(digest) for digest in newest.state]
        state = self.compiled.init(jax.random.key(9), placed(self.compiled, self.layout, fragments))
        self.start(number, state, fragments, newest.version, newest.tokens)

    def _opened(self, result) -> None:
        self.engine.serve("coordinator", self.coordinator)
        self.engine.spawn("coordinator", self.coordinator.run())

    def run(self):
        assert self.engine.run(lambda: hasattr(self.coordinator, "state") and self.coordinator.state.ended, 1000)
        newest = self.ledger.view().newest
        return self.layout.join([self.objects.get_array(digest) for digest in newest.state])


def genesis(terms: Terms, anchor) -> Record:
    return Record(
        run=terms.run, version=0, epoch=1, parent="", state=tuple(array_digest(each) for each in anchor), outer=(),
        decisions=(), rule="average", rate=1.0, momentum=0.0, share=1.0, gathered=0.0, tokens=0, changes=0,
        processed=(), digests=terms.digests, time=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("cycle", [1, 3, 5])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("fragments", "shards"), [(1, 1), (3, 2)])
def test_one_member_is_the_plain_trainer_bit_for_bit(tmp_path, cycle, overlap, fragments, shards):
    plain = Trainer(devices=1, seed=0).fit(toy.recipe(), steps=STEPS, batch=BATCH, run=tmp_path / "plain")
    swarm = Swarm(tmp_path / "swarm", toy.recipe(), cycle=cycle, overlap=overlap, fragments=fragments, shards=shards)
    found = swarm.run()
    wanted = dict(zip(leaf_paths(plain.state.params), jax.tree.leaves(plain.state.params), strict=True))
    for path, array in found.items():
        assert np.array_equal(np.asarray(wanted[path]).view(np.uint32), array.view(np.uint32)), path


@pytest.mark.parametrize("members", [1, 3])
def test_in_threads_and_real_time(tmp_path, members):
    swarm = Swarm(tmp_path / "swarm", toy.recipe(), members=members, engine=Threads())
    found = swarm.run()
    assert len(swarm.ledger.view().counted) == STEPS * BATCH
    assert not verify(swarm.store, lambda sentence: None).problems
    if members == 1:
        plain = Trainer(devices=1, seed=0).fit(toy.recipe(), steps=STEPS, batch=BATCH, run=tmp_path / "plain")
        wanted = dict(zip(leaf_paths(plain.state.params), jax.tree.leaves(plain.state.params), strict=True))
        assert all(np.array_equal(wanted[path], array) for path, array in found.items())


@pytest.mark.parametrize("form", ["plain", "int8", "int4"])
def test_three_members_learn_and_the_ledger_verifies(tmp_path, form):
    swarm = Swarm(tmp_path / "swarm", toy.recipe(toy.adam, 0.3), members=3, form=form, fragments=2)
    found = swarm.run()
    data = toy.data()

    def loss(params):
        return float(np.mean((data["x"] @ params["layer/w"] + params["layer/b"] - data["y"]) ** 2))

    start = swarm.layout.join([swarm.objects.get_array(each) for each in swarm.ledger.record(0).state])
    assert loss(found) < 0.7 * loss(start)
    report = verify(swarm.store, lambda sentence: None)
    assert not report.problems


def test_with_one_step_a_cycle_and_sgd_it_is_synchronous_data_parallel(tmp_path):
    """Against the gradient by hand, in float64, on the concatenated rows (invariant 2)."""
    recipe = toy.recipe(lambda rate, mask: optax.sgd(rate), 0.05)
    waits = Patience(grace_cycles=1e4, deadline_cycles=1e4)
    swarm = Swarm(tmp_path / "swarm", recipe, members=2, cycle=1, overlap=False, patience=waits)
    found = swarm.run()
    start = swarm.layout.join([swarm.objects.get_array(each) for each in swarm.ledger.record(0).state])
    source = recipe.data("train")
    w, b = start["layer/w"].astype(np.float64), float(start["layer/b"])
    for step in range(STEPS // 2):
        decisions = swarm.ledger.record(step + 1).decisions
        assert [decision.weight for decision in decisions] == [0.5, 0.5]
        parts = [source.rows(first, BATCH) for each in decisions for first, _ in each.rows.ranges]
        x, y = (np.concatenate([part[name] for part in parts]) for name in ("x", "y"))
        error = x @ w + b - y
        rate = 0.05 * (1 - 2 * step / STEPS)
        w, b = w - rate * 2 * (error @ x) / len(y), b - rate * 2 * error.mean()
    assert np.allclose(found["layer/w"], w, rtol=1e-5) and np.allclose(found["layer/b"], b, rtol=1e-5)


def loss_of(params, data) -> float:
    return float(np.mean((data["x"] @ params["layer/w"] + params["layer/b"] - data["y"]) ** 2))


def test_evaluations_change_no_bit_and_are_of_published_versions(tmp_path):
    told = []
    swarm = Swarm(
        tmp_path / "swarm", toy.recipe(), fragments=2, evaluate_every=3 * BATCH,
        evaluated=lambda *found: told.append(found),
    )  # fmt: skip
    found = swarm.run()
    plain = Trainer(devices=1, seed=0).fit(toy.recipe(), steps=STEPS, batch=BATCH, run=tmp_path / "plain")
    wanted = dict(zip(leaf_paths(plain.state.params), jax.tree.leaves(plain.state.params), strict=True))
    assert all(np.array_equal(wanted[path], array) for path, array in found.items())
    assert len(told) >= 2 and len({tokens // (3 * BATCH) for _, tokens, _ in told}) == len(told)
    for version, tokens, (values, rows, picture) in told:
        assert picture is None
        record = swarm.ledger.record(version)
        theta = swarm.layout.join([swarm.objects.get_array(digest) for digest in record.state])
        assert (tokens, rows) == (record.tokens, toy.ROWS)
        assert values["loss"] == pytest.approx(loss_of(theta, toy.data(1)), rel=1e-5)


def test_the_moving_average_of_a_swarm_of_one_that_commits_each_step_is_the_plain_trainers(tmp_path):
    ema, told = 0.7, []
    recipe = toy.recipe()
    swarm = Swarm(
        tmp_path / "swarm", recipe, cycle=1, overlap=False, fragments=2, shards=2, ema=ema,
        outer=Outer("average", average=Average(BATCH * math.log(0.5) / math.log(ema))), evaluate_every=3 * BATCH,
        evaluated=lambda *found: told.append(found),
    )  # fmt: skip
    swarm.run()

    def averaged(version):
        rows = [swarm.objects.get_array(digest) for digest in swarm.ledger.record(version).outer]
        return swarm.layout.join([each[-1] for each in rows])

    plain = Trainer(devices=1, seed=0, ema=ema).fit(recipe, steps=STEPS, batch=BATCH, run=tmp_path / "plain")
    wanted = dict(zip(leaf_paths(plain.state.ema), jax.tree.leaves(plain.state.ema), strict=True))
    found = averaged(swarm.ledger.view().version)
    assert set(found) == set(wanted)
    for path, array in found.items():
        np.testing.assert_allclose(array, wanted[path], rtol=1e-5, atol=1e-7)
    assert len(told) >= 2
    for version, _, (values, _, _) in told:
        assert values["loss"] == pytest.approx(loss_of(averaged(version), toy.data(1)), rel=1e-5)
    assert not verify(swarm.store, lambda sentence: None).problems


def adam_steps(holder) -> int:
    return int(holder.state.opt[0].count)


def test_the_next_life_of_a_member_begins_with_small_steps(tmp_path):
    swarm = Swarm(tmp_path / "swarm", toy.recipe(), members=2, steps=60)
    assert swarm.engine.run(lambda: len(swarm.store.names("commits/")) > 3, 1000)
    assert not swarm.holders[0]._ramp_left
    swarm.engine.kill("m0")
    swarm.restart(0)
    assert swarm.engine.run(lambda: swarm.processes[-1].books.processed > 0, 1000)
    assert swarm.holders[-1]._ramp_left and adam_steps(swarm.holders[-1]) == 1


def test_a_machine_lost_with_its_disk_loses_nothing_committed(tmp_path):
    """Coordinator, a shard and a member were on it; others begin from the run's storage alone (invariant 14)."""
    folder = tmp_path / "swarm"
    swarm = Swarm(folder, toy.recipe(), members=2, steps=60, fragments=2, shards=2)
    assert swarm.engine.run(lambda: len(swarm.store.names("commits/")) > 5, 1000)
    committed = {name: swarm.store.read(name) for name in swarm.store.names("commits/")}
    accepted = {header.identity for header in swarm.ledger.headers()}
    for node in ("coordinator", "shard-0", "m0"):
        swarm.engine.kill(node)
    store = Store(str(folder))
    swarm.ledger, swarm.objects = Ledger(store), Objects(store)
    swarm.engine.serve("shard-0", Aggregator(swarm.ledger, swarm.objects, swarm.layout.sizes, 0, 2))
    swarm.coordinator = Coordinator(swarm.ledger, swarm.shards, swarm.clock, swarm.clock)
    swarm.engine.spawn("coordinator", swarm.coordinator.open(swarm.terms, founded=False), swarm._opened)
    swarm.restart(0)
    swarm.run()
    view = swarm.ledger.view()
    assert {name: store.read(name) for name in committed} == committed and view.newest.epoch == 2
    records = list(swarm.ledger.records(range(view.version + 1)))
    applied = {each.identity for record in records for each in record.decisions if each.fate == "applied"}
    assert accepted <= applied
    assert view.counted == Rows.of((0, 60 * BATCH)) and not view.skipped
    assert {key.member for key in view.verdicts} == {"m0", "m1"}
    assert not verify(store, lambda sentence: None).problems


def observing(data=toy.splits):
    """Linear regression that keeps a running mean of the squares it sees, which cannot be negative."""

    def loss(params, extra, batch, key):
        value, metrics = toy.loss(params, batch, key)
        return value, (metrics, {"square": 0.5 * extra["square"] + 0.5 * (batch["x"] ** 2).mean(0)})

    return supervised(
        toy.init, loss, toy.adam, data, lambda progress: 0.05, extra=lambda key: {"square": np.zeros(5, np.float32)}
    )


def test_a_swarm_of_one_has_the_statistics_of_the_plain_trainer_and_three_share_a_mean(tmp_path):
    plain = Trainer(devices=1, seed=0).fit(observing(), steps=STEPS, batch=BATCH, run=tmp_path / "plain")
    wanted = {"extra/square": plain.state.extra["square"], "params/layer/w": plain.state.params["layer"]["w"]}
    found = Swarm(tmp_path / "one", observing(), overlap=False).run()
    assert all(np.array_equal(wanted[path], found[path]) for path in wanted)
    three = Swarm(tmp_path / "three", observing(), members=3)
    squares = three.run()["extra/square"]
    seen = np.stack([toy.data()["x"][row] ** 2 for row in range(toy.ROWS)])
    assert (squares > 0).all() and (squares < seen.max(0)).all()
    assert not verify(three.store, lambda sentence: None).problems


def test_statistics_are_averaged_beside_a_momentum_and_the_ledger_proves_it(tmp_path):
    """With a rate and a momentum under which the same arrays, were they trained, would leave their range."""
    outer = Outer("nesterov", rate=1.0)
    compiled = compile_step(observing(), Request(batch=BATCH), jax.devices()[:1])
    layout = layout_of(compiled, 2)
    averaged = layout.places(["extra/square"])
    assert sum(each.last - each.first for each in averaged) == 5
    swarm = Swarm(
        tmp_path / "swarm", observing(), members=3, fragments=2, outer=replace(outer, averaged=averaged), overlap=False
    )
    seen = np.stack([toy.data()["x"][row] ** 2 for row in range(toy.ROWS)])
    squares = swarm.run()["extra/square"]
    assert (squares > 0).all() and (squares < seen.max(0)).all()
    assert {record.averaged for record in (swarm.ledger.record(version) for version in (1, 2))} == {averaged}
    report = verify(swarm.store, lambda sentence: None)
    assert not report.problems and not report.not_recomputed and report.recomputed


def test_a_statistic_is_taken_over_and_not_moved():
    compiled = compile_step(observing(), Request(batch=BATCH), jax.devices()[:1])
    layout = layout_of(compiled, 1)
    exchanged, exchange = Exchanged(compiled, layout, "plain"), compiled.program.exchange()

    def state(level):
        made = compiled.init(jax.random.key(0))
        shared = jax.tree.map(lambda leaf: np.full_like(leaf, level), exchange.get(made))
        return exchange.put(made, jax.device_put(shared))

    new, reference = (exchanged.snapshot(state(level)) for level in (0.75, 1.0))
    added, mixed = (
        exchanged.add(state(0.125), new, reference),
        exchanged.mix(state(0.125), new, reference, np.float32(0.5)),
    )
    for adopted, moved in (added, -0.125), (mixed, 0.4375):  # the first is what a mean of squares must never be
        assert (np.asarray(adopted.extra["square"]) == 0.75).all()
        assert (np.asarray(adopted.params["layer"]["w"]) == moved).all()
