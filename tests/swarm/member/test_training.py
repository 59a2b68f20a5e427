"""Real programs in a swarm: one member is the plain trainer bit for bit, anchors are the ledger's (invariants 1, 7)."""

import math
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest

from tests.swarm.chains import problems_of
from tests.swarm.exact import genesis
from tests.train import toy
from tpuswarm import Trainer, supervised
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, OuterRule
from tpuswarm.swarm.core.choose import UNTRUE_NORM
from tpuswarm.swarm.core.member_state import MemberState
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rounds import RoundTimeouts
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.engines.inproc import Inproc
from tpuswarm.swarm.member.device_state import Evaluation
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.member.program_state import ProgramState, layout_of, place_fragments
from tpuswarm.swarm.member.shared_params import SharedParams
from tpuswarm.swarm.processes.aggregator import Aggregator
from tpuswarm.swarm.processes.coordinator import Coordinator
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, array_digest
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.train.loop.evaluate import HeldOut
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request

BATCH, STEPS = 8, 12
STEP_TIMES = lambda random, name: 1.0 if name == "member trains" else 0.01  # noqa: E731


@cache
def compile_once(recipe, ema=None):
    return compile_step(recipe, Request(batch=BATCH, ema=ema), jax.devices()[:1])


def by_path(tree) -> dict[str, np.ndarray]:
    return dict(zip(leaf_paths(tree), jax.device_get(jax.tree.leaves(tree)), strict=True))


class Swarm:
    """Members with real programs and storage, under a virtual clock."""

    def __init__(
        self, folder, recipe, *, members=1, cycle=2, overlap=True, fragments=1, form="plain", shards=1,
        timeouts=None, steps=STEPS, batch=BATCH, outer=None, ema=None, compiled=None, engine=None, names=None,
        **options,
    ):  # fmt: skip
        """names: of the members; options: of every MemberLoop."""
        self.names = names or tuple(f"m{n}" for n in range(members))
        self.engine = engine or Inproc(7)
        self.store = Store(str(folder))
        self.ledger, self.objects = Ledger(self.store), Objects(self.store)
        self.recipe, self.form, self.overlap, self.options = recipe, form, overlap, options
        self.compiled = compiled or compile_once(recipe, ema)
        self.layout = layout_of(self.compiled, fragments)
        self.init_key, self.step_key = jax.random.split(jax.random.key(0))
        self.terms = Terms(
            run="run", digests=Digests(self.layout.digest, "c", "d", "e"), batch=batch, tokens_per_row=1,
            horizon=steps * batch, cycle=cycle * batch, members=self.names,
            outer=outer or OuterRule("average"), timeouts=timeouts or RoundTimeouts(),
        )  # fmt: skip
        self.device_states, self.processes = [], []
        self.shards = [f"shard-{n}" for n in range(shards)]
        self.clock = lambda: self.engine.now
        states, anchor = self.begin(len(self.names))
        self.ledger.append(genesis(self.terms, state=tuple(map(self.objects.put_array, anchor))))
        for number, state in enumerate(states):
            self.start(number, state, anchor)
        for number in range(shards):
            self.start_shard(number)
        self.start_coordinator(founded=True)

    def begin(self, members):
        states = [self.compiled.init(self.init_key) for _ in range(members)]
        return states, self.layout.split(by_path(self.compiled.program.exchange().get(states[0])))

    def make_state(self, state, anchor):
        source, validation = self.recipe.data("train"), HeldOut(self.recipe.data("validation"), BATCH)
        return ProgramState(
            self.compiled, source, self.layout, self.form, self.step_key, state, anchor, lambda n, m: None, validation,
            lambda state, average, row, allow: Evaluation(row, {}, []),
        )  # fmt: skip

    def start(self, number, state, anchor, base=0, tokens=0) -> None:
        device_state = self.make_state(state, anchor)
        incarnation = Incarnation(self.names[number], f"{len(self.device_states):032x}")
        state_of_member = MemberState(self.terms, self.form, self.overlap, incarnation, base, tokens)
        member = MemberLoop(
            state_of_member, device_state, "coordinator", self.shards, self.clock, anchor=anchor, **self.options
        )
        self.device_states.append(device_state)
        self.processes.append(member)
        self.engine.spawn(f"m{number}", member.train())
        self.engine.spawn(f"m{number}", member.exchange())

    def start_shard(self, number) -> None:
        shard = Aggregator(self.ledger, self.objects, self.layout.sizes, number, len(self.shards))
        self.engine.serve(f"shard-{number}", shard)

    def start_coordinator(self, founded) -> None:
        self.coordinator = Coordinator(self.ledger, self.shards, self.clock, self.clock)

        def opened(result) -> None:
            self.engine.serve("coordinator", self.coordinator)
            self.engine.spawn("coordinator", self.coordinator.run())

        self.engine.spawn("coordinator", self.coordinator.open(self.terms, founded=founded), opened)

    def restart(self, number) -> None:
        """Start another incarnation of a member, from the newest version."""
        self.engine.kill(f"m{number}")
        newest = self.ledger.view().newest
        fragments = [self.objects.get_array(digest) for digest in newest.state]
        state = self.compiled.init(jax.random.key(9), place_fragments(self.compiled, self.layout, fragments))
        self.start(number, state, fragments, newest.version, newest.tokens)

    def run(self) -> dict[str, np.ndarray]:
        assert self.engine.run(lambda: hasattr(self.coordinator, "state") and self.coordinator.state.ended, 1000)
        return self.version()

    def version(self, number=None) -> dict[str, np.ndarray]:
        """The arrays of a version; None: the newest."""
        record = self.ledger.view().newest if number is None else self.ledger.record(number)
        return self.layout.join([self.objects.get_array(digest) for digest in record.state])


