"""A member's arrays: what its devices compute is what NumPy computes, and nothing waits without need."""

import gc
import threading
import weakref
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.swarm.core.arithmetic.test_quantize import same_bits, varied
from tests.train import toy
from tpuswarm import Every, Stop, supervised
from tpuswarm.errors import InputError
from tpuswarm.swarm.core.arithmetic.fragments import Layout, Piece
from tpuswarm.swarm.core.arithmetic.quantize import BITS, decode, encode, feedback
from tpuswarm.swarm.core.member_state import Adopt
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.member.loop import Speed
from tpuswarm.swarm.member.program import make_program
from tpuswarm.swarm.member.program_state import RAMP_STEPS, Prefetch, ProgramState, layout_of
from tpuswarm.swarm.member.shared_params import SharedParams, norm
from tpuswarm.swarm.processes.run_plan import RunPlan, Swarm, code_digest
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "large": jax.random.normal(keys[0], (513, 512)),  # above 1 MiB: split under fsdp, along its second axis
        "odd": jax.random.normal(keys[1], (3, 100)),
        "scalar": jnp.zeros(()),
        "tail": jax.random.normal(keys[2], (7,)),
    }


def loss(params, batch, key):
    total = sum(jnp.mean(jnp.square(leaf)) for leaf in jax.tree.leaves(params))
    return jnp.mean(batch["x"]) * total


USUAL = supervised(init, loss, optax.adam(1e-2), {"x": np.linspace(1, 2, 64, dtype=np.float32)})


def vector_recipe(initial, loss, rate):
    return supervised(lambda key: {"w": initial}, loss, optax.sgd(rate), {"x": np.zeros(8, np.float32)})


@cache
def compiled_on(devices: int, shard: str = "replicate", recipe=USUAL):
    return compile_step(recipe, Request(batch=8, shard=shard), jax.devices()[:devices])


def shared_part(compiled, state, layout) -> list[np.ndarray]:
    shared = compiled.program.exchange().get(state)
    return layout.split(dict(zip(leaf_paths(shared), jax.device_get(jax.tree.leaves(shared)), strict=True)))


def make_state(recipe, compiled, *, form="plain", fragments=2, took=lambda number, metrics: None) -> ProgramState:
    layout = layout_of(compiled, fragments)
    state = compiled.init(jax.random.key(0))
    anchor = shared_part(compiled, state, layout)
    source = recipe.data("train")
    return ProgramState(compiled, source, layout, form, jax.random.key(1), state, anchor, took, None, None)


