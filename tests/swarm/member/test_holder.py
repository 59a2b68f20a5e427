"""A member's arrays: what is computed on the devices is what NumPy computes, and nothing waits that need not."""

import gc
import threading
import weakref
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import supervised
from tpuswarm.errors import InputError
from tpuswarm.swarm.core.arithmetic.quantize import BITS, encode, feedback
from tpuswarm.swarm.core.books import Adopt
from tpuswarm.swarm.core.rows import NOTHING, Rows
from tpuswarm.swarm.member.exchanged import Exchanged
from tpuswarm.swarm.member.holder import RAMP, ProgramHolder, layout_of
from tpuswarm.swarm.member.pace import Speed
from tpuswarm.swarm.member.prefetch import Prefetch
from tpuswarm.swarm.member.program import make_ready
from tpuswarm.swarm.processes.plan import Plan, Swarm, code_digest
from tpuswarm.train.loop.evaluate import HeldOut
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request

LARGE = (513, 512)
"""Above 1 MiB: sharded under fsdp, along its second axis."""


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "large": jax.random.normal(keys[0], LARGE),
        "odd": jax.random.normal(keys[1], (3, 100)),
        "scalar": jnp.zeros(()),
        "tail": jax.random.normal(keys[2], (7,)),
    }


def loss(params, batch, key):
    total = sum(jnp.mean(jnp.square(leaf)) for leaf in jax.tree.leaves(params))
    return jnp.mean(batch["x"]) * total


def recipe(optimizer=None):
    data = {"x": np.linspace(1, 2, 64, dtype=np.float32)}
    return supervised(init, loss, optimizer or optax.adam(1e-2), data)


USUAL = recipe()


@cache
def compiled_on(devices: int, shard: str, made=USUAL):
    return compile_step(made, Request(batch=8, shard=shard), jax.devices()[:devices])


def shared_of(compiled, state, layout) -> list[np.ndarray]:
    shared = compiled.program.exchange().get(state)
    return layout.split(dict(zip(leaf_paths(shared), jax.device_get(jax.tree.leaves(shared)), strict=True)))


def holder_of(made, compiled, *, form="plain", fragments=2, took=lambda number, metrics: None, validation=None):
    layout = layout_of(compiled, fragments)
    state = compiled.init(jax.random.key(0))
    anchor = shared_of(compiled, state, layout)
    source = made.data("train")
    return ProgramHolder(compiled, source, layout, form, jax.random.key(1), state, anchor, took, validation), layout


def train(holder, steps: int, batch: int = 8, first: int = 0) -> None:
    for step in range(first, first + steps):
        holder.train(Rows(((step * batch, (step + 1) * batch),)), (step, 1000), NOTHING)