def train_plainly(recipe, folder, **options):
    return Trainer(devices=1, seed=0, **options).fit(recipe, steps=STEPS, batch=BATCH, run=folder).state


def assert_same_bits(found, expected) -> None:
    for path, array in found.items():
        assert np.array_equal(np.asarray(expected[path]).view(np.uint32), array.view(np.uint32)), path


def loss_of(params, data) -> float:
    return float(np.mean((data["x"] @ params["layer/w"] + params["layer/b"] - data["y"]) ** 2))


TOY = toy.recipe()
FAST = toy.recipe(toy.adam, 0.3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return by_path(train_plainly(TOY, tmp_path_factory.mktemp("plain") / "run").params)


@pytest.mark.parametrize(
    ("cycle", "overlap", "fragments", "shards"),
    [(1, True, 3, 2), (1, False, 1, 1), (3, True, 1, 1), (3, False, 3, 2), (5, True, 3, 2), (5, False, 1, 1)],
)
def test_one_member_is_the_plain_trainer_bit_for_bit(tmp_path, plain, cycle, overlap, fragments, shards):
    swarm = Swarm(tmp_path, TOY, cycle=cycle, overlap=overlap, fragments=fragments, shards=shards)
    assert_same_bits(swarm.run(), plain)


@pytest.mark.parametrize("form", ["plain", "int8", "int4"])
def test_three_members_learn_and_the_ledger_verifies(tmp_path, form):
    swarm = Swarm(tmp_path, FAST, members=3, form=form, fragments=2)
    assert loss_of(swarm.run(), toy.data()) < 0.7 * loss_of(swarm.version(0), toy.data())
    assert not problems_of(swarm.store)


def verdicts_on(swarm, member) -> list[tuple[str, str]]:
    records = [swarm.ledger.record(version) for version in swarm.ledger.versions()]
    decisions = [decision for record in records for decision in record.decisions]
    return [(each.fate, each.reason) for each in decisions if each.identity.incarnation.member == member]


@pytest.mark.parametrize("form", ["plain", "int8", "int4"])
def test_work_of_a_person_with_an_untrue_norm_does_not_count(tmp_path, form):
    engine, names = Inproc(7, seconds=STEP_TIMES), ("m0", "ada-home", "eve-home")
    swarm = Swarm(tmp_path, FAST, names=names, form=form, fragments=3, shards=2, engine=engine)
    eve = swarm.device_states[2]
    encode = eve.payload

    def understate(snapshot):
        payload = encode(snapshot)
        return replace(payload, norm=0.99 * payload.norm)

    eve.payload = understate
    swarm.run()
    assert set(verdicts_on(swarm, "eve-home")) == {("dropped", UNTRUE_NORM)}
    assert {fate for fate, _ in verdicts_on(swarm, "ada-home")} == {"applied"}
    assert not problems_of(swarm.store)


def test_real_members_follow_by_updates_alone_and_the_ledger_verifies(tmp_path):
    """Every anchor has the digests of its version (invariant 7); none is fetched whole."""
    messages, fetched, anchored = [], [], set()
    swarm = Swarm(
        tmp_path / "swarm", FAST, members=3, form="int4", fragments=3, shards=2,
        outer=OuterRule("nesterov", downlink="int4"), say=messages.append,
    )  # fmt: skip
    swarm.engine.watch = lambda node, name, when: fetched.append(node) if name == "call fetch" else None

    def ended() -> bool:
        for process in swarm.processes:
            record = swarm.ledger.record(process._anchor_version)
            if record.version > 0:
                assert tuple(map(array_digest, process.anchor)) == record.state
                anchored.add(record.version)
        return hasattr(swarm.coordinator, "state") and swarm.coordinator.state.ended

    assert swarm.engine.run(ended, 1000)
    assert anchored and not messages and not fetched
    assert swarm.ledger.view().version >= 2 and not problems_of(swarm.store)


def test_sgd_with_one_step_a_cycle_is_synchronous_data_parallel(tmp_path):
    """Against the gradient by hand, in float64, on the concatenated rows (invariant 2)."""
    recipe = toy.recipe(lambda rate, mask: optax.sgd(rate), 0.05)
    waits = RoundTimeouts(grace_cycles=1e4, deadline_cycles=1e4)
    swarm = Swarm(tmp_path, recipe, members=2, cycle=1, overlap=False, timeouts=waits)
    found = swarm.run()
    start = swarm.version(0)
    source = recipe.data("train")
    w, b = start["layer/w"].astype(np.float64), float(start["layer/b"])
    for step in range(STEPS // 2):
        decisions = swarm.ledger.record(step + 1).decisions
        assert [decision.weight for decision in decisions] == [0.5, 0.5]
        parts = [source.rows(first, BATCH) for decision in decisions for first, _ in decision.rows.ranges]
        x, y = (np.concatenate([part[name] for part in parts]) for name in ("x", "y"))
        error = x @ w + b - y
        rate = 0.05 * (1 - 2 * step / STEPS)
        w, b = w - rate * 2 * (error @ x) / len(y), b - rate * 2 * error.mean()
    assert np.allclose(found["layer/w"], w, rtol=1e-5) and np.allclose(found["layer/b"], b, rtol=1e-5)


def test_evaluations_are_of_published_versions_and_change_no_bit(tmp_path, plain):
    evaluations, every = [], 3 * BATCH
    swarm = Swarm(tmp_path, TOY, fragments=2, evaluate_every=every, on_evaluation=evaluations.append)
    assert_same_bits(swarm.run(), plain)
    assert swarm.device_states[0].evaluate(lambda: True, None, 0, 0) is None, "asked to leave"
    assert len(evaluations) >= 2 and len({found.row["tokens"] // every for found in evaluations}) == len(evaluations)
    for row, pictures, texts in evaluations:
        assert (row["tokens"], row["eval_rows"]) == (swarm.ledger.record(row["version"]).tokens, toy.ROWS)
        assert not pictures and not texts
        assert row["eval_loss"] == pytest.approx(loss_of(swarm.version(row["version"]), toy.data(1)), rel=1e-5)


def test_moving_average_is_the_plain_trainers_and_is_evaluated(tmp_path):
    ema, evaluations = 0.7, []
    swarm = Swarm(
        tmp_path / "swarm", TOY, cycle=1, overlap=False, fragments=2, shards=2, ema=ema,
        outer=OuterRule("average", average=MovingAverage(BATCH * math.log(0.5) / math.log(ema))),
        evaluate_every=3 * BATCH, on_evaluation=evaluations.append,
    )  # fmt: skip
    swarm.run()

    def averaged(version):
        rows = [swarm.objects.get_array(digest) for digest in swarm.ledger.record(version).outer]
        return swarm.layout.join([row[-1] for row in rows])

    expected = by_path(train_plainly(TOY, tmp_path / "plain", ema=ema).ema)
    found = averaged(swarm.ledger.view().version)
    assert set(found) == set(expected)
    for path, array in found.items():
        np.testing.assert_allclose(array, expected[path], rtol=1e-5, atol=1e-7)
    assert len(evaluations) >= 2
    for row, _, _ in evaluations:
        assert row["eval_loss"] == pytest.approx(loss_of(averaged(row["version"]), toy.data(1)), rel=1e-5)
    assert not problems_of(swarm.store)


def test_lost_machine_loses_nothing_committed(tmp_path):
    """It had the coordinator, a shard and a member; new ones start from the run's storage alone (invariant 14)."""
    swarm = Swarm(tmp_path, TOY, members=2, steps=60, fragments=2, shards=2)
    assert swarm.engine.run(lambda: len(swarm.store.names("commits/")) > 5, 1000)
    committed = {name: swarm.store.read(name) for name in swarm.store.names("commits/")}
    accepted = {header.identity for header in swarm.ledger.headers()}
    for node in ("coordinator", "shard-0", "m0"):
        swarm.engine.kill(node)
    store = Store(str(tmp_path))
    swarm.ledger, swarm.objects = Ledger(store), Objects(store)
    swarm.start_shard(0)
    swarm.start_coordinator(founded=False)
    swarm.restart(0)
    assert not swarm.device_states[0]._ramp_left
    assert swarm.engine.run(lambda: swarm.processes[-1].state.processed > 0, 1000)
    assert swarm.device_states[-1]._ramp_left, "a new incarnation starts with small steps"
    assert int(swarm.device_states[-1].state.opt[0].count) == 1
    swarm.run()
    view = swarm.ledger.view()
    assert {name: store.read(name) for name in committed} == committed and view.newest.epoch == 2
    records = list(swarm.ledger.records(range(view.version + 1)))
    applied = {decision.identity for record in records for decision in record.decisions if decision.fate == "applied"}
    assert accepted <= applied
    assert view.counted == Rows.from_ranges((0, 60 * BATCH)) and not view.skipped
    assert {key.member for key in view.verdicts} == {"m0", "m1"}
    assert not problems_of(swarm.store)


def observing_loss(params, extra, batch, key):
    value, metrics = toy.loss(params, batch, key)
    return value, (metrics, {"square": 0.5 * extra["square"] + 0.5 * (batch["x"] ** 2).mean(0)})


OBSERVING = supervised(
    toy.init, observing_loss, toy.adam, toy.splits, lambda progress: 0.05,
    extra=lambda key: {"square": np.zeros(5, np.float32)},
)  # fmt: skip
"""Linear regression that keeps a running mean of the squares it sees, which cannot be negative."""


def test_statistics_of_one_member_are_the_plain_trainers(tmp_path):
    state = train_plainly(OBSERVING, tmp_path / "plain")
    found = Swarm(tmp_path / "swarm", OBSERVING, overlap=False).run()
    assert np.array_equal(found["extra/square"], state.extra["square"])
    assert np.array_equal(found["params/layer/w"], state.params["layer"]["w"])


@pytest.mark.parametrize("rule", ["average", "nesterov"])
def test_statistics_of_three_members_are_averaged_and_the_ledger_proves_it(tmp_path, rule):
    """A momentum applies to parameters alone: with it, statistics would leave their range."""
    averaged = layout_of(compile_once(OBSERVING), 2).find_slices(["extra/square"])
    assert sum(place.last - place.first for place in averaged) == 5
    outer = OuterRule("average") if rule == "average" else replace(OuterRule("nesterov", rate=1.0), averaged=averaged)
    swarm = Swarm(tmp_path, OBSERVING, members=3, fragments=2, outer=outer, overlap=False)
    squares = swarm.run()["extra/square"]
    assert (squares > 0).all() and (squares < (toy.data()["x"] ** 2).max(0)).all()
    assert {swarm.ledger.record(version).averaged for version in (1, 2)} == {outer.averaged}
    report = verify(swarm.store, lambda sentence: None)
    assert not report.problems and not report.not_recomputed and report.recomputed


def test_statistic_is_replaced_and_not_moved():
    compiled = compile_once(OBSERVING)
    exchanged = SharedParams(compiled, layout_of(compiled, 1), "plain")
    exchange = compiled.program.exchange()

    def state(level):
        initial = compiled.init(jax.random.key(0))
        shared = jax.tree.map(lambda leaf: np.full_like(leaf, level), exchange.get(initial))
        return exchange.put(initial, jax.device_put(shared))

    new, reference = (exchanged.snapshot(state(level)) for level in (0.75, 1.0))
    added = exchanged.add(state(0.125), new, reference)
    mixed = exchanged.mix(state(0.125), new, reference, np.float32(0.5))
    for adopted, moved in (added, -0.125), (mixed, 0.4375):  # -0.125 is impossible for a mean of squares
        assert (np.asarray(adopted.extra["square"]) == 0.75).all()
        assert (np.asarray(adopted.params["layer"]["w"]) == moved).all()
