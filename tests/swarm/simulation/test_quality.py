"""The simulation of quality computes what members and coordinator do, and shows why momentum waits for a quorum."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benchmarks.simulated_quality import Arm, held_out_loss, simulate

from tpuswarm import supervised
from tpuswarm.swarm.core import member_state
from tpuswarm.swarm.core.arithmetic.adopt import add, mix
from tpuswarm.swarm.core.arithmetic.merge import Contribution
from tpuswarm.swarm.core.arithmetic.outer import OuterRule, commit_fragment, initial_state, state_rows
from tpuswarm.swarm.core.arithmetic.quantize import BITS, Quantized, empty, encode, feedback
from tpuswarm.swarm.core.member_state import Adopt, MemberState
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.train.recipe import Clock, Options

SIZE, ROWS = 300, 512  # two quantization blocks


def data(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, SIZE)).astype(np.float32) / np.sqrt(np.float32(SIZE))
    truth = np.random.default_rng(9).standard_normal(SIZE).astype(np.float32)
    return {"x": x, "y": x @ truth + 0.1 * random.standard_normal(ROWS).astype(np.float32)}


def regression(optimizer, rate: float, noise: float = 0.0):
    """Learning rates fall to 0, and noise depends on the step: a wrong clock is a wrong result."""

    def loss(params, batch, key):
        off = noise * jax.random.normal(key, batch["y"].shape) if noise and key is not None else 0.0
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"] + off))

    recipe = supervised(
        lambda key: {"w": jax.random.normal(key, (SIZE,))}, loss, lambda rate, decay_mask: optimizer(rate),
        {"train": data(0), "validation": data(1)}.get, lambda progress: rate * (1 - progress),
    )  # fmt: skip
    return recipe.program(Options()), recipe.data("train"), recipe.data("validation")


def train_by_hand(program, source, arm: Arm, batch: int, steps: int, seed: int) -> np.ndarray:
    """The last version: NumPy's commits, the members' own books, a Python loop over steps of the program."""
    rows_of_step, longest = batch // len(arm.cycle), max(arm.cycle)
    init_key, step_key = jax.random.split(jax.random.key(seed))
    step, exchange = jax.jit(program.step), program.exchange()
    theta = np.asarray(exchange.get(program.init(init_key))["w"])
    outer_state, gathered = initial_state(arm.outer, theta), 0
    members = []
    for number in range(len(arm.cycle)):
        digests = Digests(*"abcd")
        terms = Terms("run", digests, rows_of_step, 1, batch * steps, longest * rows_of_step, (), arm.outer)
        life = MemberState(terms, "plain", True, Incarnation(f"m{number}", "1"), 0, 0)
        members.append({"state": program.init(init_key), "base": theta, "left": np.zeros_like(theta), "life": life})

    def adopt(member):
        if version := member.pop("news", None):
            new, tokens = version
            now = jax.tree.map(jnp.copy, exchange.get(member["state"]))
            keep = member["life"].own_share if arm.adopt == "mix" else arm.adopt
            trees = now, {"w": jnp.array(new)}, {"w": jnp.array(member["snapshot"])}
            mine = add(*trees) if keep == "add" else mix(*trees, keep)
            member["state"], member["base"] = exchange.put(member["state"], mine), new
            member["life"] = member_state.after_adoption(member["life"], Adopt("snapshot", None, 0, ()), tokens)

    for start in range(0, batch * steps, sum(arm.cycle) * rows_of_step):
        for number, member in enumerate(members):
            cycle = arm.cycle[number]
            first = start + sum(arm.cycle[:number]) * rows_of_step
            member["life"] = replace(member["life"], todo=Rows.from_ranges((first, first + cycle * rows_of_step)))
            for own in range(1, cycle + 1):
                if -(-own * longest // cycle) > arm.delay:
                    adopt(member)
                rows = member["life"].next_rows
                ((first, _),) = rows.ranges
                done, whole = member["life"].progress
                number = np.int32(first // rows_of_step)
                clock = Clock(jax.random.fold_in(step_key, number), number, np.float32(done / whole))
                member["state"], _ = step(member["state"], source.rows(first, rows_of_step), clock)
                member["life"] = member_state.after_step(member["life"], rows)
            adopt(member)
            member["life"] = member_state.after_snapshot(member["life"])
            member["snapshot"] = np.asarray(exchange.get(member["state"])["w"])
        tokens = start
        for at in range(0, len(members), arm.at_once):
            part = members[at : at + arm.at_once]
            norms = [np.linalg.norm(member["base"] - member["snapshot"]) for member in part]
            counts = [len(member["life"].undecided.rows) for member in part]
            contributions = []
            for member, norm, count in zip(part, norms, counts, strict=True):
                clip = min(1.0, 3 * np.median(norms) / norm) if len(part) > 2 else 1.0
                payload = member["snapshot"]
                if arm.bits < 32:
                    delta = member["base"] - payload + (member["left"] if arm.feedback else np.float32(0))
                    codes, scales = encode(delta, arm.bits)
                    member["left"] = feedback(delta, codes, scales, arm.bits)
                    payload = Quantized(codes, scales, arm.bits)
                contributions.append(Contribution(count / sum(counts), clip, member["base"], payload))
            rate = arm.outer.rate_for(sum(counts) ** 2 / sum(count**2 for count in counts))
            quorum = arm.quorum or len(members)
            gathered += len(part)
            if arm.outer.rule == "average" or gathered >= quorum:
                gathered = 0
            rows = state_rows(arm.outer, gathered)
            theta, after = theta.copy(), np.empty((rows, theta.size), np.float32) if rows else None
            sent = None if arm.outer.downlink == "plain" else empty(theta.size, BITS[arm.outer.downlink])
            commit_fragment(
                theta, outer_state, contributions, arm.outer, rate, min(1, len(part) / quorum), theta, after, sent
            )  # fmt: skip
            outer_state, tokens = after, tokens + sum(counts)
            for member in part:
                member["news"] = (theta, tokens)
    return theta


def test_simulation_equals_a_loop_over_members_and_commits():
    """Two commits of two members, with both links quantized."""
    outer = OuterRule("nesterov", 0.5, downlink="int8")
    arm = Arm((3,) * 4, outer, bits=4, together=2, quorum=2, delay=1)
    program, source, _ = regression(optax.adam, 0.05, noise=0.1)
    batch, steps = 2 * len(arm.cycle), 4 * sum(arm.cycle) // len(arm.cycle)
    found = simulate(program, source, arm, batch=batch, steps=steps, seed=1).params["w"]
    expected = train_by_hand(program, source, arm, batch, steps, 1)
    start = program.init(jax.random.split(jax.random.key(1))[0]).params["w"]
    moved = np.abs(expected - start).max()
    assert moved > 0.2
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * moved)


def test_members_with_cycles_of_one_sgd_step_are_one_member_on_whole_batches():
    """One member with the mean is plain training: the single run that all tables compare with (invariant 2)."""
    program, source, _ = regression(optax.sgd, 2.0)
    init_key, step_key = jax.random.split(jax.random.key(3))
    state, step = program.init(init_key), jax.jit(program.step)
    for at in range(12):
        clock = Clock(jax.random.fold_in(step_key, at), np.int32(at), np.float32(at / 12))
        state, _ = step(state, source.rows(at * 8, 8), clock)
    for cycle, tolerance in [((4,), 1e-6), ((1,) * 2, 1e-5)]:  # contributions of two members are not clipped
        swarm = simulate(program, source, Arm(cycle, OuterRule("average")), batch=8, steps=12, seed=3)
        np.testing.assert_allclose(swarm.params["w"], state.params["w"], rtol=0, atol=tolerance)


def test_momentum_at_every_arrival_is_far_worse():
    program, source, validation = regression(optax.adam, 0.1)

    def final(arm, steps=120):
        state = simulate(program, source, arm, batch=16, steps=steps, seed=0)
        return held_out_loss(program, state, validation, 64, ROWS)

    cycle, outer = (10,) * 4, OuterRule("nesterov")
    delayed = OuterRule("nesterov", rate=outer.rate_for(4))
    untrained = final(Arm(cycle, OuterRule("nesterov", 0.0, 0.0)), steps=10)
    together = final(Arm(cycle))
    assert together < 0.5 * untrained
    assert final(Arm(cycle, delayed, together=1)) < 2 * together
    assert final(Arm(cycle, delayed, together=1, quorum=1)) > 10 * together
    quantized = OuterRule("nesterov", downlink="int8")
    assert final(Arm((10, 5, 10, 5), quantized, bits=4, delay=2, adopt="add")) < 0.5 * untrained