def hard(seed: int, size: int) -> np.ndarray:
    """Many magnitudes, block by block too, with zeros of both signs and subnormal numbers."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(size) * 10.0 ** random.uniform(-12, 6, size)
    x *= np.repeat(10.0 ** random.uniform(-30, 6, size // 256 + 1), 256)[:size]
    return np.where(random.random(size) < 0.1, random.choice([0.0, -0.0, 1e-40, 2.0], size), x).astype(np.float32)


def halves(size: int, bits: int) -> np.ndarray:
    """Half-way between two codes, all of them: each block has a scale of a power of two."""
    top = 2 ** (bits - 1) - 1
    x = (np.arange(size) % (2 * top)) - top + 0.5
    x[::256] = top
    return (x * 2.0 ** (np.arange(size) // 256 % 60 - 30)).astype(np.float32)


def same_bits(a, b) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def normal(x: np.ndarray) -> np.ndarray:
    return (x == 0) | (np.abs(x) >= np.finfo(np.float32).tiny)


@pytest.mark.parametrize(("devices", "shard"), [(1, "replicate"), (4, "replicate"), (4, "fsdp")])
def test_codes_on_the_devices_are_those_of_numpy_bit_for_bit(devices, shard):
    compiled = compiled_on(devices, shard)
    assert ("data" in str(compiled.state.params["large"].sharding.spec)) == (shard == "fsdp")
    layout = layout_of(compiled, 2)
    for form, width in BITS.items():
        exchanged = Exchanged(compiled, layout, form)
        inputs = [[hard(seed, size) for size in layout.sizes] for seed in range(3)]
        ties = [np.zeros(size, np.float32) for size in layout.sizes], [halves(size, width) for size in layout.sizes]
        for snapshot, anchor, left in (inputs, (*ties, ties[0])):
            coded = exchanged.code(*map(exchanged.put, (snapshot, anchor, left)))
            found, rest = exchanged.codes(coded), exchanged.fragments(coded.left)
            for number, (s, a, e) in enumerate(zip(snapshot, anchor, left, strict=True)):
                x = (a - s) + e
                codes, scales = encode(x, width)
                assert same_bits(found[number]["codes"], codes) and same_bits(found[number]["scales"], scales)
                wanted = feedback(x, codes, scales, width)
                # Devices flush subnormal numbers to 0, of which NumPy makes sums: nothing else may differ.
                whole = normal(s) & normal(a) & normal(e) & normal(a - s) & normal(x)
                assert whole.mean() > 0.5 and same_bits(rest[number][whole], wanted[whole])
                assert np.abs(rest[number] - wanted).max() < 2.0**-100


@pytest.mark.parametrize(("devices", "shard"), [(1, "replicate"), (4, "fsdp")])
def test_snapshots_stand_still_and_adoptions_are_those_of_numpy(devices, shard):
    compiled = compiled_on(devices, shard)
    holder, layout = holder_of(USUAL, compiled)
    anchor = shared_of(compiled, holder.state, layout)
    for version, how in enumerate(["snapshot", "anchor", "take"]):
        train(holder, 2)
        at_push = shared_of(compiled, holder.state, layout)
        snapshot = holder.snapshot()
        train(holder, 2)
        payload = holder.payload(snapshot)
        assert all(same_bits(each["s"], s) for each, s in zip(payload.fragments, at_push, strict=True))
        norms = [np.linalg.norm(a.astype(np.float64) - s) for a, s in zip(anchor, at_push, strict=True)]
        assert payload.norm == pytest.approx(np.linalg.norm(norms), rel=1e-6) and payload.finite

        now = shared_of(compiled, holder.state, layout)
        moments = jax.device_get(jax.tree.leaves(holder.state.opt))
        published = [hard(version, size) for size in layout.sizes]
        holder.adopt(Adopt(how, None, version, ("", "")), holder.place(published), 0.5)
        found = shared_of(compiled, holder.state, layout)
        for got, new, theta, s, a in zip(found, published, now, at_push, anchor, strict=True):
            before = {"snapshot": s, "anchor": a, "take": theta}[how]
            moved = new + np.float32(0.5) * (theta - new) if how == "snapshot" else theta + (new - before)
            wanted = np.where(bits(theta) == bits(before), new, moved)
            wanted = np.where((bits(new) == bits(before)) & (bits(theta) != bits(before)), theta, wanted)
            usual = np.all([normal(each) for each in (new, before, theta, new - before, wanted)], axis=0)
            usual |= bits(theta) == bits(before)
            assert usual.mean() > 0.5 and same_bits(got[usual], wanted[usual])
        assert all(map(same_bits, moments, jax.device_get(jax.tree.leaves(holder.state.opt))))
        anchor = published


def test_a_contribution_that_is_not_finite_says_so():
    holder, _ = holder_of(USUAL, compiled_on(1, "replicate"), form="int8")
    holder.state = jax.tree.map(lambda leaf: leaf.at[..., -1].set(jnp.inf) if leaf.ndim == 2 else leaf, holder.state)
    payload = holder.payload(holder.snapshot())
    assert not payload.finite and payload.norm == 0.0


def slow(params, batch, key):
    """Some tenths of a second on a core."""
    x = jnp.full((400, 400), 1e-3) * params["w"]
    return jnp.mean(jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(x @ y), x)) + 0 * jnp.mean(batch["x"])


def test_nothing_in_the_training_thread_waits_for_the_step_that_was_just_dispatched():
    made = supervised(lambda key: {"w": jnp.ones(())}, slow, optax.sgd(0.1), {"x": np.zeros(8, np.float32)})
    compiled = compiled_on(1, "replicate", made)
    ready = []
    holder, _ = holder_of(
        made, compiled, fragments=1, took=lambda number, metrics: ready.append(metrics["loss"].is_ready())
    )
    train(holder, 1)
    version = holder.place([np.full(1, 0.5, np.float32)])
    train(holder, 1, first=1)
    metrics = holder._running[1]["loss"]
    snapshot = holder.snapshot()
    holder.adopt(Adopt("snapshot", None, 1, ("",)), version, 0.5)
    assert not metrics.is_ready() and not snapshot[0].is_ready()
    assert ready == [False, False]
    assert holder.settle() == 8 and metrics.is_ready() and holder.settle() == 0


@pytest.mark.parametrize("devices", [1, 2])
def test_nothing_that_is_kept_is_donated_where_a_fragment_is_a_single_vector(devices):
    square = lambda params, batch, key: jnp.mean(params["w"] ** 2) + 0 * jnp.mean(batch["x"])  # noqa: E731
    made = supervised(lambda key: {"w": jnp.ones(512)}, square, optax.sgd(0.1), {"x": np.zeros(8, np.float32)})
    holder, _ = holder_of(made, compiled_on(devices, "replicate", made), fragments=1)
    snapshot = holder.snapshot()
    holder.adopt(Adopt("take", None, 1, ("",)), holder.place([np.full(512, 0.5, np.float32)]), 0.0)
    train(holder, 1)
    assert np.all(holder.payload(snapshot).fragments[0]["s"] == 1)
    holder.adopt(Adopt("anchor", None, 2, ("",)), holder.place([np.full(512, 0.25, np.float32)]), 0.0)
    train(holder, 1)
    assert holder.payload(holder.snapshot()).finite


def test_a_life_that_is_over_leaves_the_devices_at_once():
    holder, _ = holder_of(USUAL, compiled_on(1, "replicate"))
    train(holder, 2)
    gone = weakref.ref(holder)
    gc.disable()
    try:
        del holder
        assert gone() is None
    finally:
        gc.enable()


class Reader:
    """A source's rows as they are; tells which were read."""

    def __init__(self, bad=NOTHING):
        self.bad, self.read, self.changed = bad, [], threading.Condition()

    def __call__(self, rows):
        with self.changed:
            self.read.append(rows)
            self.changed.notify_all()
        if rows & self.bad:
            raise InputError("no such rows")
        return rows

    def wait(self, *rows) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(each in self.read for each in rows), 10)