def train(device_state, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        device_state.train(Rows(((step * 8, (step + 1) * 8),)), (step, 1000), NO_ROWS)


def ties(size: int, bits: int) -> np.ndarray:
    top = 2 ** (bits - 1) - 1
    x = (np.arange(size) % (2 * top)) - top + 0.5
    x[::256] = top
    return (x * 2.0 ** (np.arange(size) // 256 % 60 - 30)).astype(np.float32)


def normal(*arrays: np.ndarray) -> np.ndarray:
    """Mark elements without subnormal numbers, which devices flush to 0 and NumPy does not."""
    return np.all([(x == 0) | (np.abs(x) >= np.finfo(np.float32).tiny) for x in arrays], axis=0)


@pytest.mark.parametrize(("devices", "shard"), [(1, "replicate"), (4, "fsdp")])
def test_codes_of_the_devices_are_numpys_bit_for_bit(devices, shard):
    compiled = compiled_on(devices, shard)
    assert ("data" in str(compiled.state.params["large"].sharding.spec)) == (shard == "fsdp")
    layout = layout_of(compiled, 2)
    for form, width in BITS.items():
        exchanged = SharedParams(compiled, layout, form)
        random = [[varied(seed, size) for size in layout.sizes] for seed in range(3)]
        zeros = [np.zeros(size, np.float32) for size in layout.sizes]
        for snapshot, anchor, left in (random, (zeros, [ties(size, width) for size in layout.sizes], zeros)):
            coded = exchanged.code(*map(exchanged.to_devices, (snapshot, anchor, left)))
            found, rest = exchanged.codes(coded), exchanged.fragments(coded.left)
            sent = [
                decode(*encode((a - s) + e, width), a.size, width)
                for s, a, e in zip(snapshot, anchor, left, strict=True)
            ]
            assert norm(coded.squares) == pytest.approx(
                np.linalg.norm(np.concatenate(sent).astype(np.float64)), rel=1e-6
            )
            for number, (s, a, e) in enumerate(zip(snapshot, anchor, left, strict=True)):
                x = (a - s) + e
                codes, scales = encode(x, width)
                assert same_bits(found[number]["codes"], codes) and same_bits(found[number]["scales"], scales)
                expected = feedback(x, codes, scales, width)
                exact = normal(s, a, e, a - s, x)
                assert exact.mean() > 0.5 and same_bits(rest[number][exact], expected[exact])
                assert np.abs(rest[number] - expected).max() < 2.0**-100


@pytest.mark.parametrize(("devices", "shard"), [(1, "replicate"), (4, "fsdp")])
def test_snapshots_do_not_change_and_adoptions_are_numpys(devices, shard):
    compiled = compiled_on(devices, shard)
    layout, device_state = layout_of(compiled, 2), make_state(USUAL, compiled)
    anchor = shared_part(compiled, device_state.state, layout)
    for version, how in enumerate(["snapshot", "anchor", "replace"]):
        train(device_state, 2)
        at_push = shared_part(compiled, device_state.state, layout)
        snapshot = device_state.snapshot()
        train(device_state, 2)
        payload = device_state.payload(snapshot)
        assert all(same_bits(sent["s"], s) for sent, s in zip(payload.fragments, at_push, strict=True))
        norms = [np.linalg.norm(a.astype(np.float64) - s) for a, s in zip(anchor, at_push, strict=True)]
        assert payload.norm == pytest.approx(np.linalg.norm(norms), rel=1e-6) and payload.finite

        now = shared_part(compiled, device_state.state, layout)
        moments = jax.device_get(jax.tree.leaves(device_state.state.opt))
        published = [varied(version, size) for size in layout.sizes]
        device_state.adopt(Adopt(how, None, version, ("", "")), device_state.place(published), 0.5)
        found = shared_part(compiled, device_state.state, layout)
        for got, new, theta, s, a in zip(found, published, now, at_push, anchor, strict=True):
            before = {"snapshot": s, "anchor": a, "replace": theta}[how]
            moved = new + np.float32(0.5) * (theta - new) if how == "snapshot" else theta + (new - before)
            same, unmoved = (array.view(np.uint32) == before.view(np.uint32) for array in (theta, new))
            expected = np.where(same, new, np.where(unmoved, theta, moved))
            exact = normal(theta, new, before, new - before, expected) | same
            assert exact.mean() > 0.5 and same_bits(got[exact], expected[exact])
        assert all(map(same_bits, moments, jax.device_get(jax.tree.leaves(device_state.state.opt))))
        anchor = published


def test_contribution_with_infinity_is_not_finite():
    device_state = make_state(USUAL, compiled_on(1), form="int8")
    device_state.state = jax.tree.map(
        lambda leaf: leaf.at[..., -1].set(jnp.inf) if leaf.ndim == 2 else leaf, device_state.state
    )
    payload = device_state.payload(device_state.snapshot())
    assert not payload.finite and payload.norm == 0.0


def slow(params, batch, key):
    x = jnp.full((400, 400), 1e-3) * params["w"]
    return jnp.mean(jax.lax.fori_loop(0, 100, lambda _, y: jnp.tanh(x @ y), x)) + 0 * jnp.mean(batch["x"])


def test_training_thread_does_not_wait_for_the_step_it_just_dispatched():
    recipe, ready = vector_recipe(jnp.ones(()), slow, 0.1), []
    took = lambda number, metrics: ready.append(metrics["loss"].is_ready())  # noqa: E731
    device_state = make_state(recipe, compiled_on(1, recipe=recipe), fragments=1, took=took)
    for step in range(2):  # the first compiles
        version = device_state.place([np.full(1, 0.5, np.float32)])
        train(device_state, 1, first=step)
        metrics = device_state._running[1]["loss"]
        snapshot = device_state.snapshot()
        device_state.adopt(Adopt("snapshot", None, 1, ("",)), version, 0.5)
        is_done = metrics.is_ready(), snapshot[0].is_ready()
    assert is_done == (False, False) and ready == [False, False]
    assert device_state.settle() == 8 and metrics.is_ready() and device_state.settle() == 0


@pytest.mark.parametrize("devices", [1, 2])
def test_arrays_in_use_are_not_donated_if_a_fragment_is_one_vector(devices):
    square = lambda params, batch, key: jnp.mean(params["w"] ** 2) + 0 * jnp.mean(batch["x"])  # noqa: E731
    recipe = vector_recipe(jnp.ones(512), square, 0.1)
    device_state = make_state(recipe, compiled_on(devices, recipe=recipe), fragments=1)
    snapshot = device_state.snapshot()
    device_state.adopt(Adopt("replace", None, 1, ("",)), device_state.place([np.full(512, 0.5, np.float32)]), 0.0)
    train(device_state, 1)
    assert np.all(device_state.payload(snapshot).fragments[0]["s"] == 1)
    device_state.adopt(Adopt("anchor", None, 2, ("",)), device_state.place([np.full(512, 0.25, np.float32)]), 0.0)
    train(device_state, 1)
    assert device_state.payload(device_state.snapshot()).finite


def test_deleted_holder_frees_its_arrays_at_once():
    device_state = make_state(USUAL, compiled_on(1))
    train(device_state, 2)
    freed = weakref.ref(device_state)
    gc.disable()
    try:
        del device_state
        assert freed() is None
    finally:
        gc.enable()


def test_ramp_raises_updates_to_their_full_size():
    falling = lambda params, batch, key: params["w"].sum() + 0 * jnp.mean(batch["x"])  # noqa: E731  # by 1 a step
    recipe = vector_recipe(jnp.zeros(3), falling, 1.0)
    device_state = make_state(recipe, compiled_on(1, recipe=recipe), fragments=1)
    device_state.ramp()
    values = [0.0]
    for step in range(RAMP_STEPS + 2):
        train(device_state, 1, first=step)
        values.append(float(device_state.state.params["w"][0]))
    np.testing.assert_allclose(
        -np.diff(values), [min(1, (step + 1) / RAMP_STEPS) for step in range(RAMP_STEPS + 2)], atol=1e-5
    )


def member(folder, target="tests.train.toy:toy", own=None, begun=None, **settings):
    swarm = Swarm("run", 1, cycle=4, outer="average", outer_lr=None, quantize="plain", overlap=False, fragments=1)
    settings = {"batch": 16, "seed": 0, "eval_batch": None, "init_from": None, **settings}
    plan = RunPlan(swarm, target, {}, settings, {}, {}, 1, data="", code=code_digest(target), evaluate_every=None)
    plan = replace(plan, layout=begun)
    ready = make_program(plan, folder, jax.devices()[:1], True, lambda n, metrics: None, lambda text: None, own)
    assert ready.digests.config == plan.config
    return ready


def test_run_begun_with_another_packing_keeps_its_layout(tmp_path):
    """Earlier versions packed whole leaves. Other leaves are another layout, which the run refuses."""
    own = member(tmp_path).layout
    whole = sorted(Piece(path, shape) for path, shape in own.leaves.items())
    begun = Layout((tuple(whole[1:]), tuple(whole[:1])))
    assert begun.digest != own.digest
    program = member(tmp_path, begun=begun)
    assert program.layout == begun and program.digests.layout == begun.digest
    state = program.make_state(program.initialize())
    first = begun.join([arrays["s"] for arrays in state.payload(state.snapshot()).fragments])
    again = own.join(member(tmp_path).initialize())
    assert first.keys() == again.keys() and all(same_bits(first[path], again[path]) for path in again)
    assert member(tmp_path, begun=Layout((tuple(whole[1:]),))).layout == own


def with_nan():
    init = lambda key: toy.init(key) | {"unused": jnp.full(7, jnp.nan)}  # noqa: E731
    return supervised(init, toy.loss, optax.sgd(0.1), toy.data())


def test_first_version_holds_numbers(tmp_path):
    with pytest.raises(InputError, match="gives NaN or infinity in unused"):
        member(tmp_path, f"{__file__}:with_nan").initialize()


def with_hooks():
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), toy.splits)
    recipe.hooks = lambda: [
        Every("evaluation", lambda step: {"ragged": [[1], [2, 3]]}),
        Every("evaluation", lambda step: {"average": abs(step.state.ema["layer"]["w"]).sum()}),
        Every("evaluation", lambda step: "a text"),
    ]
    return recipe


def test_hooks_see_the_average_and_one_that_fails_leaves_the_others_alone(tmp_path):
    ready = member(tmp_path, f"{__file__}:with_hooks", ema=0.9)
    device_state, called = ready.make_state(ready.initialize()), []
    average = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, 7), ready.compiled.program.exchange().get(device_state.state)
    )
    row = {"tokens": 32, "version": 2, "eval_loss": 1.0}
    found = ready._inspect(device_state.state, average, row, called.append)
    assert found.row == {**row, "step": 2, "eval_average": 35.0} and len(called) == 3
    first, last = found.texts
    assert first.startswith("a hook returned a dict that cannot be used: ") and last == "a text"


