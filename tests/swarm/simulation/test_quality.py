"""The simulation of quality: one loop of the real arithmetic says what it computes; the controls of invariant 13."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks import quality as benchmark

from tpuswarm import supervised
from tpuswarm.swarm.core import books
from tpuswarm.swarm.core.arithmetic.adopt import add, mix
from tpuswarm.swarm.core.arithmetic.merge import Contribution
from tpuswarm.swarm.core.arithmetic.outer import Outer, commit, first_state, state_rows
from tpuswarm.swarm.core.arithmetic.quantize import BITS, Quantized, empty, encode, feedback
from tpuswarm.swarm.core.books import Adopt, Member
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.simulation import quality
from tpuswarm.swarm.simulation.quality import Arm, held_out_loss, simulate
from tpuswarm.train.recipe import Clock, Options

f32 = np.float32
SIZE, ROWS = 300, 512  # two quantization blocks
NESTEROV, AVERAGE = Outer("nesterov"), Outer("average")


def data(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, SIZE)).astype(f32) / np.sqrt(f32(SIZE))
    truth = np.random.default_rng(9).standard_normal(SIZE).astype(f32)
    return {"x": x, "y": x @ truth + 0.1 * random.standard_normal(ROWS).astype(f32)}


def init(key):
    return {"w": jax.random.normal(key, (SIZE - 1,)), "b": jnp.zeros(1)}


def loss(params, batch, key, noise=0.0):
    off = noise * jax.random.normal(key, batch["y"].shape) if noise and key is not None else 0.0
    return jnp.mean(jnp.square(batch["x"] @ jnp.concatenate([params["b"], params["w"]]) - batch["y"] + off))


def adam(rate, decay_mask):
    return optax.adam(rate)


def sgd(rate, decay_mask):
    return optax.sgd(rate)


def linear(optimizer, rate: float, noise: float = 0.0):
    """Learning rates fall to 0 and noise comes from the clock: a wrong clock is a wrong result."""
    splits = {"train": data(0), "validation": data(1)}
    recipe = supervised(init, partial(loss, noise=noise), optimizer, splits.get, lambda progress: rate * (1 - progress))
    return recipe.program(Options()), recipe.data("train"), recipe.data("validation")


def vector(program, state) -> np.ndarray:
    params = program.exchange().get(state)
    return np.concatenate([params["b"], params["w"]])


def tree(flat):
    return {"b": jnp.array(flat[:1]), "w": jnp.array(flat[1:])}


def by_hand(program, source, arm: Arm, batch: int, steps: int, seed: int) -> np.ndarray:
    """The last version: NumPy's commits, the members' own books, a Python loop over steps of the program."""
    size = batch // len(arm.cycle)
    whole = sum(arm.cycle) * size
    init_key, step_key = jax.random.split(jax.random.key(seed))
    step = jax.jit(program.step)
    theta = vector(program, program.init(init_key))
    outer_state, gathered = first_state(arm.outer, theta), 0
    everyone = []
    for number in range(len(arm.cycle)):
        terms = Terms("run", Digests(*"abcd"), size, 1, batch * steps, max(arm.cycle) * size, (), arm.outer)
        life = Member(terms, "plain", True, Incarnation(f"m{number}", "1"), 0, 0)
        everyone.append({"state": program.init(init_key), "base": theta, "left": np.zeros_like(theta), "life": life})

    def take_up(one):
        if version := one.pop("news", None):
            new, tokens = version
            now = program.exchange().get(one["state"])
            trees = jax.tree.map(jnp.copy, now), tree(new), tree(one["s"])
            keep = one["life"].keep if arm.adopt == "mix" else arm.adopt
            mine = add(*trees) if keep == "add" else mix(*trees, keep)
            one["state"], one["base"] = program.exchange().put(one["state"], mine), new
            one["life"] = books.adopted(one["life"], Adopt("snapshot", None, 0, ()), tokens)

    for start in range(0, batch * steps, whole):
        for number, one in enumerate(everyone):
            first = start + sum(arm.cycle[:number]) * size
            one["life"] = replace(one["life"], todo=Rows.of((first, first + arm.cycle[number] * size)))
            for own in range(1, arm.cycle[number] + 1):
                if -(-own * max(arm.cycle) // arm.cycle[number]) > arm.delay:
                    take_up(one)
                rows = one["life"].next_rows
                ((first, _),) = rows.ranges
                share = f32(one["life"].progress[0] / one["life"].progress[1])
                clock = Clock(step_key, np.int32(first // size), share)
                one["state"], _ = step(one["state"], source.rows(first, size), clock)
                one["life"] = books.trained(one["life"], rows)
            take_up(one)
            one["life"] = books.snapshot(one["life"])
            one["s"] = vector(program, one["state"])
        tokens = start
        for at in range(0, len(everyone), arm.at_once):
            part = everyone[at : at + arm.at_once]
            norms = [np.linalg.norm(one["base"] - one["s"]) for one in part]
            counted = [len(one["life"].undecided.rows) for one in part]
            contributions = []
            for one, norm, count in zip(part, norms, counted, strict=True):
                clip = min(1.0, 3 * np.median(norms) / norm) if len(part) > 2 else 1.0
                payload = one["s"]
                if arm.bits < 32:
                    wanted = one["base"] - one["s"] + (one["left"] if arm.feedback else f32(0))
                    codes, scales = encode(wanted, arm.bits)
                    one["left"] = feedback(wanted, codes, scales, arm.bits)
                    payload = Quantized(codes, scales, arm.bits)
                contributions.append(Contribution(count / sum(counted), clip, one["base"], payload))
            rate = arm.outer.rate_for(sum(counted) ** 2 / sum(count**2 for count in counted))
            gathered += len(part)
            quorum = arm.quorum or len(everyone)
            moves = arm.outer.rule == "average" or gathered >= quorum
            gathered = 0 if moves else gathered
            rows = state_rows(arm.outer, gathered)
            theta, after = theta.copy(), np.empty((rows, theta.size), f32) if rows else None
            sent = None if arm.outer.downlink == "plain" else empty(theta.size, BITS[arm.outer.downlink])
            share = min(1, len(part) / quorum)
            commit(theta, outer_state, contributions, arm.outer, rate, share, theta, after, sent)
            outer_state, tokens = after, tokens + sum(counted)
            for one in part:
                one["news"] = (theta, tokens)
    return theta


ARMS = {
    "overlap of a whole cycle, 4 bits": Arm((6, 6), AVERAGE, bits=4, delay=6),
    "all that members had, kept": Arm((5, 5), NESTEROV, delay=2, adopt="add"),
    "halves": Arm((5, 5), NESTEROV, delay=2, adopt=0.5),
    "unequal, clipped, overlap, 2 bits": Arm((1, 1, 10), NESTEROV, bits=2, feedback=False, delay=3),
    "unequal, delayed": Arm((4, 2, 4, 2), Outer("nesterov", rate=0.5), together=1),
    "two commits of two, both links quantized": Arm(
        (3,) * 4, Outer("nesterov", 0.5, downlink="int8"), bits=4, together=2, quorum=2, delay=1
    ),
}


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_it_computes_what_the_real_arithmetic_does(arm):
    program, source, _ = linear(adam, 0.05, noise=0.1)
    batch, steps = 2 * len(arm.cycle), 4 * sum(arm.cycle) // len(arm.cycle)
    got = vector(program, simulate(program, source, arm, batch=batch, steps=steps, seed=1))
    want = by_hand(program, source, arm, batch, steps, 1)
    moved = np.abs(want - vector(program, program.init(jax.random.split(jax.random.key(1))[0]))).max()
    assert moved > 0.2
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * moved)


def test_many_members_with_cycles_of_one_step_of_sgd_are_one_on_whole_batches():
    """Invariant 2, and the single run that all tables compare with: one member with the mean is plain training."""
    program, source, _ = linear(sgd, 2.0)
    init_key, step_key = jax.random.split(jax.random.key(3))
    state, step = program.init(init_key), jax.jit(program.step)
    for at in range(12):
        state, _ = step(state, source.rows(at * 8, 8), Clock(step_key, np.int32(at), f32(at / 12)))
    train = partial(simulate, program, source, batch=8, steps=12, seed=3)
    alone, plain = vector(program, train(Arm((4,), AVERAGE))), vector(program, state)
    np.testing.assert_allclose(alone, plain, rtol=0, atol=1e-6)
    np.testing.assert_allclose(vector(program, train(Arm((1,) * 4, AVERAGE))), plain, rtol=0, atol=1e-5)
    assert np.abs(vector(program, train(Arm((2,) * 4, AVERAGE))) - plain).max() > 1e-3


def test_momentum_at_every_arrival_is_far_worse():
    program, source, validation = linear(adam, 0.1)

    def final(arm, steps=120):
        state = simulate(program, source, arm, batch=16, steps=steps, seed=0)
        return held_out_loss(program, state, validation, 64, ROWS)

    cycle, rate = (10,) * 4, Outer("nesterov", rate=NESTEROV.rate_for(4))
    untrained = final(Arm(cycle, Outer("nesterov", 0.0, 0.0)), steps=10)
    ours, delayed = final(Arm(cycle)), final(Arm(cycle, rate, together=1))
    assert ours < 0.5 * untrained
    assert delayed < 2 * ours
    assert final(Arm(cycle, rate, together=1, quorum=1)) > 10 * ours


def test_deltas_below_half_a_step_move_nothing_without_feedback():
    slope = np.where(np.arange(SIZE) % 256 == 0, 1.0, np.linspace(0.001, 0.003, SIZE)).astype(f32)
    small = slope < 1

    def steep(params, batch, key):
        return jnp.vdot(slope, params["w"]) + 0 * batch["x"].sum()

    recipe = supervised(lambda key: {"w": jax.random.normal(key, (SIZE,))}, steep, optax.sgd(0.1), data(0))
    program, source = recipe.program(Options()), recipe.data("train")

    def final(arm):
        state = simulate(program, source, arm, batch=2, steps=200, seed=0)
        return np.asarray(program.exchange().get(state)["w"])

    start = np.asarray(program.init(jax.random.split(jax.random.key(0))[0]).params["w"])
    without = final(Arm((2, 2), AVERAGE, 8, feedback=False))
    assert without[small].tobytes() == start[small].tobytes()
    np.testing.assert_allclose((start - without)[~small], 20, rtol=1e-3)
    true = 20 * slope[small]
    half_a_step = 0.2 / 127 / 2
    np.testing.assert_allclose((start - final(Arm((2, 2), AVERAGE, 8)))[small], true, atol=1.1 * half_a_step)


def test_what_cannot_be_is_said():
    for wrong, words in [
        ({"cycle": (3, 0)}, "at least 1 step a cycle"),
        ({"bits": 5}, "not 5"),
        ({"delay": 31}, "31 steps does not fit into a cycle of 30"),
        ({"together": 3}, "4 members cannot be counted 3 at a time"),
    ]:
        with pytest.raises(ValueError, match=words):
            Arm(**wrong)
    program, source, _ = linear(sgd, 1.0)
    for batch, steps in [(9, 30), (8, 31)]:
        with pytest.raises(ValueError, match=f"4 members do not divide batches of {batch} rows, or {steps} steps"):
            simulate(program, source, Arm(), batch=batch, steps=steps, seed=0)


def test_the_large_size_traces(tmp_path):
    """Nothing of it is computed here: 35 M parameters, 8 members."""
    text = tmp_path / "text"
    text.write_text("a text " * 2000)
    size = benchmark.SIZES["35m"]
    program, arm = benchmark.Runs(size, str(text)).program, Arm((30,) * 8)
    swarm = jax.eval_shape(partial(quality.start, program=program, arm=arm), jax.random.key(0))
    assert 34.5e6 < swarm.theta.size < 35.5e6
    rows = {
        name: jax.ShapeDtypeStruct((8, 30, *spec.shape), spec.dtype)
        for name, spec in program.batch_spec(size.batch // 8).items()
    }
    after, norms = jax.eval_shape(
        partial(quality.train, program=program),
        swarm.members,
        rows,
        quality.ticks_of(arm, 0, 40),
        0,
        arm.keep,
        jax.random.key(0),
    )
    assert norms.shape == (8,) and jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, swarm.members)


def test_differences_below_two_standard_errors_are_no_claim():
    assert benchmark.difference([0.1, 0.12, 0.08], 2.0) == "+0.1000 ± 0.0115 (+5.0%)"
    assert benchmark.difference([0.1, -0.02, 0.03], 2.0) == "+0.0367 ± 0.0348: no claim"
    assert benchmark.difference([0.1, float("nan")], 2.0) == "diverged"