def of(*ranges) -> Rows:
    return Rows.of(*ranges)


def test_the_next_rows_of_a_lease_are_read_before_they_are_asked_for():
    reader = Reader()
    feed = Prefetch(reader)
    assert feed.next(of((0, 4)), of((4, 8), (20, 24), (40, 80))) == of((0, 4))
    reader.wait(of((4, 8)), of((20, 24)))  # over the gap, without being asked
    assert feed.next(of((4, 8)), of((20, 24), (40, 42))) == of((4, 8))
    # The lease changed: rows came back to its head, and what was read is read again when its time comes.
    assert feed.next(of((0, 4)), of((4, 8))) == of((0, 4))
    assert feed.next(of((4, 8)), NOTHING) == of((4, 8))
    assert feed.next(of((20, 24)), NOTHING) == of((20, 24))
    assert [reader.read.count(of(each)) for each in ((0, 4), (4, 8), (20, 24), (40, 42))] == [2, 2, 2, 0]


def test_an_error_of_the_source_is_raised_when_its_rows_are_due_and_not_before():
    feed = Prefetch(reader := Reader(bad=of((4, 8), (12, 16))))
    assert feed.next(of((0, 4)), of((4, 8), (8, 12))) == of((0, 4))
    reader.wait(of((4, 8)))
    assert feed.next(of((8, 12)), of((12, 16))) == of((8, 12))  # the other rows went to somebody else
    with pytest.raises(InputError, match="no such rows"):
        feed.next(of((12, 16)), NOTHING)