def with_useless_hooks():
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), toy.splits)
    recipe.hooks = lambda: [Every("evaluation", lambda step: Stop("enough")), Every("evaluation", lambda step: {1})]
    return recipe


@pytest.mark.parametrize(("hosts", "count"), [(1, 2), (2, 1)])
def test_each_hint_about_hooks_is_given_once(tmp_path, monkeypatch, hosts, count):
    ready = member(tmp_path, f"{__file__}:with_useless_hooks")
    state, row = ready.make_state(ready.initialize()).state, {"tokens": 16, "version": 1, "eval_loss": 1.0}
    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    first, second = (ready._inspect(state, None, row, lambda seconds: None) for _ in range(2))
    assert len(first.texts) == count and not second.texts


CANVAS = np.zeros((2, 2, 3), np.uint8)


def with_a_canvas():
    recipe = supervised(toy.init, toy.loss, optax.sgd(0.1), toy.splits)

    def draw(colour):
        CANVAS[:] = colour
        return CANVAS

    recipe.pictured = lambda state: draw(1)
    recipe.hooks = lambda: [Every("evaluation", lambda step, colour=colour: draw(colour)) for colour in (2, 3)]
    return recipe


def test_pictures_of_an_evaluation_may_share_one_array(tmp_path):
    ready = member(tmp_path, f"{__file__}:with_a_canvas")
    state = ready.make_state(ready.initialize()).state
    found = ready._inspect(state, None, {"tokens": 16, "version": 1, "eval_loss": 1.0}, lambda seconds: None)
    assert {suffix: int(picture.max()) for suffix, picture in found.pictures.items()} == {"": 1, "-0": 2, "-1": 3}