def test_speed_is_that_of_finished_steps():
    """Devices that take 2 s a step of 8 rows, a dispatch that takes none, a first step of a minute, and pauses."""
    speed, now, done_at, running = Speed(), 0.0, 0.0, 0
    for step in range(60):
        if step % 10 == 9:  # nothing to train: the devices are waited for, then time passes
            now = max(now, done_at)
            speed.ends(running, now)
            running, now = 0, now + 1000
        now += 500 * (step == 45)  # the whole machine stood still, and nobody said so
        speed.begins(8, now)
        before, done_at = done_at, max(now, done_at) + (60.0 if step == 0 else 2.0)
        now = max(now, before)  # train returns when the step before is done
        speed.ends(running, now)
        running = 8
        assert speed.rows_per_s is None if step < 2 else speed.rows_per_s == pytest.approx(4.0)
    synchronous, now = Speed(), 0.0
    for _ in range(5):
        synchronous.begins(8, now)
        now += 2
        synchronous.ends(8, now)
        now += 1000
    assert synchronous.rows_per_s == pytest.approx(4.0) and not synchronous.running


def test_a_ramp_grows_the_updates_to_their_full_size():
    falling = lambda params, batch, key: params["w"].sum() + 0 * jnp.mean(batch["x"])  # noqa: E731  # by 1 a step
    made = supervised(lambda key: {"w": jnp.zeros(3)}, falling, optax.sgd(1.0), {"x": np.zeros(8, np.float32)})
    holder, _ = holder_of(made, compiled_on(1, "replicate", made), fragments=1)
    holder.ramp()
    at = [0.0]
    for step in range(RAMP + 2):
        train(holder, 1, first=step)
        at.append(float(holder.state.params["w"][0]))
    np.testing.assert_allclose(-np.diff(at), [min(1, (step + 1) / RAMP) for step in range(RAMP + 2)], atol=1e-5)


def test_a_member_evaluates_in_batches_of_the_size_that_was_asked_for(tmp_path):
    def at_once(own=None, **settings):
        swarm = Swarm(
            "run", members=1, cycle=4, outer="average", outer_lr=None, quantize="plain", overlap=False, fragments=1
        )
        settings = {"batch": 16, "seed": 0, "eval_batch": None, "init_from": None, **settings}
        target = "tests.train.toy:toy"
        plan = Plan(swarm, target, {}, settings, {}, {}, 1, data="", code=code_digest(target), evaluate_every=None)
        ready = make_ready(
            plan, tmp_path, jax.devices()[:1], True, lambda number, metrics: None, lambda text: None, own
        )
        assert ready.digests.config == plan.config
        return ready.validation.batch

    assert [at_once(), at_once(accumulate=2), at_once(eval_batch=48), at_once(own=4)] == [16, 8, 48, 4]


def test_an_evaluation_is_of_the_published_version_and_leaves_training_alone():
    made = toy.recipe()
    compiled = compile_step(made, Request(batch=8), jax.devices()[:1])
    layout = layout_of(compiled, 1)
    holder, _ = holder_of(made, compiled, fragments=1, validation=HeldOut(made.data("validation"), 8))
    train(holder, 2)
    version = [np.linspace(-1, 1, size, dtype=np.float32) for size in layout.sizes]
    holder.adopt(Adopt("anchor", None, 1, ("",)), holder.place(version), 0.0)
    theta = shared_of(compiled, holder.state, layout)
    values, rows, _ = holder.evaluate(lambda: False, None)
    params, data = layout.join(version), toy.data(1)
    error = data["x"] @ params["layer/w"] + params["layer/b"] - data["y"]
    assert rows == 64 and values["loss"] == pytest.approx(np.mean(error**2), rel=1e-5)
    assert all(map(same_bits, theta, shared_of(compiled, holder.state, layout)))
    assert holder.evaluate(lambda: True, None) is None
    train(holder, 1, first=2)