def test_member_evaluates_in_batches_of_the_requested_size(tmp_path):
    def eval_batch(own=None, **settings):
        return member(tmp_path, own=own, **settings).validation.batch

    assert [eval_batch(), eval_batch(accumulate=2), eval_batch(eval_batch=48), eval_batch(own=4)] == [16, 8, 48, 4]


class Reader:
    def __init__(self, missing=NO_ROWS):
        self.missing, self.read, self.changed = missing, [], threading.Condition()

    def __call__(self, rows):
        with self.changed:
            self.read.append(rows)
            self.changed.notify_all()
        if rows & self.missing:
            raise InputError("no such rows")
        return rows

    def wait(self, *rows) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(row in self.read for row in rows), 60)


def test_next_rows_of_a_lease_are_read_ahead():
    of, reader = Rows.from_ranges, Reader()
    feed = Prefetch(reader)
    assert feed.next(of((0, 4)), of((4, 8), (20, 24), (40, 80))) == of((0, 4))
    reader.wait(of((4, 8)), of((20, 24)))  # over the gap
    assert feed.next(of((4, 8)), of((20, 24), (40, 42))) == of((4, 8))
    # The lease changed: its head came back. What was read ahead is read again when it is due.
    assert feed.next(of((0, 4)), of((4, 8))) == of((0, 4))
    assert feed.next(of((4, 8)), NO_ROWS) == of((4, 8))
    assert feed.next(of((20, 24)), NO_ROWS) == of((20, 24))
    assert [reader.read.count(of(span)) for span in ((0, 4), (4, 8), (20, 24), (40, 42))] == [2, 2, 2, 0]


def test_error_of_the_source_is_raised_when_its_rows_are_due():
    of = Rows.from_ranges
    feed = Prefetch(reader := Reader(missing=of((4, 8), (12, 16))))
    assert feed.next(of((0, 4)), of((4, 8), (8, 12))) == of((0, 4))
    reader.wait(of((4, 8)))
    assert feed.next(of((8, 12)), of((12, 16))) == of((8, 12))  # the other rows went to another member
    with pytest.raises(InputError, match="no such rows"):
        feed.next(of((12, 16)), NO_ROWS)


def test_speed_counts_finished_steps_only():
    """Devices take 2 s for a step of 8 rows; dispatch takes none, the first step a minute; training pauses."""
    speed, now, done_at, running = Speed(), 0.0, 0.0, 0
    for step in range(60):
        if step % 10 == 9:  # no rows: the devices finish, then time passes
            now = max(now, done_at)
            speed.steps_done(running, now)
            running, now = 0, now + 1000
        now += 500 * (step == 45)  # the whole machine was stopped
        speed.step_starts(8, now)
        before, done_at = done_at, max(now, done_at) + (60.0 if step == 0 else 2.0)
        now = max(now, before)  # train returns when the step before is done
        speed.steps_done(running, now)
        running = 8
        assert speed.rows_per_s is None if step < 2 else speed.rows_per_s == pytest.approx(4.0)
    synchronous, now = Speed(), 0.0
    for _ in range(5):
        synchronous.step_starts(8, now)
        synchronous.steps_done(8, now + 2)
        now += 1002
    assert synchronous.rows_per_s == pytest.approx(4.0) and not synchronous.running
